"""What else is done with a planned module than calling it: copies, pickles, replaced tensors, transforms."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.optim.swa_utils import AveragedModel

from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.pytorch import checkpointed
from scheduler.pytorch.capture.arguments import read_arguments
from scheduler.pytorch.costs.progress import TracingProgress
from scheduler.pytorch.execute.guards import call_key
from scheduler.solution import Progress
from tests.support.pytorch.regression import batch, mean_square

FAST: dict[str, object] = {"costs": "flops", "solver": "save-all"}
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in forward-mode AD
GRANULARITIES = pytest.mark.parametrize("granularity", ["operations", "layers"])


class Scaled(nn.Sequential):
    """A sequence with a parameter and a buffer of its own root."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def planned(model: nn.Module, **options: object) -> nn.Module:
    return checkpointed(model, "100%", (batch(3, 4),), **{"loss": mean_square, **FAST, **options})


def test_the_progress_of_capturing_and_of_the_search_is_reported():
    seen: list[object] = []
    planned(network(), progress=seen.append)
    kinds = [type(entry) for entry in seen]
    assert kinds[0] is TracingProgress
    assert kinds[-1] is Progress
    assert {*kinds} == {TracingProgress, Progress}


def test_progress_must_be_a_function():
    with pytest.raises(InvalidOptionError, match="progress must be a function or None, got 1"):
        planned(network(), progress=1)


@GRANULARITIES
@pytest.mark.parametrize(
    "action",
    [copy.deepcopy, copy.copy, pickle.dumps, lambda module: torch.save(module, io.BytesIO()), AveragedModel],
    ids=["deepcopy", "copy", "pickle", "torch.save", "AveragedModel"],
)
def test_a_copy_or_a_pickle_is_refused_with_what_to_do(granularity, action):
    module = planned(network(), granularity=granularity)
    with pytest.raises(ExecutionError, match=r"(?s)copy the original.*state_dict\(\) and plan\.save\(PATH\)"):
        action(module)


def test_what_the_refusal_of_a_copy_says_works(tmp_path):
    module = planned(network())
    again = checkpointed(copy.deepcopy(module.module), module.plan, (batch(3, 4),), loss=mean_square)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    again.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(again(batch(3, 4)), module(batch(3, 4)))


def test_a_functional_call_computes_what_the_plain_one_does():
    model = Scaled()
    module = planned(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    others = other_tensors(model)
    x = batch(3, 4)
    ours = torch.func.functional_call(module, others, (x,))
    theirs = mean_square(torch.func.functional_call(model, others, (x,)))
    assert torch.equal(ours, theirs)
    trained = [tensor for tensor in others.values() if tensor.requires_grad]
    for one, other in zip(torch.autograd.grad(ours, trained), torch.autograd.grad(theirs, trained), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(module(x), mean_square(model(x)))


def other_tensors(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict(keep_vars=True)
    return {name: (3 * tensor.detach()).requires_grad_(tensor.requires_grad) for name, tensor in kept.items()}


def test_the_backward_of_layers_after_a_functional_call_is_refused():
    model = network()
    module = planned(model, granularity="layers")
    others = other_tensors(model)
    x = batch(3, 4)
    ours = torch.func.functional_call(module, others, (x,))
    assert torch.equal(ours, mean_square(torch.func.functional_call(model, others, (x,))))
    with pytest.raises(ExecutionError, match=r'layer "0\.Linear" has other parameters.*granularity="operations"'):
        ours.backward()
    module(x).backward()


def test_a_functional_call_with_tensors_that_require_no_gradient_is_refused():
    module = planned(Scaled())
    with pytest.raises(ExecutionError, match=r'parameter "scale" is .*False'):
        torch.func.functional_call(module, {"scale": torch.ones(4)}, (batch(3, 4),))


@GRANULARITIES
@pytest.mark.parametrize("on_mismatch", ["error", "plan"])
def test_a_transform_is_refused(granularity, on_mismatch):
    module = planned(network(), granularity=granularity, on_mismatch=on_mismatch)
    x = batch(3, 4)
    for transform in (
        lambda: torch.func.vmap(module)(batch(2, 3, 4)),
        lambda: torch.func.grad(module)(x),
        lambda: torch.func.jvp(module, (x,), (x,)),
        lambda: torch.func.grad(lambda values: torch.func.functional_call(module, values, (x,)))(
            dict(module.named_parameters())
        ),
        lambda: dual(module, x),
    ):
        with pytest.raises(ExecutionError, match=r'inside a transform of torch\.func.*in the attribute "module"'):
            transform()
    module(x).backward()


def dual(module: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, x))).tangent


@GRANULARITIES
def test_a_transform_runs_plainly_if_mismatches_do(granularity):
    model = network()
    module = planned(model, granularity=granularity, on_mismatch="plain")
    x = batch(3, 4)
    expected = torch.func.grad(lambda x: mean_square(model(x)))(x)
    assert torch.equal(torch.func.grad(module)(x), expected)
    assert torch.equal(dual(module, x), (expected * x).sum()) or torch.allclose(dual(module, x), (expected * x).sum())


def test_attributes_of_the_original_are_found_and_other_names_are_not():
    module = planned(Scaled())
    assert module.scale is module.module.scale
    assert getattr(module, "0") is module.module[0]
    module.scale = nn.Parameter(torch.full((4,), 5.0))
    assert module.module.scale[0].item() == 5.0
    assert "scale" not in module._parameters
    assert not hasattr(module, "unknown")


ENTRIES = [
    ({"x": 1, "id": "b"}, r"args\[0\]\['id'\] is 'b', but the plan has 'a'"),
    ({"x": 1, "id": "a", "more": 2}, r"args\[0\]\['more'\] is new: the plan has args\[0\]\['x'\], args\[0\]\['id'\]"),
    ({"x": 1}, r"args\[0\]\['id'\] is missing, but the plan has it"),
]


@pytest.mark.parametrize(("argument", "expected"), ENTRIES)
def test_an_entry_of_an_argument_that_differs_is_named(argument, expected):
    planned = call_key(*read_arguments(({"x": 1, "id": "a"},), {}))
    with pytest.raises(ValueError, match=expected):
        raise ValueError(call_key(*read_arguments((argument,), {})).difference(planned))
