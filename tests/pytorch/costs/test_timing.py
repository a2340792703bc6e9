from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler.pytorch import trace
from scheduler.pytorch.capture.instructions import Call
from scheduler.pytorch.costs import operators, timing
from scheduler.pytorch.costs.timing import Timing, Trials, interleaved_times, measure_rates
from scheduler.pytorch.tracing import capture

FLOAT_BYTES = 4
ELEMENTS = 256
SCRATCH = 4096
"""Floats that the operators with scratch memory allocate internally."""


class Net(nn.Module):
    """Operators that change counters and statistics, draw random numbers, and read indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 8)
        self.convolution = nn.Conv1d(8, 5, 3, padding=1)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.convolution(self.embedding(tokens).transpose(1, 2))
        x = torch.dropout(self.norm(x).relu(), 0.5, True)
        return F.cross_entropy(x, targets)


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    tokens = torch.zeros(3, 7, dtype=torch.long)
    return _calls(Net(), tokens, tokens)


def _calls(model: nn.Module, *args: Tensor) -> list[Call]:
    return [instruction for instruction in capture(model, args).instructions if isinstance(instruction, Call)]


@pytest.fixture
def ticking(monkeypatch):
    """A clock that advances by half a second between two readings, which themselves take no time."""
    ticks = itertools.count(0.0, 0.5)
    monkeypatch.setattr(timing, "thread_seconds", lambda: next(ticks))
    monkeypatch.setattr(timing, "_reading_seconds", lambda: 0.0)


def test_every_call_can_be_run_alone_without_touching_the_random_state(calls, ticking):
    state = torch.get_rng_state()
    trials = Trials(calls)
    times = trials.times(0.0)
    trials.workspaces()
    assert {str(call.target) for call in calls} >= {"aten.convolution.default", "aten.relu_.default"}
    assert set(times) == {Timing(0.5, 0.0)}
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_that_counts_up_does_not_change_what_others_read(calls):
    # The counter of batch norm is an integer, and so are the classes: counting up a class would make it invalid.
    (counter,) = (call for call in calls if call.target is torch.ops.aten.add_.Tensor)
    (loss,) = (call for call in calls if call.target is torch.ops.aten.nll_loss2d_forward.default)
    trials = Trials([counter, loss])
    assert None not in trials.times(0.0)
    assert None not in trials.times(0.0)


def test_functions_take_turns_for_at_least_three_rounds(ticking):
    order: list[str] = []
    times = interleaved_times([lambda: order.append("a"), lambda: order.append("b")], 0.0)
    assert order == ["a", "b"] * 3
    assert times == [Timing(0.5, 0.0)] * 2


def test_rounds_end_once_four_have_lowered_no_time_by_much(monkeypatch):
    # A function takes 8, 4, 2 and 1 seconds, and then a second each time: rounds 5 to 8 lower nothing.
    lasting, clock = iter([8.0, 4.0, 2.0]), [0.0]

    def run() -> None:
        clock[0] += next(lasting, 1.0)

    monkeypatch.setattr(timing, "thread_seconds", lambda: clock[0])
    monkeypatch.setattr(timing, "_reading_seconds", lambda: 0.0)
    rounds: list[float] = []
    interleaved_times([run], 100.0, progress=lambda fraction, seconds: rounds.append(fraction))
    assert len(rounds) == 4 + 4
    assert rounds[-1] == 1.0


def test_a_time_is_the_shortest_at_each_place_of_the_order_and_the_spread_that_of_all_runs(monkeypatch):
    # By hand: function 0 runs at two places, whose shortest runs take 2 and 4 seconds, and whose medians 3 and 6.
    lasting = iter([2.0, 1.0, 4.0, 3.0, 1.0, 6.0, 9.0, 1.0, 8.0])
    clock = [0.0]

    def run() -> None:
        clock[0] += next(lasting) + reading

    reading = 0.25
    monkeypatch.setattr(timing, "thread_seconds", lambda: clock[0])
    monkeypatch.setattr(timing, "_reading_seconds", lambda: reading)
    first, second = interleaved_times([run, run], 0.0, order=[0, 1, 0])
    assert first.seconds == pytest.approx(3.0)
    assert first.spread == pytest.approx((3.0 + 6.0 + 2 * reading) / (2.0 + 4.0 + 2 * reading) - 1)
    assert second == Timing(pytest.approx(1.0), 0.0)


def test_each_call_runs_at_its_first_three_places_in_a_round():
    order: list[str] = []
    interleaved_times([lambda: order.append("a"), lambda: order.append("b")], 0.0, order=[0, 0, 1, 0, 0])
    assert order == ["a", "a", "b", "a"] * 3


@torch.library.custom_op("workspace::take_before", mutates_args=())
def take_before(x: Tensor) -> Tensor:
    """Allocate memory and free it before the output is allocated."""
    torch.empty(SCRATCH)
    return x.clone()


@torch.library.custom_op("workspace::take_beside", mutates_args=())
def take_beside(x: Tensor) -> Tensor:
    """Hold memory while the output is allocated."""
    scratch = torch.empty(SCRATCH)
    y = x.clone()
    del scratch
    return y


@torch.library.custom_op("workspace::refuse", mutates_args=())
def refuse(x: Tensor) -> Tensor:
    """Fail on data below 1, and so on random data."""
    if bool((x < 1).any()):
        raise KeyError("below 1")
    return x.clone()


for operator in (take_before, take_beside, refuse):
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda ctx, gradient: gradient)


class Custom(nn.Module):
    def __init__(self, *operators: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((ELEMENTS,), 2.0))
        self.operators = operators

    def forward(self) -> Tensor:
        x = self.weight.exp()
        for operator in self.operators:
            x = operator(x)
        return x.sum()


def test_the_workspace_is_what_a_call_allocates_in_addition_to_its_outputs():
    graph = trace(Custom(take_before, take_beside), costs="flops", workspaces=True)
    workspaces = {operation.name: operation.workspace_bytes for operation in graph.operations}
    assert workspaces["take_before"] == FLOAT_BYTES * (SCRATCH - ELEMENTS)
    assert workspaces["take_beside"] == FLOAT_BYTES * SCRATCH
    assert workspaces["exp"] == 0


def test_an_operator_that_fails_on_random_data_gets_the_time_of_its_bytes(monkeypatch):
    monkeypatch.setattr(operators, "measure_rates", lambda: timing.Rates(1.0, 0.0, 2.0))
    state = torch.get_rng_state()
    graph = trace(Custom(refuse), costs="measured")
    assert torch.equal(torch.get_rng_state(), state)
    times = {operation.name: operation.time for operation in graph.operations}
    assert times["refuse"] == 1 + 2 * (2 * FLOAT_BYTES * ELEMENTS)  # it reads and writes as many bytes
    assert Trials([call for call in _calls(Custom(refuse)) if "refuse" in str(call.target)]).times(0.0) == [None]


def test_on_device_meta_times_are_proportional_to_flops():
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 2048, bias=False)).to("meta")
    graph = trace(model, (torch.empty(512, 512, device="meta"),), loss=torch.sum)
    times = {operation.name: operation.time for operation in graph.operations}
    view = times["0/t"]
    assert (times["1/mm_1"] - view) / (times["0/mm"] - view) == pytest.approx(4)
    assert not any(operation.workspace_bytes for operation in graph.operations)


def test_rates_are_what_products_and_sums_take_beyond_a_call(monkeypatch):
    monkeypatch.setattr(timing, "interleaved_times", lambda probes, seconds: [Timing(t, 0.0) for t in (1.0, 3.0, 1.5)])
    rates = measure_rates()
    assert rates.seconds_per_call == 1
    # By hand: a product of two 512 x 512 matrices, and two arrays of 2^18 floats added to a third.
    assert rates.seconds_per_flop == (3 - 1) / (2 * 512**3)
    assert rates.seconds_per_byte == (1.5 - 1) / (3 * FLOAT_BYTES * 2**18)


def test_rates_are_those_of_the_same_machine_as_measured_times():
    rates = measure_rates()
    assert rates.seconds_per_call > 0
    assert rates.seconds_per_flop > 0
    assert rates.seconds_per_byte > 0
