"""Steps whose loss is computed outside of the planned module, from outputs of any kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError
from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.allocator import allocator_peak
from scheduler.pytorch.modules.measuring.recording import record
from scheduler.pytorch.torch_private.pytree import tree_leaves

ROWS, WIDTH, BLOCKS = 256, 64, 4


@dataclass
class Heads:
    """What a model returns, in a class that is no container."""

    logits: Tensor
    hidden: list[Tensor]
    steps: int


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> object:
        hidden = []
        for block in self.blocks:
            x = x + block(x)
            hidden.append(x)
        if self.kind == "tensor":
            return x
        if self.kind == "tuple":
            return x, x.detach().mean(), hidden[1]
        if self.kind == "dict":
            return {"logits": x, "count": len(hidden), "top": {"hidden": hidden[:2]}}
        return Heads(x, hidden[:2], 3)


def tensors_of(outputs: object) -> list[Tensor]:
    values = [outputs.logits, outputs.hidden] if isinstance(outputs, Heads) else outputs
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def loss_of(outputs: object) -> Tensor:
    return torch.stack([tensor.square().mean() for tensor in tensors_of(outputs)]).sum()


def step_of(model: Callable[[Tensor], object], x: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        torch.manual_seed(1)
        loss = loss_of(model(x))
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "object"])
def test_a_loss_may_be_computed_outside_from_outputs_of_any_kind(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Model(kind), torch.randn(ROWS, WIDTH)
    plain = copy.deepcopy(model)
    module = checkpointed(model, "min+25%", (x,), granularity="modules")
    assert module.plan.decisions
    assert torch.equal(step_of(module, x)(), step_of(plain, x)())
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)
    model.zero_grad(set_to_none=True)
    measured = allocator_peak(step_of(module, x))
    squares = 4 * ROWS * WIDTH  # which the loss computes outside
    assert measured - squares <= module.plan.peak_bytes - module.plan.graph.resident_bytes


def test_outputs_and_their_gradients_count() -> None:
    size = 4 * ROWS * WIDTH
    tree = record(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), (torch.randn(ROWS, WIDTH),))
    (held,) = (s for s in tree.storages if s.size_bytes == size)
    assert held.dies == len(tree.segments)
    assert tree.segments[-1].gradient_bytes >= size


def test_outputs_without_gradient_are_refused() -> None:
    class Detached(nn.Linear):
        def forward(self, x: Tensor) -> Mapping[str, object]:  # type: ignore[override]
            return {"logits": super().forward(x).detach(), "count": 3}

    with pytest.raises(CaptureError, match=r"no tensor among the outputs \(a dict\) requires a gradient"):
        checkpointed(Detached(WIDTH, WIDTH), "60%", (torch.randn(ROWS, WIDTH),), granularity="modules")
