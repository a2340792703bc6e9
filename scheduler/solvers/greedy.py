"""Greedy eviction: where memory peaks, evict what is large and cheap to recompute."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.graph_arrays import (
    DROP,
    EVICT,
    KEEP,
    GraphArrays,
    Ints,
    decode_decisions,
    graph_arrays,
    profile_runs,
    row_places,
)

_MOST_RUNS_PER_OPERATION = 60
_INFINITE_BYTES = 2**62


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the schedule that greedy evictions lead to.

    In the input order, each tensor is kept, evicted, or dropped again and again in the gap
    between one use and the next. While the peak exceeds the budget, the search evicts the
    kept tensor that is live at the peak and has the most bytes per time to recompute. Then it
    undoes evictions that turned out to be unnecessary.

    Guarantee: none. Search space: input order. When: an answer in milliseconds, a start for
    other solvers, budgets of 50 % and more of the peak. Cost: one linear pass per group of
    evictions. Memory: at most 16 MiB and 4 KiB an operation.
    """
    search = GreedySearch(problem.graph, problem.budget_bytes)
    search.fit(deadline)
    search.restore(deadline)
    return Proposal(search.schedule(), "input order")


@dataclass
class _Outcome:
    """The runs that the present decisions lead to, and their memory.

    Attributes
    ----------
    runs, steps : ndarray of int64
        As `decode_decisions` returns them.
    memory, ends : ndarray of int64
        As `profile_runs` returns them.
    peak_bytes : int
        Resident tensors included.
    time : float
    """

    runs: Ints
    steps: Ints
    memory: Ints
    ends: Ints
    peak_bytes: int
    time: float


_Gap = tuple[bool, int]
"""A gap: (True, tensor) opens when the tensor is first computed, (False, edge) after a use."""


class GreedySearch:
    """Retention decisions for the gaps of the input order.

    Parameters
    ----------
    graph : Graph
    budget_bytes : int
        Resident tensors included.
    """

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.arrays: GraphArrays = graph_arrays(graph)
        self.decision = np.zeros(len(self.arrays.inputs), dtype=np.int8)
        self.decision_at_first = np.zeros(len(self.arrays.producer), dtype=np.int8)
        self.current: _Outcome = self._evaluate()
        self.best: _Outcome = self.current
        self.log: list[tuple[_Gap, int]] = []
        """Evicted gaps, each with the decision before."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the best outcome so far, resident tensors included."""
        return self.best.peak_bytes

    def schedule(self) -> Schedule:
        """Return the best outcome as a schedule."""
        return schedule_from_runs(self.graph, [int(i) for i in self.best.runs])

    @property
    def fits(self) -> bool:
        """Whether the best outcome so far fits the budget."""
        return self.best.peak_bytes <= self.budget_bytes

    def evict_across(self, task: int, keep: Container[int]) -> None:
        """Evict every tensor that is live when a task first runs, except those to keep.

        Parameters
        ----------
        task : int
            A task of the graph; the moment is the first run of its default.
        keep : container of int
            Tensors.
        """
        a = self.arrays
        steps = {int(i): step for step, i in enumerate(a.order)}
        moment = steps.get(self.graph.index.tasks[task][0], 0)
        for gap in self._open_gaps(moment).values():
            at_first, place = gap
            tensor = place if at_first else int(a.inputs[place])
            if tensor not in keep and not a.pinned[tensor] and self._state(gap) == KEEP:
                self._evict(gap)
        self.current = self._evaluate()
        self._keep_if_better(self.current)

    def fit(self, deadline: Deadline) -> None:
        """Evict until the peak fits, nothing is left to evict, or time is up."""
        while self.current.peak_bytes > self.budget_bytes and not deadline.passed:
            if not len(self.current.runs) or not self._evict_at_peak(self.current):
                return
            self.current = self._evaluate()
            self._keep_if_better(self.current)

    def restore(self, deadline: Deadline) -> None:
        """Undo evictions, the latest first, while the peak still fits."""
        if not self.fits:
            return
        for (at_first, place), before in reversed(self.log):
            if deadline.passed:
                return
            target = self.decision_at_first if at_first else self.decision
            evicted, target[place] = target[place], before
            outcome = self._evaluate()
            if outcome.peak_bytes > self.budget_bytes or outcome.time > self.best.time:
                target[place] = evicted
            else:
                self.best = outcome

    def _keep_if_better(self, outcome: _Outcome) -> None:
        key = (max(outcome.peak_bytes, self.budget_bytes), outcome.time)
        if key < (max(self.best.peak_bytes, self.budget_bytes), self.best.time):
            self.best = outcome

    def _evict(self, gap: _Gap) -> None:
        at_first, place = gap
        target = self.decision_at_first if at_first else self.decision
        self.log.append((gap, int(target[place])))
        target[place] = EVICT if target[place] == KEEP else DROP

    def _evaluate(self) -> _Outcome:
        """Return what the decisions lead to; an infinite outcome if the runs are too many."""
        a = self.arrays
        most_runs = _MOST_RUNS_PER_OPERATION * len(a.order) + 1000
        runs, steps, count = decode_decisions(a, self.decision, self.decision_at_first, most_runs)
        if count < 0:
            nothing = np.zeros(0, dtype=np.int64)
            return _Outcome(nothing, nothing, nothing, nothing, _INFINITE_BYTES, float("inf"))
        runs, steps = runs[:count].copy(), steps[:count].copy()
        profile = profile_runs(a, runs)
        peak = int(profile.memory.max()) + self.graph.resident_bytes
        return _Outcome(runs, steps, profile.memory, profile.ends, peak, float(a.time[runs].sum()))

    def _evict_at_peak(self, outcome: _Outcome) -> bool:
        """Evict the best gaps that are open at the peak until it should fit; return False if there is none."""
        a = self.arrays
        peak = int(outcome.memory.argmax())
        over = outcome.peak_bytes - self.budget_bytes
        live, gap = self._live_at(outcome, peak)
        available = set(live)
        reads = set(a.inputs[a.input_start[outcome.runs[peak]] : a.input_start[outcome.runs[peak] + 1]].tolist())
        groups: dict[int, list[int]] = {}
        for tensor in live:
            groups.setdefault(int(a.storage[tensor]), []).append(tensor)
        candidates = []
        for storage, tensors in groups.items():
            size = int(a.storage_bytes[storage])
            if size == 0 or any(t in reads or a.pinned[t] or self._state(gap[t]) == DROP for t in tensors):
                continue
            cost = sum(self._cost(t, available) for t in {int(a.producer[t]): t for t in tensors}.values())
            candidates.append((size / (cost + 1e-12 * float(a.time.max()) + 1e-300), storage, size, tensors))
        if not candidates:
            return False
        candidates.sort(reverse=True)
        for _, _, size, tensors in candidates:
            for tensor in tensors:
                self._evict(gap[tensor])
            over -= size
            if over <= 0:
                break
        return True

    def _live_at(self, outcome: _Outcome, peak: int) -> tuple[list[int], dict[int, _Gap]]:
        """Return the tensors that are live across a run and not its outputs, and the open gap of each."""
        a = self.arrays
        outputs = a.outputs[row_places(a.output_start, outcome.runs[:peak])]
        until = np.full(len(a.producer), -1)
        until[outputs] = outcome.ends[: len(outputs)]  # of several runs, the last one counts
        last = outcome.runs[peak]
        until[a.outputs[a.output_start[last] : a.output_start[last + 1]]] = -1
        gap = self._open_gaps(int(outcome.steps[peak]))
        return [t for t in dict.fromkeys(outputs.tolist()) if until[t] > peak and t in gap], gap

    def _open_gaps(self, step: int) -> dict[int, _Gap]:
        """Return the gap that is open for each tensor just before a step of the order."""
        a = self.arrays
        outputs = a.outputs[row_places(a.output_start, a.order[:step])].tolist()
        uses = row_places(a.input_start, a.order[:step])
        gap: dict[int, _Gap] = {t: (True, t) for t in outputs}
        gap.update((t, (False, e)) for t, e in zip(a.inputs[uses].tolist(), uses.tolist(), strict=True))
        return gap

    def _state(self, gap: _Gap) -> int:
        at_first, place = gap
        return int(self.decision_at_first[place] if at_first else self.decision[place])

    def _cost(self, tensor: int, live: set[int]) -> float:
        """Return the time to recompute a tensor; inputs that are not live count half of their time."""
        a = self.arrays
        i = a.producer[tensor]
        inputs = a.inputs[a.input_start[i] : a.input_start[i + 1]].tolist()
        return float(a.time[i]) + 0.5 * sum(float(a.time[a.producer[t]]) for t in inputs if t not in live)
