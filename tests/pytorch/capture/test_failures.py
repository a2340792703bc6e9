"""What is said where a model cannot be captured: whose fault it is, and the line of the user's code."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.distributions import Normal
from torch.utils import _pytree as pytree

from scheduler.errors import CaptureError
from scheduler.pytorch import checkpointed, profile_layers, trace
from scheduler.pytorch.source_lines import line_of_error

X = torch.ones(2, 4)
SAVE_ALL: dict[str, object] = {"costs": "flops", "solver": "save-all"}


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        h = self.norm(self.linear(x))
        return torch.dropout(h, 0.5, True) + y  # the line that fails


def line_of(text: str) -> str:
    """Return the pattern of FILE:LINE for the line of this file that contains a text."""
    with open(__file__) as file:
        number = next(i for i, line in enumerate(file, 1) if text in line)
    return re.escape(f"{__file__}:{number}")


def test_a_model_that_fails_on_its_arguments_is_not_called_uncapturable():
    with pytest.raises(CaptureError, match=r"Adds itself fails on these arguments.*RuntimeError.*size") as caught:
        trace(Adds(), (X, torch.ones(3)), loss=torch.sum, costs="flops")
    assert re.search(line_of("# the line that fails"), str(caught.value))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert line_of_error(caught.value.__cause__).text.startswith("return torch.dropout(h, 0.5, True) + y")


def test_a_missing_argument_is_the_models_own_error():
    with pytest.raises(CaptureError, match=r"itself fails.*TypeError.*missing 1 required positional argument: 'y'"):
        trace(Adds(), (X,), loss=torch.sum, costs="flops")


def test_a_loss_that_fails_is_named_by_its_line():
    with pytest.raises(CaptureError, match=r"itself fails.*KeyError") as caught:
        trace(Adds(), (X, X), loss=lambda y: {}["target"] + y, costs="flops")  # a loss without its target
    assert re.search(line_of("# a loss without its target"), str(caught.value))


@pytest.mark.parametrize("granularity", ["auto", "operations", "layers"])
def test_a_sequence_that_fails_on_its_arguments_says_so_at_every_granularity(granularity):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with pytest.raises(CaptureError, match=r"Sequential itself fails.*mat1 and mat2 shapes cannot be multiplied"):
        checkpointed(model, "100%", (torch.ones(2, 5),), loss=torch.sum, granularity=granularity)


def test_layers_that_fail_name_the_line_of_the_user():
    def fails(x: Tensor) -> Tensor:
        return x.reshape(5, 5)  # a layer that fails

    with pytest.raises(CaptureError, match=line_of("# a layer that fails")):
        profile_layers([nn.Linear(4, 4), fails], (X,), loss=torch.sum)


def test_a_model_is_left_as_it_was_by_a_capture_that_fails():
    model = Adds()
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    with pytest.raises(CaptureError):
        trace(model, (X, torch.ones(3)), loss=torch.sum, costs="flops")
    assert model.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_arguments_changed_in_place_are_put_back():
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(1)
            return self.linear(x) + torch.ones(3)

    x = X.clone()
    with pytest.raises(CaptureError, match="itself fails"):
        trace(Changes(), (x,), loss=torch.sum, costs="flops")
    assert torch.equal(x, X)


def test_a_refused_branch_names_the_line_of_the_user():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y.sum() if y.sum() > 0 else y.square().sum()  # a branch on a value

    with pytest.raises(CaptureError, match=line_of("# a branch on a value")) as caught:
        trace(Branching(), (X,), costs="flops")
    assert "return y.sum() if y.sum() > 0 else y.square().sum()" in str(caught.value)
    assert "cannot be captured as one graph" in str(caught.value)


def test_a_refusal_names_the_line_of_each_attempt():
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            if torch.compiler.is_compiling():
                torch._dynamo.graph_break()  # only TorchDynamo stops here
            return x.sum() if self.linear(x).sum() > 0 else -x.sum()  # the direct attempt stops here

    pattern = rf"Traced directly: .*{line_of('# the direct attempt')}.*TorchDynamo: .*{line_of('# only TorchDynamo')}"
    with pytest.raises(CaptureError, match=pattern):
        trace(Branching(), (X,), costs="flops")


def quantized(config: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        model.qconfig = quantization.get_default_qat_qconfig(config)
        return quantization.prepare_qat(model.train())


@pytest.mark.parametrize("granularity", ["operations", "layers"])
def test_a_quantization_aware_model_is_planned_once_its_observers_have_seen_a_batch(granularity):
    model = quantized("fbgemm")
    name = r"0\.weight_fake_quant\.scale" if granularity == "operations" else "min_val"
    with pytest.raises(CaptureError, match=rf"{name}.*another shape.*call the model once in training mode"):
        checkpointed(model, "100%", (X,), loss=torch.sum, granularity=granularity, **SAVE_ALL)
    with torch.no_grad():
        model(X)
    module = checkpointed(model, "100%", (X,), loss=torch.sum, granularity=granularity, **SAVE_ALL)
    for seed in range(3):
        batch = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        assert module.verify(batch).is_equal


class Observes(nn.Module):
    """Fake quantization written by hand: its observer gets its shape from the first batch."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.linear = nn.Linear(4, 4)
        self.register_buffer("high", torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            high = self.linear.weight.amax(1)
            if self.high.numel():
                self.high.lerp_(high, 0.1)
            elif self.way == "resizes":
                self.high.resize_(4).copy_(high)
            else:
                self.high = high
        scale, zero = (self.high.abs() + 1) / 127, torch.zeros(4, dtype=torch.int32)
        weight = torch.fake_quantize_per_channel_affine(self.linear.weight, scale, zero, 0, -128, 127)
        return nn.functional.linear(x, weight, self.linear.bias)


@pytest.mark.parametrize("way", ["resizes", "replaces"])
def test_an_observer_that_gets_its_shape_in_the_first_step_is_refused_until_it_has_it(way):
    model = Observes(way)
    with pytest.raises(CaptureError, match="forward gives high another shape"):
        trace(model, (X,), loss=torch.sum, costs="flops")
    assert model.high.shape == (0,)
    with torch.no_grad():
        model(X)
    assert checkpointed(model, "100%", (X,), loss=torch.sum, **SAVE_ALL).verify(X).is_equal


def test_an_observer_among_layers_is_refused_until_it_has_its_shape():
    model = nn.Sequential(Observes("resizes"))
    with pytest.raises(CaptureError, match="forward gives high another shape"):
        profile_layers(model, (X,), loss=torch.sum)
    with torch.no_grad():
        model(X)
    module = checkpointed(model, "100%", (X,), loss=torch.sum, granularity="layers", solver="save-all")
    assert module.verify(X).is_equal


@dataclass
class Pair:
    first: Tensor
    second: Tensor


@dataclass
class RegisteredPair:
    first: Tensor
    second: Tensor


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    def forward(self, x: Tensor) -> object:
        h = self.linear(x)
        return self.make(h.sin(), h)


def test_an_object_of_a_library_with_tensors_among_the_outputs_is_refused_with_what_to_do():
    with pytest.raises(CaptureError, match=r"returns an object of type Normal.*pass loss="):
        checkpointed(Returns(lambda a, b: Normal(a, b, validate_args=False)), "100%", (X,), **SAVE_ALL)


@pytest.mark.parametrize("make", [Pair, lambda a, b: (a, SimpleNamespace(cache=[b]))], ids=["dataclass", "object"])
def test_an_object_with_tensors_among_the_outputs_is_built_anew(make):
    found = checkpointed(Returns(make), "100%", (X,), **SAVE_ALL).verify(X)
    assert found.is_equal
    assert type(found.outputs) is type(make(X, X))


def test_dataclass_outputs_work_with_a_loss_and_once_they_are_registered():
    module = checkpointed(Returns(Pair), "100%", (X,), loss=lambda pair: pair.first.sum(), **SAVE_ALL)
    assert module.verify(X).is_equal
    pytree.register_dataclass(RegisteredPair)
    module = checkpointed(Returns(RegisteredPair), "100%", (X,), **SAVE_ALL)
    found = module.verify(X)
    assert found.is_equal
    assert isinstance(found.outputs, RegisteredPair)
