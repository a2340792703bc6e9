"""Find which tasks must first run before which others.

A moment is the first run of a task, and has its number; or the first run of whichever of several
tasks comes first (`Precedence.first_of`). Where branches of a step may run one after the other in
either order, memory peaks in the branch that comes first: no moment of one branch alone says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

from scheduler.graph import Graph

_ROWS = 256
"""So many tasks are looked at together."""


class Precedence:
    """The pairs of tasks of which one must first run before the other.

    Parameters
    ----------
    graph : Graph
    reorder : bool
        If false, tasks first run in the input order. Otherwise a task comes after the producers
        of the inputs that all its alternatives share, and every backward task comes after the
        forward tasks that the forward results need.
    pairs : iterable of (int, int), optional
        If the order is free: only of schedules in which, of each of these pairs, the first task
        first runs before the second. Both must run in every schedule, and have no alternatives.

    Moments, as arguments and in results, are numbers of tasks, or of `first_of`.
    """

    def __init__(self, graph: Graph, *, reorder: bool, pairs: Iterable[tuple[int, int]] = ()) -> None:
        self.reorder = reorder
        self.tasks = len(graph.index.tasks)
        self._ancestors = _ancestors(graph) if reorder else []
        for first, then in pairs:
            added = self._ancestors[first] | 1 << first
            for task, before in enumerate(self._ancestors):
                if task == then or before >> then & 1:
                    self._ancestors[task] |= added
        self._descendants: dict[int, int] = {}
        self._numbers: dict[tuple[int, ...], int] = {}
        self._several: list[tuple[int, ...]] = []

    def first_of(self, tasks: Iterable[int]) -> int:
        """Return the moment at which the first one of several tasks first runs.

        They must run in every schedule, have no alternatives, and none may have to precede another.
        """
        members = tuple(sorted(set(tasks)))
        if len(members) == 1:
            return members[0]
        if members not in self._numbers:
            self._numbers[members] = self.tasks + len(self._several)
            self._several.append(members)
        return self._numbers[members]

    def members(self, moment: int) -> tuple[int, ...]:
        """Return the tasks of which one first runs at a moment."""
        return (moment,) if moment < self.tasks else self._several[moment - self.tasks]

    def before(self, moment: int) -> int:
        """Return the tasks that must precede a moment, as bits."""
        if moment >= self.tasks:
            return reduce(int.__and__, map(self.before, self.members(moment)))
        return self._ancestors[moment] if self.reorder else (1 << moment) - 1

    def after(self, moment: int) -> int:
        """Return the tasks that must follow a moment, as bits; its own, if there are several, are among them."""
        if moment >= self.tasks:
            return reduce(int.__or__, (self.after(task) | 1 << task for task in self.members(moment)))
        if not self.reorder:
            return ((1 << self.tasks) - 1) ^ ((1 << (moment + 1)) - 1)
        if moment not in self._descendants:
            bits = "".join("1" if before >> moment & 1 else "0" for before in reversed(self._ancestors))
            self._descendants[moment] = int(bits, 2)
        return self._descendants[moment]

    def precedes(self, moment: int, other: int) -> bool:
        """Return whether a moment comes before another in every schedule."""
        members = self.members(moment)
        return all(any(self.before(task) >> member & 1 for member in members) for task in self.members(other))

    @cached_property
    def unordered(self) -> npt.NDArray[np.int64]:
        """For each task, how many others may first run before it as well as after it."""
        if not self.reorder:
            return np.zeros(self.tasks, np.int64)
        before = np.array([ancestors.bit_count() for ancestors in self._ancestors], np.int64)
        after, size = np.zeros(self.tasks, np.int64), -(-self.tasks // 8)
        for begin in range(0, self.tasks, _ROWS):
            # Few large operations: each may wait for another thread.
            block = b"".join(ancestors.to_bytes(size, "little") for ancestors in self._ancestors[begin : begin + _ROWS])
            rows = np.frombuffer(block, np.uint8).reshape(-1, size)
            after += np.unpackbits(rows, axis=1, count=self.tasks, bitorder="little").sum(axis=0, dtype=np.int64)
        return self.tasks - 1 - before - after

    def chain(self, moments: Sequence[int]) -> list[int]:
        """Return a totally ordered subset of moments, in that order; earlier entries take precedence."""
        chosen: list[int] = []
        for moment in moments:
            if all(self.precedes(moment, other) or self.precedes(other, moment) for other in chosen):
                chosen.append(moment)
        return sorted(chosen, key=lambda moment: (-self.after(moment).bit_count(), self.before(moment).bit_count()))


def _ancestors(graph: Graph) -> list[int]:
    """Return, per task, the tasks that first run before it in every schedule that runs both."""
    index = graph.index
    ancestors = [0] * len(index.tasks)
    phases = [{graph.operations[i].phase for i in task} for task in index.tasks]
    forward = sum(1 << number for number, phase in enumerate(phases) if phase == {"forward"})
    before_backward = forward
    for number, task in enumerate(index.tasks):
        common = -1
        for i in task:
            needs = 0
            for tensor in index.inputs[i]:
                for producer in index.producers[tensor][:1]:
                    other = index.task_of[producer]
                    # An alternative may read outputs of later tasks, whose ancestors are still missing. They drop
                    # out in the intersection with the default, which reads only outputs of earlier tasks.
                    needs |= 1 << other | ancestors[other]
            common &= needs
        ancestors[number] = common & ~(1 << number)
        if forward >> number & 1:
            before_backward |= ancestors[number]  # among them tasks that a backward operation may run as well
        if phases[number] == {"backward"}:
            ancestors[number] |= before_backward
    return ancestors


def bits(mask: int) -> list[int]:
    """Return the positions of the set bits, ascending."""
    text = bin(mask)[:1:-1]
    found, position = [], text.find("1")
    while position >= 0:
        found.append(position)
        position = text.find("1", position + 1)
    return found
