"""Train models that cannot be captured under decisions, and under plans by modules, and compare with plain torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scheduler.graph.decisions import Decision
from scheduler.pytorch import checkpointed
from scheduler.pytorch.capture.kept_state import RandomState
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes
from scheduler.pytorch.modules.replay import Replay
from tests.support.pytorch.uncapturable import Case


def seed_everything(seed: int) -> None:
    """Seed the generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def build(make: Callable[[], Case]) -> Case:
    """Return a case whose parameters are always the same."""
    seed_everything(0)
    return make()


def train_with(case: Case, replay: Replay | None, batches: int) -> tuple[list[object], RandomState]:
    """Return the losses, gradients and buffers of some steps, and the random state that they leave."""
    seed_everything(1)
    found: list[object] = []
    for seed in range(batches):
        args, kwargs = case.batch(seed)
        with nullcontext() if replay is None else replay.following():
            outputs = case.model(*args, **kwargs)
        loss = outputs if case.loss is None else case.loss(outputs)
        del outputs
        loss.backward()
        gradients = [None if p.grad is None else p.grad.to_dense().clone() for p in case.model.parameters()]
        case.model.zero_grad()
        found.append((seed, loss.detach(), gradients, [buffer.clone() for buffer in case.model.buffers()]))
    return found, RandomState()


def recomputable(case: Case) -> list[str]:
    """Return the modules whose arguments no operator changes in place."""
    found: list[tuple[str, torch.Tensor, int]] = []
    names = {module: name for name, module in case.model.named_modules()}

    def note(module: nn.Module, args: tuple[object, ...]) -> None:
        found.extend((names[module], x, x._version) for x in args if isinstance(x, torch.Tensor))

    for module in names:
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(note)
    args, kwargs = case.batch(0)
    case.model(*args, **kwargs)
    changed = {name for name, x, version in found if x._version != version}
    return [name for name in names.values() if name not in changed]


def outermost(names: list[str]) -> list[str]:
    """Return the modules that are in no other one but the model itself."""
    return [name for name in names if name and not any(name.startswith(f"{other}.") for other in names if other)]


def random_state_differences(make: Callable[[], Case], seed: str) -> list[str]:
    """Check that steps under some, all, and selective decisions equal plain ones, and compare the random states."""
    expected, state = train_with(build(make), None, batches=2)
    names, draws = recomputable(build(make)), random.Random(seed)
    some = [Decision(one, number) for one in names for number in range(3) if draws.random() < 0.4]
    every = [Decision(one, number) for one in names for number in range(3)]
    keeping = [Decision(one, number, keeps_expensive=True) for one in outermost(names) for number in range(3)]
    differences = []
    for decisions in (some, every, keeping):
        case = build(make)
        found, left = train_with(case, Replay(case.model, decisions), batches=2)
        check_equal(found, expected, case)
        differences.append(state.difference(left))
    return differences


def check_equal(found: object, expected: object, case: Case) -> None:
    """Check that two results are equal, bit for bit unless the model rounds anew."""
    rtol, atol = (1e-4, 1e-6) if case.rounds_anew else (0.0, 0.0)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@dataclass
class Step:
    """What a step leaves behind, and its peak."""

    loss: Tensor
    gradients: list[Tensor | None]
    buffers: list[Tensor]
    peak_bytes: int


def train(case: Case, run: Callable[..., Any], batches: int) -> list[Step]:
    """Train on batches of differing shapes; each begins with a seed of its own, so that its route repeats."""
    steps = []
    for seed in range(batches):
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


def bytes_over_budget(make: Callable[[], Case], batches: int) -> list[int]:
    """Train within min+25% of the step of the largest route, check that all is as without a plan, and compare peaks."""
    plain = build(make)

    def run(*args: object, **kwargs: object) -> Tensor:
        outputs = plain.model(*args, **kwargs)
        return outputs if plain.loss is None else plain.loss(outputs)

    expected = train(plain, run, batches)
    largest = max(range(batches), key=lambda seed: expected[seed].peak_bytes)
    case = build(make)
    args, kwargs = case.batch(largest)
    seed_everything(largest)
    planned = checkpointed(case.model, "min+25%", args, kwargs, loss=case.loss, granularity="modules")
    budget = planned.plan.budget_bytes
    found = train(case, planned, batches)
    for one, other in zip(found, expected, strict=True):
        check_equal((one.loss, one.gradients, one.buffers), (other.loss, other.gradients, other.buffers), case)
    return [step.peak_bytes - budget for step in found if step.peak_bytes > budget]
