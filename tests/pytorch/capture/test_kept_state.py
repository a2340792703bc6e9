from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from scheduler.pytorch.capture.kept_state import State
from scheduler.pytorch.guards.outside_states import OutsideStates
from scheduler.pytorch.guards.read_names import ReadNames


@pytest.fixture
def _kept_randomness():
    state = State([])
    yield
    state.restore()


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("bounds", torch.empty(0))
        self.cache = {"last": torch.zeros(3)}
        self.calls = 0
        self.seen = []
        self.generator = torch.Generator().manual_seed(1)
        self.rng = np.random.default_rng(1)

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        self.cache["last"].add_(1)
        self.bounds.resize_(3).fill_(2.0)
        x += torch.rand(3, generator=self.generator) + random.random() + np.random.rand() + self.rng.random()
        return torch.dropout(self.norm(x), 0.5, True)


@pytest.mark.usefixtures("_kept_randomness")
def test_a_step_that_is_put_back_leaves_nothing_behind():
    model = Everything()
    base = torch.arange(12.0).reshape(4, 3)
    x = base.t()[:, :3].t()
    own = OutsideStates(model, None, ReadNames(model, None)).states
    state = State([model], [x], own)
    first = model(x)
    state.restore()
    assert (model.calls, model.seen, model.norm.num_batches_tracked.item()) == (0, [], 0)
    assert torch.equal(model.cache["last"], torch.zeros(3))
    assert model.bounds.shape == (0,)
    assert torch.equal(base, torch.arange(12.0).reshape(4, 3))
    assert not state.random.difference(State([], (), own).random)
    assert torch.equal(model(x), first)


@pytest.mark.usefixtures("_kept_randomness")
@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "torch generator on cpu"),
        (random.random, "Python's random"),
        (np.random.rand, "NumPy's random"),
    ],
)
def test_a_draw_shows_as_another_random_state(draw, name):
    before = State([]).random
    draw()
    assert before.difference(State([]).random) == name
