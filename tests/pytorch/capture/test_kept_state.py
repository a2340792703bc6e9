from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from scheduler.pytorch.capture.kept_state import RandomState, State
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


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: torch.rand(1), "torch generator on cpu"),
        (random.random, "Python's random"),
        (lambda: [random.random() for _ in range(312)], "Python's random"),  # all words of its state
        (np.random.rand, "NumPy's random"),
        (lambda: np.random.rand(312), "NumPy's random"),
        (lambda: [np.random.randn(), np.random.randn()], "NumPy's random"),
    ],
)
@pytest.mark.usefixtures("_kept_randomness")
def test_a_draw_changes_the_state_of_one_generator(draw, name):
    state = RandomState()
    assert state.difference(state.now()) == ""
    first = draw()
    changed = state.changed(state.now())
    assert changed.difference(changed.now()) == name
    changed.restore()
    assert state.difference(state.now()) == ""
    assert draw() == first if not isinstance(first, np.ndarray) else (draw() == first).all()


@pytest.mark.usefixtures("_kept_randomness")
def test_a_number_that_numpy_has_drawn_in_advance_belongs_to_the_state():
    np.random.seed(0)
    np.random.randn()  # draws two numbers and keeps one
    with_one = RandomState()
    second = np.random.randn()  # changes nothing else
    without = RandomState()
    assert with_one.difference(without) == "NumPy's random"
    with_one.restore()
    assert with_one.difference(RandomState()) == ""
    assert np.random.randn() == second
    assert without.difference(RandomState()) == ""
