"""Binomial schedules beside checkpoint_schedules and pyrevolve: the same counts, and the time to make them.

Run with `pytest -n 0 tests/benchmarks/test_revolve_benchmark.py`. The peers come with the
extra `peers`; without them their rows are skipped.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import scheduler as sc
from scheduler.solvers.revolve.solver import extra_forwards

PUBLISHED = {(100, 5): 316, (1000, 10): 3636, (10_000, 20): 37_976, (100_000, 50): 375_196}
"""Forward runs beyond one for each step."""
MOST_SECONDS = 0.5
"""For a million steps with 50 slots."""


def count_ours(steps: int, slots: int, *, mixed: bool = False) -> int:
    return sum(
        stop - start for action, start, stop in sc.revolve_actions(steps, slots, mixed=mixed) if action == "forward"
    )


def count_checkpoint_schedules(steps: int, slots: int, *, mixed: bool = False) -> int:
    peer = pytest.importorskip("checkpoint_schedules", reason="pip install checkpoint-schedules")
    if mixed:
        schedule = peer.MixedCheckpointSchedule(steps, slots, storage=peer.StorageType.RAM)
    else:
        schedule = peer.MultistageCheckpointSchedule(steps, slots, 0)
    total = 0
    for action in schedule:
        if isinstance(action, peer.Forward):
            total += min(action.n1, steps) - action.n0
        if isinstance(action, peer.EndReverse):
            break
    return total - steps


def count_pyrevolve(steps: int, slots: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("pyrevolve", reason="pip install pyrevolve")
    runs = 0

    class Steps(peer.Operator):  # type: ignore[misc, name-defined]
        def __init__(self, forward: bool) -> None:
            self.forward = forward

        def apply(self, t_start: int, t_end: int) -> None:
            nonlocal runs
            runs += (t_end - t_start) if self.forward else 0

    class State(peer.Checkpoint):  # type: ignore[misc, name-defined]
        @property
        def size(self) -> int:
            return 1

        @property
        def dtype(self) -> type:
            return float

        def save(self, pointer: object) -> None: ...

        def load(self, pointer: object) -> None: ...

        def get_data_location(self, timestep: int) -> list[object]:
            return []

        def get_data(self, timestep: int) -> list[object]:
            return []

    revolver = peer.MemoryRevolver(State(), Steps(True), Steps(False), slots, steps)
    revolver.apply_forward()
    revolver.apply_reverse()
    return runs - steps


@pytest.mark.parametrize(("steps", "slots"), PUBLISHED)
def test_binomial_stream(benchmark: BenchmarkFixture, steps: int, slots: int) -> None:
    benchmark.group = f"binomial, {steps} steps, {slots} slots"
    assert benchmark(count_ours, steps, slots) == PUBLISHED[steps, slots]


# pyrevolve takes half a minute for 10^5 steps: it is timed up to 10^4.
@pytest.mark.parametrize(
    ("count", "steps", "slots"),
    [(count_checkpoint_schedules, *case) for case in PUBLISHED]
    + [(count_pyrevolve, *case) for case in PUBLISHED if case[0] <= 10_000],
)
def test_binomial_peers(benchmark: BenchmarkFixture, count: Callable[[int, int], int], steps: int, slots: int) -> None:
    benchmark.group = f"binomial, {steps} steps, {slots} slots"
    count(2, 1)  # imports the peer
    assert benchmark.pedantic(count, (steps, slots), rounds=1) == PUBLISHED[steps, slots]


@pytest.mark.parametrize(("steps", "slots"), [(10, 3), (100, 10), (300, 8)])
@pytest.mark.parametrize("count", [count_ours, count_checkpoint_schedules], ids=["ours", "checkpoint_schedules"])
def test_mixed(benchmark: BenchmarkFixture, count: Callable[..., int], steps: int, slots: int) -> None:
    benchmark.group = f"mixed, {steps} steps, {slots} slots"
    extra = benchmark.pedantic(count, (steps, slots), {"mixed": True}, rounds=1, warmup_rounds=1)
    assert extra == extra_forwards(steps, slots, mixed=True)


def test_a_million_steps_with_50_slots(benchmark: BenchmarkFixture) -> None:
    benchmark.group = "binomial, 1000000 steps, 50 slots, streamed"
    seconds = []

    def stream() -> None:
        started = time.perf_counter()
        deque(sc.revolve_actions(1_000_000, 50), maxlen=0)
        seconds.append(time.perf_counter() - started)

    benchmark.pedantic(stream, rounds=5, warmup_rounds=1)
    assert min(seconds) <= MOST_SECONDS
