"""Training steps under `torch.compile` with our backend: gradients, and the memory between forward and backward.

    python tests/benchmarks/compiled.py > tests/benchmarks/compiled.csv

Arguments name models and compilers, as in `hf-gpt2 inductor`; of what none is named, all run.
Inductor takes minutes of a CPU for each model, and many for ResNet-50.

Each model trains in double precision on a batch, then on a batch of another size. The error
is the largest difference of a gradient over the largest entry of all gradients (that of a key's
bias is zero but for rounding), at either size: from plain PyTorch, or, for models with dropout
under Inductor, whose random numbers are its own, from `torch.compile` without us under the same
seed. Memory is what autograd holds when the forward has run, without parameters, buffers and
inputs; measured by asking the autograd node.
"""

from __future__ import annotations

import copy
import csv
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scheduler.pytorch import backend
from scheduler.pytorch.measurement.memory import resident_tensors, storage_bytes
from scheduler.pytorch.models.catalog import make_model

BUDGET = "85%"
MODELS: dict[str, dict[str, int]] = {
    "hf-gpt2": {"layers": 1, "width": 64, "vocabulary": 256, "length": 64},
    "resnet50": {"width": 8, "size": 64, "classes": 10},
    "hf-vit": {"layers": 1, "width": 48, "size": 64},
}
BATCH_SIZES = (4, 6)
Arguments = tuple[tuple[object, ...], dict[str, object]]


class Step(nn.Module):
    """A model with its loss, in double precision."""

    def __init__(self, name: str) -> None:
        super().__init__()
        case = make_model(name, **MODELS[name])
        self.model = case.module.double()
        self.loss = case.loss or (lambda outputs: outputs)
        # transformers would log that it chooses the loss, which TorchDynamo does not capture.
        self.model.loss_type = "ForCausalLM" if name == "hf-gpt2" else "ForImageClassification"

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return self.loss(self.model(*args, **kwargs))


def batch(name: str, size: int) -> Arguments:
    """Return the arguments of a step, in double precision."""
    args, kwargs = make_model(name, **MODELS[name], batch_size=size).batch(size)

    def double(value: object) -> object:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(double, args)), {key: double(value) for key, value in kwargs.items()}


def train(step: Callable[..., Tensor], module: nn.Module, given: Arguments) -> Tensor:
    """Run a forward and a backward and return the loss, whose node still knows what it saved."""
    module.zero_grad()
    torch.manual_seed(1)
    loss = step(*given[0], **given[1])
    held = held_bytes(loss, module, given)
    loss.backward()
    loss.held_bytes = held  # type: ignore[attr-defined]
    return loss


def held_bytes(loss: Tensor, module: nn.Module, given: Arguments) -> int:
    """Return the bytes that stand between forward and backward beside the resident tensors."""
    resident = resident_tensors(module, given)
    saved = getattr(loss.grad_fn, "saved_tensors", ())
    return storage_bytes([*resident, *saved, loss]) - storage_bytes(resident)


def gradient_error(module: nn.Module, reference: nn.Module) -> float:
    """Return the largest difference of two modules' gradients, relative to the largest entry of all."""
    pairs = [(p.grad, q.grad) for p, q in zip(module.parameters(), reference.parameters(), strict=True)]
    largest = max(float(theirs.abs().max()) for _, theirs in pairs)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs) / largest


def row(name: str, compiler: str) -> list[object]:
    """Train a model at two batch sizes and compare."""
    torch._dynamo.reset()
    module = Step(name)
    reference = copy.deepcopy(module)
    planned = backend(BUDGET, compiler=compiler, time_limit=3.0)  # type: ignore[arg-type]
    ours = torch.compile(module, backend=planned, fullgraph=True)
    draws = any(isinstance(part, nn.Dropout) for part in module.modules())
    theirs = torch.compile(reference, fullgraph=True) if draws and compiler == "inductor" else reference
    error, held = 0.0, []
    for size in BATCH_SIZES:
        given = batch(name, size)
        held.append(train(ours, module, given).held_bytes)  # type: ignore[attr-defined]
        train(theirs, reference, given)
        error = max(error, gradient_error(module, reference))
    shapes = [graph.shapes for graph in planned.plans]
    assert len(set(shapes)) == len(BATCH_SIZES), shapes
    first = planned.plans[0]
    return [name, compiler, f"{error:.0e}", first.saved_bytes, held[0], planned.plans[-1].saved_bytes, held[-1]]


if __name__ == "__main__":
    compilers = [name for name in ("eager", "inductor") if name in sys.argv] or ["eager", "inductor"]
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = [f"{what}, {size}" for size in BATCH_SIZES for what in ("planned bytes", "held bytes")]
    writer.writerow(["model", "compiler", "gradient error", *columns])
    for name in [name for name in MODELS if name in sys.argv] or MODELS:
        for compiler in compilers:
            writer.writerow(row(name, compiler))
            sys.stdout.flush()
