"""Find which tasks must first run before which others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

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
    """

    def __init__(self, graph: Graph, *, reorder: bool) -> None:
        self.reorder = reorder
        self.tasks = len(graph.index.tasks)
        self._ancestors = _ancestors(graph) if reorder else []
        self._descendants: dict[int, int] = {}

    def before(self, task: int) -> int:
        """Return the tasks that must precede a task, as bits."""
        return self._ancestors[task] if self.reorder else (1 << task) - 1

    def after(self, task: int) -> int:
        """Return the tasks that must follow a task, as bits."""
        if not self.reorder:
            return ((1 << self.tasks) - 1) ^ ((1 << (task + 1)) - 1)
        if task not in self._descendants:
            bits = "".join("1" if before >> task & 1 else "0" for before in reversed(self._ancestors))
            self._descendants[task] = int(bits, 2)
        return self._descendants[task]

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

    def chain(self, tasks: Sequence[int]) -> list[int]:
        """Return a totally ordered subset of the tasks, in that order; earlier entries of `tasks` take precedence."""
        chosen: list[int] = []
        for task in tasks:
            comparable = self.before(task) | self.after(task)
            if all(comparable >> other & 1 for other in chosen):
                chosen.append(task)
        return sorted(chosen, key=lambda task: self.before(task).bit_count())


def _ancestors(graph: Graph) -> list[int]:
    """Return, per task, the tasks that first run before it in every schedule that runs both."""
    index = graph.index
    ancestors = [0] * len(index.tasks)
    phases = [{graph.operations[i].phase for i in task} for task in index.tasks]
    forward = sum(1 << number for number, phase in enumerate(phases) if phase == {"forward"})
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
        if phases[number] == {"backward"}:
            ancestors[number] |= forward
    return ancestors


def bits(mask: int) -> list[int]:
    """Return the positions of the set bits, ascending."""
    text = bin(mask)[:1:-1]
    found, position = [], text.find("1")
    while position >= 0:
        found.append(position)
        position = text.find("1", position + 1)
    return found
