"""Cross two schedules: the beginning of one and the end of the other, or one part as the other treats a like part."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from heapq import merge
from itertools import accumulate
from random import Random

import numpy as np

from scheduler.graph import Graph
from scheduler.schedule import Schedule, runs_of, schedule_from_runs
from scheduler.solvers.anneal.repeats import NONE, Repeats
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.graph_arrays import Flags, GraphArrays, Ints, graph_arrays, profile_runs

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
    again : ndarray of int64
        The runs that are not the first ones of their operations.
    next_first : ndarray of int64
        The operation whose first run comes next after each of these; none of them comes after all first runs.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.runs = tuple(runs_of(graph, schedule))
        position = {i: at for at, i in reversed(list(enumerate(self.runs)))}
        self.firsts = sorted(position.values())
        self.elapsed = [0.0, *accumulate(graph.operations[i].time for i in self.runs)]
        runs, firsts = np.array(self.runs), np.array(self.firsts)
        others = np.delete(np.arange(firsts[-1]), firsts[:-1])
        self.again: Ints = runs[others]
        self.next_first: Ints = runs[firsts[np.searchsorted(firsts, others)]]

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


def translate(source: Parent, target: Parent, image: Ints, part: Flags) -> list[int]:
    """Return the runs of one schedule, but in the image of a part recomputed as another schedule recomputes that part.

    The image of a recomputation comes before the first run of the image of what runs first next,
    if there is one, and if what it repeats has run by then. All else stays; so every operation
    runs after what it reads, and the translation of valid sequences is valid.

    Parameters
    ----------
    source, target : Parent
    image : ndarray of int64, shape (operations,)
        The operation that corresponds to each one, or `NONE`; all operations of the part have one.
    part : ndarray of bool, shape (operations,)
    """
    kept: dict[int, list[int]] = {}
    for again, first in _pairs(target, ~_image_of(part, image)[target.again]):
        kept.setdefault(first, []).append(again)
    added: dict[int, list[int]] = {}
    for again, first in _pairs(source, part[source.again]):
        added.setdefault(int(image[first]), []).append(int(image[again]))
    runs: list[int] = []
    ran: set[int] = set()
    for position in target.firsts:
        first = target.runs[position]
        new = [again for again in added.get(first, ()) if again in ran]
        runs += merge(kept.get(first, ()), new) if new else kept.get(first, ())
        runs.append(first)
        ran.add(first)
    return runs


def _image_of(part: Flags, image: Ints) -> Flags:
    """Return, for each operation, whether it is the image of one of a part."""
    found = np.zeros_like(part)
    found[image[part]] = True
    return found


def _pairs(parent: Parent, chosen: Flags) -> Iterable[tuple[int, int]]:
    """Return the chosen ones of the runs that are not first ones, each with what runs first next."""
    return zip(parent.again[chosen].tolist(), parent.next_first[chosen].tolist(), strict=True)


class Crossings:
    """Crossings of the fastest known schedules: the one that saves most time for each byte over the budget comes next.

    Annealing does well in some blocks of a network and less well in others, each time in other
    ones. A crossing has the recomputations of one schedule in the backward of the last blocks,
    which comes first, and those of another one in that of the first blocks. This is the
    one-point crossover of genetic algorithms (Moscato 1989, "On evolution, search, optimization,
    genetic algorithms and martial arts: towards memetic algorithms", for local search from it).
    Where parts of the graph repeat, other crossings recompute in one part what the same or
    another schedule recomputes in another one: what pays in a layer mostly pays in all.

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
        return bool(self.parents and self._ways) and self._are_left

    def next(self, random: Random, deadline: Deadline) -> Schedule | None:
        """Return a crossing that has not been returned yet and is faster than all parents; it may exceed the budget.

        None if none of those that are drawn, until the deadline, is fast enough; then none is drawn until there is
        another parent.
        """
        if not self.are_possible:
            return None
        best: Ints | None = None
        best_time, most, profiled, arrays = math.inf, 0.0, 0, self._arrays
        fastest = self.parents[0].time
        for drawn in range(MOST_DRAWN):
            crossed = self._ways[drawn % len(self._ways)](random, (1 - LEAST_GAIN) * fastest)
            if crossed is None:
                continue
            runs = np.array(crossed, dtype=np.int64)
            time, peak_bytes = float(arrays.time[runs].sum()), int(profile_runs(arrays, runs).memory.max())
            gain, excess = fastest - time, max(1, peak_bytes + self.graph.resident_bytes - self.budget_bytes)
            if time not in self._tried and gain / excess > most:
                best, best_time, most = runs, time, gain / excess
            profiled += 1
            if profiled == MOST_PROFILED or deadline.passed:
                break
        self._tried.add(best_time)
        self._are_left = best is not None
        return None if best is None else schedule_from_runs(self.graph, best.tolist())

    @property
    def _ways(self) -> Sequence[Callable[[Random, float], list[int] | None]]:
        """How to draw a crossing that takes less than a time: each returns its runs, or None if it would take more."""
        cross = [self._cross] if len(self.parents) >= 2 else []
        return [*cross, self._translate] if self._repeats.images else cross

    def _cross(self, random: Random, most: float) -> list[int] | None:
        """Draw the beginning of one parent and the end of another."""
        begin, end = random.sample(self.parents, 2)
        firsts = random.randint(1, min(len(begin.firsts), len(end.firsts)))
        return cross(begin, end, firsts) if self._time(begin, end, firsts) < most else None

    def _translate(self, random: Random, most: float) -> list[int] | None:
        """Draw a part, of any order of magnitude, and how one parent treats it for its image in another or the same."""
        source, target = random.choice(self.parents), random.choice(self.parents)
        image, time = self._repeats.draw(random), self._arrays.time
        with_image = np.flatnonzero(image != NONE)
        length = round(len(with_image) ** random.random())
        begin = random.randint(0, len(with_image) - length)
        part = np.zeros(len(image), dtype=np.bool_)
        part[with_image[begin : begin + length]] = True
        replaced = target.again[_image_of(part, image)[target.again]]
        added = image[source.again[part[source.again] & (image[source.next_first] != NONE)]]
        is_fast = target.time - time[replaced].sum() + time[added].sum() < most
        return translate(source, target, image, part) if is_fast else None

    @cached_property
    def _repeats(self) -> Repeats:
        return Repeats(self.graph)

    @cached_property
    def _arrays(self) -> GraphArrays:
        return graph_arrays(self.graph)

    @staticmethod
    def _time(begin: Parent, end: Parent, firsts: int) -> float:
        """Return the time of a crossing, exactly where both run operations in the same order."""
        return begin.elapsed[begin.cut(firsts)] + end.time - end.elapsed[end.cut(firsts)]
