"""Models that cannot be captured train within their budget, as without a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes
from tests.pytorch.modules.test_uncapturable import ROUNDS_ANEW, build, seed_everything
from tests.support.pytorch.uncapturable import CASES, Case

BATCHES = 20


@dataclass
class Step:
    """What a step leaves behind, and its peak."""

    loss: Tensor
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    peak_bytes: int


def train(case: Case, run: Callable[..., Any]) -> list[Step]:
    """Train on batches of differing shapes; each begins with a seed of its own, so that its route repeats."""
    steps = []
    for seed in range(BATCHES):
        args, kwargs = case.batch(seed)
        resident = resident_tensors(case.model, (args, kwargs))
        tracker = StorageTracker(resident)
        seed_everything(seed)
        with tracker:
            loss = run(*args, **kwargs)
            loss.backward()
        gradients = [None if p.grad is None else p.grad.to_dense().clone() for p in case.model.parameters()]
        case.model.zero_grad()
        buffers = [buffer.clone() for buffer in case.model.buffers()]
        steps.append(Step(loss.detach(), gradients, buffers, tracker.peak_bytes + storage_bytes(resident)))
    return steps


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_within_its_budget_as_without_a_plan(name: str) -> None:
    plain = build(name)
    expected = train(plain, lambda *args, **kwargs: (plain.loss or (lambda loss: loss))(plain.model(*args, **kwargs)))
    largest = max(range(BATCHES), key=lambda seed: expected[seed].peak_bytes)
    case = build(name)
    args, kwargs = case.batch(largest)
    seed_everything(largest)
    planned = checkpointed(case.model, "min+25%", args, kwargs, loss=case.loss, granularity="modules")
    found = train(case, planned)
    rtol, atol = (1e-4, 1e-6) if name in ROUNDS_ANEW else (0.0, 0.0)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.loss, other.loss, rtol=rtol, atol=atol)
        torch.testing.assert_close(one.gradients, other.gradients, rtol=rtol, atol=atol)
        torch.testing.assert_close(one.buffers, other.buffers, rtol=rtol, atol=atol)
    budget = planned.plan.budget_bytes
    assert [step.peak_bytes - budget for step in found if step.peak_bytes > budget] == []
