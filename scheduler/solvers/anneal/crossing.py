"""Cross two schedules: the beginning of one, and the end of the other."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import cached_property
from itertools import accumulate
from random import Random

import numpy as np

from scheduler.graph import Graph
from scheduler.schedule import Schedule, runs_of, schedule_from_runs
from scheduler.solvers.graph_arrays import GraphArrays, Ints, graph_arrays, profile_runs

MOST_PARENTS = 8
"""Schedules that are crossed with each other: the fastest known ones."""
MOST_DRAWN, MOST_PROFILED = 400, 24
"""So many pairs of parents and cuts are drawn for one crossing, until so many promise to be fast enough."""
LEAST_GAIN = 1e-3
"""A crossing takes less time than the fastest parent by at least this share: to follow it would change little."""


class Parent:
    """The runs of a schedule, and where to cut them.

    Parameters
    ----------
    graph : Graph
    schedule : Schedule

    Attributes
    ----------
    runs : tuple of int
    firsts : list of int
        The positions of first runs.
    elapsed : list of float
        The time before each position, and last that of all runs.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.runs = tuple(runs_of(graph, schedule))
        position = {i: at for at, i in reversed(list(enumerate(self.runs)))}
        self.firsts = sorted(position.values())
        self.elapsed = [0.0, *accumulate(graph.operations[i].time for i in self.runs)]

    @property
    def time(self) -> float:
        """Time of all runs."""
        return self.elapsed[-1]

    def cut(self, firsts: int) -> int:
        """Return the position right after so many first runs."""
        return self.firsts[firsts - 1] + 1


def cross(begin: Parent, end: Parent, firsts: int) -> list[int]:
    """Return the runs of one schedule up to so many first runs, and then those of another from there on.

    Where the two run operations in different orders, those that the beginning lacks follow it, in
    the other one's order, and first runs of the end that it already has are left out. Every
    operation so runs after what it reads: the crossing of two valid sequences is valid.
    """
    stop, start = begin.cut(firsts), end.cut(firsts)
    runs = list(begin.runs[:stop])
    ran = set(runs)
    runs += [i for i in dict.fromkeys(end.runs[:start]) if i not in ran]
    repeated = {at for at in end.firsts[bisect_left(end.firsts, start) :] if end.runs[at] in ran}
    return runs + [end.runs[at] for at in range(start, len(end.runs)) if at not in repeated]


class Crossings:
    """Crossings of the fastest known schedules: the one that saves most time for each byte over the budget comes next.

    Annealing does well in some blocks of a network and less well in others, each time in other
    ones. A crossing has the recomputations of one schedule in the backward of the last blocks,
    which comes first, and those of another one in that of the first blocks. This is the
    one-point crossover of genetic algorithms (Moscato 1989, "On evolution, search, optimization,
    genetic algorithms and martial arts: towards memetic algorithms", for local search from it).

    Parameters
    ----------
    graph : Graph
    budget_bytes : int
    """

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        self.parents: list[Parent] = []
        self._tried: set[float] = set()
        """Times of the crossings so far."""
        self._are_left = True
        """Whether a crossing was found at the last attempt, or there is a new parent since."""

    def add(self, schedule: Schedule) -> None:
        """Add a schedule that fits, unless it is slow or takes the time of one that is there."""
        parent = Parent(self.graph, schedule)
        if all(parent.time != other.time for other in self.parents):
            self.parents = sorted([*self.parents, parent], key=lambda each: each.time)[:MOST_PARENTS]
            self._are_left |= parent in self.parents

    @property
    def are_possible(self) -> bool:
        """Whether there are schedules to cross, and not all that is drawn of them has been tried."""
        return len(self.parents) >= 2 and self._are_left

    def next(self, random: Random) -> Schedule | None:
        """Return a crossing that has not been returned yet and is faster than all parents; it may exceed the budget.

        None if none of those that are drawn is fast enough; then none is drawn until there is another parent.
        """
        if not self.are_possible:
            return None
        best: Ints | None = None
        best_time, most, profiled, arrays = math.inf, 0.0, 0, self._arrays
        fastest = self.parents[0].time
        for _ in range(MOST_DRAWN):
            begin, end = random.sample(self.parents, 2)
            firsts = random.randint(1, min(len(begin.firsts), len(end.firsts)))
            if fastest - self._time(begin, end, firsts) <= LEAST_GAIN * fastest:
                continue
            runs = np.array(cross(begin, end, firsts), dtype=np.int64)
            time, peak_bytes = float(arrays.time[runs].sum()), int(profile_runs(arrays, runs).memory.max())
            gain, excess = fastest - time, max(1, peak_bytes + self.graph.resident_bytes - self.budget_bytes)
            if time not in self._tried and gain / excess > most:
                best, best_time, most = runs, time, gain / excess
            profiled += 1
            if profiled == MOST_PROFILED:
                break
        self._tried.add(best_time)
        self._are_left = best is not None
        return None if best is None else schedule_from_runs(self.graph, best.tolist())

    @cached_property
    def _arrays(self) -> GraphArrays:
        return graph_arrays(self.graph)

    @staticmethod
    def _time(begin: Parent, end: Parent, firsts: int) -> float:
        """Return the time of a crossing, exactly where both run operations in the same order."""
        return begin.elapsed[begin.cut(firsts)] + end.time - end.elapsed[end.cut(firsts)]
