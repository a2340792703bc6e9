"""Retention annealing: keep, evict or drop each tensor between one use and the next, and recompute on demand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.anneal.cooling import temperatures
from scheduler.solvers.anneal.retention_loop import (
    BEST,
    MOST_CHANGES,
    MOST_RUNS_RATIO,
    WEIGHT_STEPS,
    RetentionState,
    anneal_decisions,
)
from scheduler.solvers.anneal.state import Ints
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.graph_arrays import DROP, EVICT, KEEP, decode_decisions

CHUNK_WORK = 3 * 10**6
"""Moves between two readings of the clock are about this over the number of operations."""
COLD = 0.03
"""Temperature at the end of a round, in mean times of an operation."""
FIRST_WEIGHT, FIRST_WEIGHT_OF_FITTING = 0.1, 1.0
"""Weight of memory over budget at the start of a round, in mean times of an operation per mean size of a tensor: with
the first one, what fits at a tight budget is soon far over it and never fits again."""


class RetentionWalker:
    """Annealed decisions about tensors, with their own random numbers.

    The decisions are those of `GreedySearch`, for the order of first runs of the schedule that a
    round starts from. A move evicts a tensor that is live where memory is over budget, keeps one
    again, or exchanges a tensor for the inputs of its producer; the whole sequence is decoded
    anew, with all recomputations that the decisions imply. So one move does what takes many
    coordinated ones on a sequence of runs, and tight budgets need them.

    Parameters
    ----------
    contraction : Contraction
    seed : int
    """

    def __init__(self, contraction: Contraction, seed: int) -> None:
        self.contraction = contraction
        self.random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
        self.model = contraction.retention_model
        self.state: RetentionState
        arrays = self.model.graph
        self.unit_time, self.unit_bytes = _mean(arrays.time), _mean(arrays.storage_bytes)
        self.chunk = max(1, CHUNK_WORK // len(arrays.time))
        self.moves = 0
        self.seconds = 0.0

    def load(self, runs: Sequence[int], *, fit: bool = False) -> None:
        """Start from the decisions of these runs of the graph, which may be known to fit."""
        first_weight = FIRST_WEIGHT_OF_FITTING if fit else FIRST_WEIGHT
        sequence, fixed, _ = self.contraction.contract(runs)
        order = np.array([i for i, first in zip(sequence, fixed, strict=True) if first], dtype=np.int64)
        tensors, gaps = len(self.model.graph.producer), len(self.model.tensor)
        operations = len(self.model.graph.time)
        step_of = np.full(operations, -1, dtype=np.int64)
        step_of[order] = np.arange(len(order))
        self.model = self.model._replace(graph=self.model.graph._replace(order=order), step_of=step_of)
        decision = self._decisions(sequence, fixed, step_of)
        loose = np.flatnonzero(decision != KEEP)
        place = np.full(gaps, -1, dtype=np.int64)
        place[loose] = np.arange(len(loose))
        self.state = RetentionState(
            decision=decision,
            loose=np.concatenate([loose, np.zeros(gaps - len(loose), dtype=np.int64)]),
            place=place,
            changed=np.zeros(MOST_CHANGES, dtype=np.int64),
            before=np.zeros(MOST_CHANGES, dtype=np.int8),
            version=np.zeros(tensors, dtype=np.int64),
            viewed=np.zeros(operations, dtype=np.int64),
            kept=decision.copy(),
            kept_order=order.copy(),
            counts=np.array([len(loose), 0, 0, 0, 0, 0], dtype=np.int64),
            levels=np.array([first_weight * self.unit_time / self.unit_bytes, math.inf]),
            random=self.random,
        )

    def cool(self, hot: float, moves: int, deadline: Deadline, *, free: bool = False) -> None:
        """Make moves while the temperature falls from `hot` to `COLD`, in mean times of an operation."""
        started, window = clock.now(), max(64, moves // WEIGHT_STEPS)
        for count, first, last in temperatures(hot, COLD, moves, self.chunk, deadline):
            unit = self.unit_time
            anneal_decisions(self.model, self.state, count, first * unit, last * unit, free, window)
            self.moves += count
        self.seconds += clock.now() - started

    @property
    def best_time(self) -> float:
        """Time of the fastest schedule since the last `load` that fits the budget; inf if there is none."""
        return float(self.state.levels[BEST])

    def best(self) -> Schedule:
        """Return that schedule.

        Raises
        ------
        ValueError
            If there is none.
        """
        if math.isinf(self.best_time):
            raise ValueError("no schedule fits: call best() only if best_time is finite")
        return self._schedule(self.state.kept, self.state.kept_order)

    def last(self) -> Schedule:
        """Return what the decisions lead to after the last move, whether it fits or not."""
        return self._schedule(self.state.decision, self.model.graph.order)

    def _schedule(self, decision: npt.NDArray[np.int8], order: Ints) -> Schedule:
        graph = self.model.graph._replace(order=order)
        tensors = len(graph.producer)
        most_runs = MOST_RUNS_RATIO * len(graph.order) + 1000
        runs, _, count = decode_decisions(graph, decision[tensors:], decision[:tensors], most_runs)
        return schedule_from_runs(self.contraction.graph, self.contraction.expand(runs[:count].tolist()))

    def _decisions(self, sequence: Sequence[int], fixed: Sequence[bool], step_of: Ints) -> npt.NDArray[np.int8]:
        """Return the decisions of a sequence: a tensor is evicted where it is recomputed before its next use."""
        model, graph = self.model, self.model.graph
        recomputed: dict[int, list[int]] = {}
        step = 0
        for i, first in zip(sequence, fixed, strict=True):
            step += first
            if not first:
                for t in graph.outputs[graph.output_start[i] : graph.output_start[i + 1]].tolist():
                    recomputed.setdefault(t, []).append(step)
        decision = np.full(len(model.tensor), KEEP, dtype=np.int8)
        for t, places in recomputed.items():
            uses = range(int(model.use_start[t]), int(model.use_start[t + 1]))
            opened = sorted((int(step_of[model.use_operation[u]]), int(model.use_gap[u])) for u in uses)
            ends = [begin for begin, _ in opened[1:]] + [len(step_of)]
            for (begin, gap), end in zip(opened, ends, strict=True):
                times = sum(begin < place <= end for place in places)
                if begin >= 0 and times and not graph.pinned[t]:
                    decision[gap] = EVICT if times == 1 else DROP
        return decision


def _mean(values: npt.NDArray[np.float64] | Ints) -> float:
    """Return the mean of the positive values; 1 if there are none."""
    return float(values[values > 0].mean()) if (values > 0).any() else 1.0
