"""The Pareto program over the states of a chain, and the schedules that it decides on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler.graph.chain import Chain
from scheduler.schedule import Schedule
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp import kernels
from scheduler.solvers.dp.costs import ChainCosts, ChainStates, chain_costs, chain_states, most_bytes
from scheduler.solvers.dp.runs import ChainRuns

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

Decision = tuple[int, int, int]
"""(mode, -1, 0), or (-1, j, bytes beside x_a that the forward run from x_a to x_j may take)."""

_NO_LIMIT = 2**60
_MOST_POINTS = 2**24
"""Of all frontiers together: 256 MiB."""


@dataclass(frozen=True)
class Pruning:
    """What a schedule of interest costs around each state, on a coarse grid; see `chain_tables`.

    Attributes
    ----------
    around : ndarray of float32, shape (rows, slots + 1)
        Lower bounds on the extra time around a state that is left that slot.
    rows : ndarray of int64
        Row of each state; -1 for those that no schedule of interest passes.
    offsets : ndarray of int64
        Bytes to be added to a state's own before they are put in slots.
    unit : int
        Bytes of a slot.
    quantum : int
        Time of a unit in `around`.
    limit : int
        Largest extra time of interest, in such units.
    """

    around: Floats
    rows: Ints
    offsets: Ints
    unit: int
    quantum: int
    limit: int

    @classmethod
    def none(cls) -> Pruning:
        """Return the pruning that leaves nothing out."""
        return cls(np.empty((0, 1), np.float32), np.empty(0, np.int64), np.empty(0, np.int64), 1, 1, 0)

    @property
    def arrays(self) -> tuple[Floats, Ints, Ints, int, int, int]:
        """All fields, for the kernels."""
        return self.around, self.rows, self.offsets, self.unit, self.quantum, self.limit


@dataclass(frozen=True)
class DynamicProgram:
    """The Pareto program: per state, the frontier of bytes needed and extra time."""

    chain: Chain
    costs: ChainCosts
    states: ChainStates
    points: Ints
    start: Ints
    count: Ints

    @property
    def frontier(self) -> list[tuple[int, int]]:
        """The whole chain's frontier: bytes beside the resident ones, and extra time."""
        root = self.states.numbers[0, 0, -1]
        part = slice(self.start[root], self.start[root] + self.count[root])
        return list(zip(self.points[0, part].tolist(), self.points[1, part].tolist(), strict=True))

    def time(self, free_bytes: int) -> float | None:
        """Return the least time of the step within that many bytes beside the resident ones; None if none fits."""
        fitting = [t for m, t in self.frontier if m <= free_bytes]
        return self.costs.time(fitting[-1]) if fitting else None

    def schedule(self, free_bytes: int) -> Schedule:
        """Return the fastest schedule within that many bytes beside the resident ones."""

        def decide(a: int, b: int, h: int, m: int) -> Decision:
            found: Decision = kernels.decide(
                self.costs.arrays, self.states.numbers, self.points, self.start, self.count, a, b, h, m
            )
            return found

        return build_schedule(self.chain, self.costs, free_bytes, decide)


@lru_cache(maxsize=4)
def whole_frontier(chain: Chain) -> DynamicProgram:
    """Return the program over all states, with nothing left out."""
    costs = chain_costs(chain)
    states = chain_states(costs)
    most = most_bytes(costs, states, _NO_LIMIT)
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
    most : ndarray of int64
        Per state, the bytes above which no point is of use.
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
    start, count = np.zeros(number, np.int64), np.zeros(number, np.int64)
    pool, used = np.empty((2, 1024), np.int64), 0
    for low, high in states.chunks():
        if deadline is not None and deadline.passed:
            raise TimeoutError("out of time before the exact program ended")
        if used > _MOST_POINTS:
            raise MemoryError(f"the exact program has more than {_MOST_POINTS} points")
        pool, used = kernels.pareto(
            costs.arrays, states.arrays, states.numbers, low, high, most, pruning.arrays, pool, start, count, used
        )
    return DynamicProgram(chain, costs, states, pool, start, count)


def build_schedule(
    chain: Chain, costs: ChainCosts, free_bytes: int, decide: Callable[[int, int, int, int], Decision]
) -> Schedule:
    """Return the schedule that follows the decisions for each state (a, b, h) with m free bytes."""
    runs = ChainRuns(chain)
    first_mode, keeps_output = costs.arrays[3].tolist(), costs.arrays[12].tolist()
    x = costs.arrays[0].tolist()
    stack = [(0, costs.layers - 1, 0, free_bytes)]
    while stack:
        a, b, h, m = stack.pop()
        if b < 0:
            runs.backward(a, h)
            continue
        mode, j, sweep = decide(a, b, h, m)
        if mode >= 0:
            number = mode - first_mode[a]
            runs.forward_saving(a, number)
            stack.append((a, -1, number, 0))
            if b > a:
                _, held = kernels.mode_limits(costs.arrays, a, b, h, mode)
                stack.append((a + 1, b, int(keeps_output[a]), m - held))
            continue
        for i in range(a, j):
            runs.forward_within(i, sweep - x[i + 1] - (x[i] if i > a else 0))
        stack.append((a, j - 1, h, m + kernels.left_shift(costs.arrays, b, j)))
        stack.append((j, b, 0, m - x[j]))
    return runs.schedule()
