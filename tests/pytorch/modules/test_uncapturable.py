"""Models that cannot be captured compute under random decisions what they compute plainly."""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from scheduler.pytorch.capture.kept_state import RandomState
from scheduler.pytorch.modules.calls import Decision
from scheduler.pytorch.modules.replay import Replay
from tests.support.pytorch.uncapturable import CASES, Case

ROUNDS_ANEW = {"script"}
"""TorchScript optimizes a function after its first runs."""


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def build(name: str) -> Case:
    seed_everything(0)
    return CASES[name]()


def train(case: Case, replay: Replay | None, batches: int) -> tuple[list[object], RandomState]:
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


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", CASES)
def test_random_decisions_change_nothing(name: str) -> None:
    expected, state = train(build(name), None, batches=3)
    names, draws = recomputable(build(name)), random.Random(name)
    some = [Decision(one, number) for one in names for number in range(3) if draws.random() < 0.4]
    every = [Decision(one, number) for one in names for number in range(3)]
    keeping = [Decision(one, number, keeps_expensive=True) for one in outermost(names) for number in range(3)]
    for decisions in (some, every, keeping):
        case = build(name)
        found, left = train(case, Replay(case.model, decisions), batches=3)
        rtol, atol = (1e-4, 1e-6) if name in ROUNDS_ANEW else (0.0, 0.0)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
        assert state.difference(left) == ""
