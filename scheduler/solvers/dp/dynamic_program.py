"""The dynamic program over the states of a chain, and the schedules that it decides on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler.graph.chain import Chain
from scheduler.schedule import Schedule
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import ChainCosts, ChainStates, chain_costs, chain_states, most_bytes
from scheduler.solvers.dp.frontiers import Decision, Frontiers, Pruning, decide, fill_frontiers
from scheduler.solvers.dp.runs import ChainRuns
from scheduler.solvers.dp.transitions import saving_limits

Ints = npt.NDArray[np.int64]

_NO_LIMIT_BYTES = 2**60
_MOST_POINTS = 2**24
"""Most points of all frontiers together: 256 MiB."""


@dataclass(frozen=True)
class DynamicProgram:
    """The frontier of bytes needed and extra time, per state.

    Attributes
    ----------
    chain : Chain
    costs : ChainCosts
    states : ChainStates
    frontiers : Frontiers
    """

    chain: Chain
    costs: ChainCosts
    states: ChainStates
    frontiers: Frontiers

    @property
    def frontier(self) -> list[tuple[int, int]]:
        """The whole chain's frontier: bytes in addition to the resident ones, and extra time."""
        root = self.states.numbers[0, 0, -1]
        start = self.frontiers.start[root]
        points = self.frontiers.points[:, start : start + self.frontiers.length[root]]
        return list(zip(points[0].tolist(), points[1].tolist(), strict=True))

    def time(self, free_bytes: int) -> float | None:
        """Return the least time of the step with that many bytes free, or None if none fits."""
        fitting = [t for m, t in self.frontier if m <= free_bytes]
        return self.costs.time(fitting[-1]) if fitting else None

    def schedule(self, free_bytes: int) -> Schedule:
        """Return the fastest schedule with that many bytes free in addition to the resident ones."""

        def decision(a: int, b: int, h: int, m: int) -> Decision:
            found: Decision = decide(self.costs.arrays, self.states, self.frontiers, a, b, h, m)
            return found

        return build_schedule(self.chain, self.costs, free_bytes, decision)


@lru_cache(maxsize=4)
def whole_frontier(chain: Chain) -> DynamicProgram:
    """Return the program over all states, without pruning."""
    costs = chain_costs(chain)
    states = chain_states(costs)
    most = most_bytes(costs, states, _NO_LIMIT_BYTES)
    return run_program(chain, costs, states, most, Pruning.none())


def run_program(
    chain: Chain,
    costs: ChainCosts,
    states: ChainStates,
    most: Ints,
    pruning: Pruning,
    deadline: Deadline | None = None,
) -> DynamicProgram:
    """Return the frontier of every state.

    Parameters
    ----------
    chain : Chain
    costs : ChainCosts
    states : ChainStates
    most : ndarray of int64
        Per state, the bytes above which no point is useful.
    pruning : Pruning
    deadline : Deadline, optional

    Raises
    ------
    TimeoutError
        If the deadline passes.
    MemoryError
        If there are too many points.
    """
    number = len(states.first)
    frontiers = Frontiers(np.empty((2, 1024), np.int64), np.zeros(number, np.int64), np.zeros(number, np.int64))
    used = 0
    for low, high in states.chunks():
        if deadline is not None and deadline.passed:
            raise TimeoutError("out of time before the exact program ended")
        if used > _MOST_POINTS:
            raise MemoryError(f"the exact program has more than {_MOST_POINTS} points")
        frontiers, used = fill_frontiers(costs.arrays, states, low, high, most, pruning, frontiers, used)
    return DynamicProgram(chain, costs, states, frontiers)


def build_schedule(
    chain: Chain, costs: ChainCosts, free_bytes: int, decide: Callable[[int, int, int, int], Decision]
) -> Schedule:
    """Return the schedule that follows the decisions for each state (a, b, h) with m free bytes."""
    runs, arrays = ChainRuns(chain), costs.arrays
    x, live = arrays.output_bytes.tolist(), arrays.live_gradients.tolist()
    first_mode, keeps_output = arrays.first_mode.tolist(), arrays.keeps_output.tolist()
    stack = [(0, costs.layers - 1, 0, free_bytes)]
    while stack:
        a, b, h, m = stack.pop()
        if b < 0:
            runs.backward(a, h)
            continue
        mode, j, sweep_bytes = decide(a, b, h, m)
        if mode >= 0:
            number = mode - first_mode[a]
            runs.forward_saving(a, number)
            stack.append((a, -1, number, 0))
            if b > a:
                _, held = saving_limits(arrays, a, b, h, mode)
                stack.append((a + 1, b, int(keeps_output[a]), m - held))
            continue
        for i in range(a, j):
            runs.forward_within(i, sweep_bytes - x[i + 1] - (x[i] if i > a else 0))
        stack.append((a, j - 1, h, m + live[b + 1] - live[j]))
        stack.append((j, b, 0, m - x[j]))
    return runs.schedule()
