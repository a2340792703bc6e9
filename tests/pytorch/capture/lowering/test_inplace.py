"""The backward gives the same bits when it writes over an input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.lowering.inplace import OVER_FIRST, OVER_FIRST_ON_CPU
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, training_step
from scheduler.pytorch.tracing import capture
from tests.support.pytorch.planning import recompute_most, save_everything

FURTHER_ARGUMENTS = {
    aten.neg.default: lambda x: (),
    aten.mul.Scalar: lambda x: (0.3,),
    aten.div.Scalar: lambda x: (0.3,),
    aten.threshold_backward.default: lambda x: (x, 0),
}


def same_bits(operator, over_first, first: Tensor, *rest: object) -> bool:
    expected = operator(first, *rest)
    assert expected.stride() == first.stride()
    result = over_first(first, *rest, **{a.name: first for a in over_first._schema.arguments if a.is_out})
    assert result.data_ptr() == first.data_ptr()
    return torch.equal(first, expected)


def two_tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(37, 1031, generator=generator).to(dtype) for _ in range(2))
    return first, second


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("operator", "over_first"), OVER_FIRST.items(), ids=str)
def test_each_operator_gives_the_same_bits_over_its_first_argument(operator, over_first, transposed, dtype):
    first, second = two_tensors(dtype)
    if transposed:
        first, second = first.t(), second.t()
    assert same_bits(operator, over_first, first, *FURTHER_ARGUMENTS.get(operator, lambda x: (x,))(second))


@DTYPES
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("operator", "over_first"), OVER_FIRST_ON_CPU.items(), ids=str)
def test_softmax_gives_the_same_bits_over_its_first_argument(operator, over_first, dim, dtype):
    first, second = two_tensors(dtype)
    made = {
        aten._log_softmax_backward_data.default: F.log_softmax,
        aten._softmax_backward_data.default: F.softmax,
    }[operator](second, dim)
    assert same_bits(operator, over_first, first, made, dim, dtype)


def captured(module: nn.Module, *args: Tensor) -> Capture:
    return capture(module, args, {}, None, costs="flops")


def measured_peak(module: nn.Module, args: tuple[Tensor, ...], plain: Capture) -> int:
    step = training_step(build(module, plain, save_everything(plain.graph), args), args)
    step()
    tracker = StorageTracker(resident_tensors(module, args))
    with tracker:
        step()
    return tracker.peak_bytes


class Logits(nn.Module):
    """Its only parameters are the logits."""

    def __init__(self, rows: int, classes: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(rows, classes, generator=torch.Generator().manual_seed(0)))

    def forward(self, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits, targets)


def test_the_gradient_of_the_logits_takes_the_memory_of_the_gradient_of_their_logarithms():
    rows, classes = 64, 256
    module, targets = Logits(rows, classes), torch.zeros(64, dtype=torch.long)
    peak = measured_peak(module, (targets,), captured(module, targets))
    logits = 4 * rows * classes
    # The logarithms and their gradient; loss, its gradient and the number of rows are 4 bytes each.
    assert 2 * logits <= peak <= 2 * logits + 3 * 4
    module.zero_grad()
    module(targets).backward()
    expected = module.logits.grad
    planned = build(module, captured(module, targets), save_everything(captured(module, targets).graph), (targets,))
    module.zero_grad()
    planned(targets).backward()
    assert torch.equal(module.logits.grad, expected)


class Block(nn.Module):
    """Gradients are added where the residual and the branches meet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        functions = (F.gelu, F.silu, F.relu, torch.tanh, torch.sigmoid, F.softplus)
        for layer, function in zip(self.layers, functions, strict=True):
            x = x + function(layer(x)) / 2
        return F.cross_entropy(x, torch.arange(len(x)) % 16)


@pytest.mark.parametrize("schedule_of", [save_everything, recompute_most])
def test_gradients_equal_those_of_eager_whatever_is_recomputed(schedule_of):
    torch.manual_seed(0)
    module, x = Block(), torch.randn(33, 16, requires_grad=True)
    module(x).backward()
    expected = [tensor.grad for tensor in (x, *module.parameters())]
    step = captured(module, x)
    x.grad = None
    module.zero_grad()
    build(module, step, schedule_of(step.graph), (x,))(x).backward()
    for tensor, gradient in zip((x, *module.parameters()), expected, strict=True):
        assert torch.equal(tensor.grad, gradient)


def test_only_tensors_that_are_read_once_are_overwritten_and_their_readers_run_once():
    module, x = Block(), torch.randn(8, 16)
    step = captured(module, x)
    reusing = [
        operation
        for operation, call in zip(step.graph.operations, step.instructions, strict=True)
        if getattr(call, "target", None) in {*OVER_FIRST.values(), *OVER_FIRST_ON_CPU.values()}
    ]
    assert {operation.signature.partition("(")[0] for operation in reusing} >= {
        "aten.add.Tensor",
        "aten.gelu_backward.default",
        "aten._log_softmax_backward_data.default",
    }
    storage = {tensor.name: tensor.storage for tensor in step.graph.tensors}
    for operation in reusing:
        assert not operation.repeatable
        (over,) = (name for name in operation.inputs if storage[name] == storage[operation.outputs[0]])
        readers = [other for other in step.graph.operations if over in other.inputs]
        assert readers == [operation]


def test_the_gradient_that_the_caller_gives_is_not_overwritten():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    step = captured(module, x)
    planned, given = build(module, step, save_everything(step.graph), (x,)), torch.ones(3, 4)
    planned(x).backward(given)
    assert torch.equal(given, torch.ones(3, 4))
