"""The pruned search for the fastest persistent schedule of a long chain."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scheduler.graph.chain import Chain
from scheduler.schedule import Schedule
from scheduler.solution import relative_gap
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import chain_costs, chain_states, grid_of, most_bytes
from scheduler.solvers.dp.dynamic_program import DynamicProgram, build_schedule, run_program
from scheduler.solvers.dp.frontiers import Pruning
from scheduler.solvers.dp.grid_bounds import (
    INFINITE,
    UNKNOWN,
    Grid,
    descend,
    fill_inside,
    fill_least_bytes,
    push_around,
    sweep_bounds,
)
from scheduler.solvers.dp.two_passes import Known

Ints = npt.NDArray[np.int64]

_FIRST_GUESS = 0.05
"""First guess of the extra time, as a share of the time of the step."""
_SLOTS = {False: (128, 512), True: (512, 1024)}
"""Slots of the coarse grid and of the fine one, without repeated layers and with them."""
_MARGINS = (0.015, 0.003)
"""By how much the optimum may exceed the guess from either grid, as a share of the time of the step."""
_MOST_CELLS = 2**26
"""Entries of a table above which its grid is made coarser; a grid may have up to four times as many."""
_LAYERS_AT_ONCE = 32
"""The least bytes are found for the states that end with so many layers between two looks at the clock."""
_FEWEST_SHARED = 64
"""From so many states of one length on, two threads share them."""
_CAUTIONS = (0, 1, 3)
"""Numbers of slots left unused on the way down a table; each is tried."""


class PrunedSearch:
    """Bounds from a coarse grid of memory, then the exact program over the states that they leave.

    A limit on the extra time is guessed from a table whose rounding errors cancel out. States
    that no schedule within the limit passes are left out, first by the time of the sweep
    that leads past them, then by the tables' lower bounds inside and around them. What
    the exact program finds within the limit is optimal; if it finds nothing, the limit is
    raised.

    Parameters
    ----------
    chain : Chain
    free_bytes : int
        The budget less the resident bytes.
    deadline : Deadline
    gap : float
        The search ends once (time - bound) / time is at most this.
    known : Known, optional
        A schedule that fits, to begin with.
    bound : float
        Proven lower bound on the time of persistent schedules, to begin with.

    Attributes
    ----------
    bound : float
        Proven lower bound on the time of persistent schedules; inf if none fits.
    least_bytes : int
        The least bytes, in addition to the resident ones, with which a persistent schedule
        exists; 0 until it is known.
    unfinished : str
        Why the bound is not exact; "" if it is.
    """

    def __init__(
        self,
        chain: Chain,
        free_bytes: int,
        deadline: Deadline,
        gap: float = 0.0,
        known: Known | None = None,
        bound: float = 0.0,
    ) -> None:
        self.chain, self.free, self.deadline, self.gap = chain, free_bytes, deadline, gap
        self.costs = costs = chain_costs(chain)
        self.bound = max(costs.time(0), bound)
        self.least_bytes = 0
        self.unfinished = ""
        self._states = states = chain_states(costs)
        self._repeats = len(states.first) < costs.layers**2 // 8
        self._slots = _SLOTS[self._repeats]
        self._root = int(states.numbers[0, 0, -1])
        self._most = most_bytes(costs, states, free_bytes)
        self._sweeps = sweep_bounds(costs.arrays)
        self._need = np.full(len(states.first), UNKNOWN, np.int64)
        self._past = self._least_past()
        self._known = known
        self._best = None if known is None else known.extra_time
        self._choices: Ints | None = None

    def run(self) -> Schedule | None:
        """Return the best schedule found by the deadline."""
        try:
            return self._run()
        except (TimeoutError, MemoryError) as error:
            self.unfinished = str(error)
            return self._best_schedule()

    def find_least_bytes(self) -> int:
        """Return `least_bytes`, which take a cubic number of steps to find.

        Raises
        ------
        TimeoutError
            If the deadline passes.
        """
        layers = self.costs.layers
        inside = np.empty((2, layers, layers), np.int64)
        for low in range(0, layers, _LAYERS_AT_ONCE):
            self._check_time()
            high = min(layers, low + _LAYERS_AT_ONCE)
            fill_least_bytes(self.costs.arrays, self._states, low, high, self._sweeps, inside, self._need)
        self.least_bytes = int(self._need[self._root])
        return self.least_bytes

    def _run(self) -> Schedule | None:
        if self.find_least_bytes() > self.free:
            self.bound = math.inf
            return None
        for limit in self._limits():
            program = self._within(limit)
            if self._is_close:
                return self._best_schedule()
            time = program.time(self.free) if program else None
            if program and time is not None:
                self.bound = time
                return program.schedule(self.free)
        raise AssertionError("a schedule was found, and the program within its time has none")

    @property
    def _is_close(self) -> bool:
        """Whether the best schedule from the tables is proven to be within a gap above 0."""
        if not self.gap or self._best is None:
            return False
        return relative_gap(self.costs.time(self._best), self.bound) <= self.gap

    def _best_schedule(self) -> Schedule | None:
        """Return the best schedule found in the tables, or the known one."""
        choices = self._choices
        if choices is None:
            return None if self._known is None else self._known.schedule
        return build_schedule(self.chain, self.costs, self.free, lambda a, b, h, m: tuple(choices[a, b].tolist()))

    def _least_past(self) -> Ints:
        """Return, per state, the time of the fastest sweep that leads past it."""
        arrays, states = self.costs.arrays, self._states
        time = np.concatenate([[0], np.cumsum(arrays.way_time[arrays.first_way[1:] - 1])])
        first, last = states.first, states.last
        return np.where(last == self.costs.layers - 1, 0, time[last + 1] - time[first])

    def _limits(self) -> Iterator[int]:
        """Yield growing limits on the extra time; the last one is that of a schedule."""
        base = max(1, self.costs.base)
        if self._best is not None and relative_gap(self.costs.time(self._best), self.bound) <= _MARGINS[-1]:
            yield self._best
            return
        guess = int(_FIRST_GUESS * base)
        for slots, margin in zip(self._slots, _MARGINS, strict=True):
            while True:
                grid = self._fill(np.flatnonzero(self._past <= guess), slots, guess, nearest=True)
                best = self._descend(grid)
                value = self._at_root(grid)
                if value is not None or guess >= best:
                    break
                guess = 2 * guess + 1
            guess = best if value is None else min(best, value + int(margin * base))
        while guess < best:
            yield guess
            guess = 2 * guess + 1
        yield best

    def _within(self, limit: int) -> DynamicProgram | None:
        """Return the program that contains the optimum if that is within the limit; None if it is proven not to be."""
        alive = np.flatnonzero(self._past <= limit)
        for slots in self._slots[1:] if self._repeats else self._slots:
            grid = self._fill(alive, slots, limit, nearest=False)
            lower = self._at_root(grid)
            # Schedules that the limit excludes take longer than it.
            self.bound = max(self.bound, self.costs.time(limit if lower is None else min(lower, limit)))
            if lower is None or lower > limit:
                return None
            if self._is_close:
                return None
            pruning = self._prune(grid, limit)
            alive = np.flatnonzero(pruning.rows >= 0)
        return run_program(self.chain, self.costs, self._states, self._most, pruning, self.deadline)

    def _fill(self, alive: Ints, slots: int, limit: int, *, nearest: bool) -> Grid:
        """Return the grid with the least extra times of the states that are alive."""
        slots = max(8, min(slots, _MOST_CELLS // max(1, len(alive))))
        offsets, unit, last = grid_of(self.costs, self._states, self._most, slots)
        rows = np.full(len(self._states.first), -1, np.int64)
        rows[alive] = np.arange(len(alive))
        grid = Grid(offsets, unit, max(1, limit >> 22), rows, np.empty((len(alive), last + 1), np.float32))
        begin = np.zeros(len(alive), np.int64)
        rounding = unit // 2 if nearest else unit - 1

        def fill(low: int, high: int) -> None:
            fill_inside(self.costs.arrays, self._states, low, high, grid, self._sweeps, rounding, begin)

        starts = self._states.starts.tolist()
        with ThreadPoolExecutor(1) as other:
            for chunk in self._chunks():
                # States of one length need only shorter ones.
                for low, high in pairwise(starts[bisect_left(starts, chunk[0]) : bisect_right(starts, chunk[1])]):
                    if high - low < _FEWEST_SHARED:
                        fill(low, high)
                        continue
                    rest = other.submit(fill, (low + high) // 2, high)
                    fill(low, (low + high) // 2)
                    rest.result()
        return grid

    def _prune(self, grid: Grid, limit: int) -> Pruning:
        """Return the least extra times around the states, and which of them stay alive."""
        around = np.full_like(grid.table, INFINITE)
        around[grid.rows[self._root], self._root_slot(grid)] = 0
        units = limit // grid.quantum
        grid = grid._replace(rows=grid.rows.copy())
        for low, high in reversed(list(self._states.chunks())):
            self._check_time()
            push_around(self.costs.arrays, self._states, low, high, grid, self._sweeps, units, around)
        return Pruning(around, grid.rows, grid.offsets, grid.unit, grid.quantum, units)

    def _descend(self, grid: Grid) -> int:
        """Follow the table to schedules that fit, keep the best, and return its extra time."""
        n = self.costs.layers
        for caution in _CAUTIONS:
            choices = np.zeros((n, n, 3), np.int64)
            extra = descend(self.costs.arrays, self._states, grid, self._need, self.free, caution, choices)
            if self._best is None or extra < self._best:
                self._best, self._choices = int(extra), choices
        assert self._best is not None
        return self._best

    def _chunks(self) -> Iterator[tuple[int, int]]:
        for low, high in self._states.chunks():
            self._check_time()
            yield low, high

    def _check_time(self) -> None:
        if self.deadline.passed:
            raise TimeoutError("out of time before the exact program began")

    def _root_slot(self, grid: Grid) -> int:
        return int((self.free + grid.offsets[self._root]) // grid.unit)

    def _at_root(self, grid: Grid) -> int | None:
        value = float(grid.table[grid.rows[self._root], self._root_slot(grid)])
        return None if value >= float(INFINITE) else int(value) * grid.quantum
