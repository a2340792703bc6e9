"""Anneal one sequence of runs: space it over the slots, and make moves while the temperature falls."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.anneal.cooling import temperatures
from scheduler.solvers.anneal.loop import anneal
from scheduler.solvers.anneal.memory import load
from scheduler.solvers.anneal.state import (
    AREA,
    BEST,
    BLOCK,
    COST,
    KEPT,
    WEIGHT,
    Flags,
    Floats,
    Ints,
    State,
    new_state,
)
from scheduler.solvers.deadline import Deadline, clock

CHUNK_MOVES, CHUNK_WORK = 30_000, 2 * 10**8
"""Moves between two readings of the clock: at most the first, and about the second over the number of operations."""
SPREAD_MOVES = 20
"""Moves after which the runs are spaced evenly over the slots again, per operation."""
COLD = 0.005
"""Temperature at the end of every round, in mean times of an operation."""


class Walker:
    """One annealed sequence, with its own random numbers.

    Parameters
    ----------
    contraction : Contraction
    seed : int
    free : bool
        Whether first runs shift too.
    """

    def __init__(self, contraction: Contraction, seed: int, *, free: bool) -> None:
        self.contraction, self.model, self.free = contraction, contraction.model, free
        self.random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
        self.state: State
        self.unit_time = _mean(self.model.time)
        self.unit_bytes = _mean(self.model.group_bytes)
        self.chunk = max(1, min(CHUNK_MOVES, CHUNK_WORK // len(self.model.time)))
        self.moves = 0
        self.seconds = 0.0

    def load(self, runs: Sequence[int], hot: float) -> None:
        """Start from these runs of the graph."""
        sequence, fixed, leads = self.contraction.contract(runs)
        slots = 3 * len(sequence) + BLOCK
        slots += -slots % BLOCK
        most = 2 * int(np.bincount(sequence).max()) + 14
        self.state = new_state(self.model, slots, most, self.random)
        self.state.lead[:] = [leads.get(task, i) for i, task in enumerate(self.contraction.graph.index.task_of)]
        self._spread(np.array(sequence, dtype=np.int64), np.array(fixed, dtype=np.bool_))
        fits = self.state.counts[AREA] == 0
        self.state.levels[BEST] = self.state.levels[COST] if fits else math.inf
        self.state.levels[WEIGHT] = hot * self.unit_time / self.unit_bytes

    def cool(self, hot: float, moves: int, deadline: Deadline) -> None:
        """Make moves while the temperature falls from `hot` to `COLD`, faster if time runs short.

        Parameters
        ----------
        hot : float
            In mean times of an operation.
        moves : int
        deadline : Deadline
        """
        started, unspread = clock.now(), 0
        for count, first, last in temperatures(hot, COLD, moves, self.chunk, deadline):
            if unspread >= SPREAD_MOVES * len(self.model.time):
                filled = self.state.run >= 0
                self._spread(self.state.run[filled], self.state.fixed[filled])
                unspread = 0
            anneal(self.model, self.state, count, first * self.unit_time, last * self.unit_time, self.free)
            self.moves, unspread = self.moves + count, unspread + count
        self.seconds += clock.now() - started

    def best(self) -> Schedule | None:
        """Return the fastest schedule that fits, if it is faster than the start."""
        if not self.state.counts[KEPT]:
            return None
        kept = self.state.kept_run
        return schedule_from_runs(self.contraction.graph, self.contraction.expand(kept[kept >= 0].tolist()))

    def _spread(self, sequence: Ints, fixed: Flags) -> None:
        """Space the runs evenly over the slots."""
        slots = (2 * np.arange(len(sequence), dtype=np.int64) + 1) * len(self.state.run) // (2 * len(sequence))
        load(self.model, self.state, sequence, fixed, slots)


def _mean(values: Ints | Floats) -> float:
    """Return the mean of the positive values; 1 if there are none."""
    return float(values[values > 0].mean()) if (values > 0).any() else 1.0
