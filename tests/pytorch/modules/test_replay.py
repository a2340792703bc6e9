"""A model with decisions computes what it computes plainly, in the number of runs that they demand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from scheduler.errors import ExecutionError
from scheduler.pytorch.modules.calls import Decision
from scheduler.pytorch.modules.replay import Replay


class Counted(nn.Module):
    """A layer that counts the runs of its forward outside of its attributes."""

    def __init__(self, width: int, runs: Counter[str], name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.name = name
        self.runs = lambda: runs.update([name])

    def forward(self, x: Tensor) -> Tensor:
        self.runs()
        return torch.tanh(self.linear(x)).exp()


class Nested(nn.Module):
    """Two blocks of two layers, the second of which calls its first layer twice."""

    def __init__(self, runs: Counter[str]) -> None:
        super().__init__()
        self.first = nn.Sequential(Counted(4, runs, "first.0"), Counted(4, runs, "first.1"))
        self.second = Twice(Counted(4, runs, "second.layer"))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) + 1


def step(model: nn.Module, replay: Replay | None, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Run a step and return its loss and gradients."""
    if replay is None:
        loss = model(*args, **kwargs)
    else:
        with replay.following():
            loss = model(*args, **kwargs)
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        ([], {"first.0": 1, "first.1": 1, "second.layer": 2}),
        ([("first", 0)], {"first.0": 2, "first.1": 2, "second.layer": 2}),
        ([("first.0", 0)], {"first.0": 2, "first.1": 1, "second.layer": 2}),
        ([("first", 0), ("first.0", 0)], {"first.0": 3, "first.1": 2, "second.layer": 2}),
        ([("", 0), ("first", 0), ("first.0", 0)], {"first.0": 4, "first.1": 3, "second.layer": 4}),
        ([("second.layer", 0)], {"first.0": 1, "first.1": 1, "second.layer": 3}),
        ([("second", 0), ("second.layer", 1)], {"first.0": 1, "first.1": 1, "second.layer": 5}),
    ],
)
def test_a_call_runs_once_more_for_each_recomputed_call_around_it(
    decisions: list[tuple[str, int]], expected: dict[str, int]
) -> None:
    runs: Counter[str] = Counter()
    model = Nested(runs)
    x = torch.randn(3, 4)
    plain = step(model, None, x)
    runs.clear()
    replay = Replay(model, [Decision(*one) for one in decisions], calls={"first.1": 1, "second.layer": 2})
    with set_checkpoint_early_stop(False):
        planned = step(model, replay, x)
    assert runs == expected
    torch.testing.assert_close(planned, plain, rtol=0, atol=0)


def test_a_recomputation_ends_once_it_has_everything_that_the_backward_needs() -> None:
    runs: Counter[str] = Counter()
    model = nn.Sequential(nn.Sequential(Counted(4, runs, "0.0"), Counted(4, runs, "0.1")))
    replay = Replay(model, [Decision("0", 0), Decision("0.1", 0)])
    with replay.following():
        loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    assert runs == {"0.0": 2, "0.1": 2}


def test_calls_that_the_plan_does_not_know_follow_the_strictest_decision() -> None:
    runs: Counter[str] = Counter()
    model = Nested(runs)
    step(model, Replay(model, [Decision("second.layer", 0)], calls={"second.layer": 1}), torch.randn(3, 4))
    assert runs["second.layer"] == 4


def test_modules_that_were_not_measured_follow_the_decisions_for_others_of_their_kind() -> None:
    runs: Counter[str] = Counter()
    model = nn.ModuleDict({"layers": nn.ModuleList(Counted(4, runs, str(i)) for i in range(3)), "head": nn.Tanh()})
    replay = Replay(model, [Decision("layers.0", 0)], calls={"layers.0": 1, "layers.1": 1})
    with replay.following():
        x = torch.randn(3, 4)
        for layer in model["layers"]:
            x = layer(x)
    x.sum().backward()
    assert runs == {"0": 2, "1": 1, "2": 2}


def test_the_model_is_left_as_it_was() -> None:
    model = Nested(Counter())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with Replay(model, [Decision("first", 0), Decision("first.1", 0)]).following():
        model(torch.randn(3, 4))
        assert "forward" in vars(model.first)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_a_name_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r'"third", but Nested has no module of this name'):
        Replay(Nested(Counter()), [Decision("third", 0)])
