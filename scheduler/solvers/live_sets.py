"""Bound the peak of every schedule by tensors that must be in memory at once, followed backward from the results.

At the end, all results are live. Of tensors that are live at once, one was computed last; while its operation ran, the
others were live, and what it reads; before, all of these were live at once. So some path of such steps leads from the
results to nothing, and the least memory on the worst step of a path, over all paths, bounds the peak. It is the least
number of pebbles of the black pebble game (Paterson and Hewitt 1970), with sizes, views and workspaces.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import count
from operator import and_, or_

from scheduler.graph import Graph
from scheduler.problem import Floor
from scheduler.solvers.deadline import Deadline

MOST_OPERATIONS = 300
"""In larger graphs there are so many sets that few steps are followed."""
MOST_SETS = 20_000
"""After so many sets, the bound is the least memory of the paths so far: less than a second."""
_STEPS_PER_LOOK = 100
"""So often the clock is read."""


def floor_of_live_sets(graph: Graph, deadline: Deadline, *, enough_bytes: int) -> Floor | None:
    """Return a lower bound on the peak of every schedule; None for a large graph.

    Parameters
    ----------
    graph : Graph
    deadline : Deadline
    enough_bytes : int
        The search ends as soon as the floor is at least this.
    """
    return None if len(graph.operations) > MOST_OPERATIONS else _LiveSets(graph).floor(deadline, enough_bytes)


class _LiveSets:
    """The search over sets of tensors, without resident ones.

    Attributes
    ----------
    inputs, outputs : list of frozenset of int
        What each operation reads and makes.
    needs : list of int
        For each operation, those without which it cannot run, as a bit mask.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.index = graph, graph.index
        self.inputs = [self._without_resident(tensors) for tensors in self.index.inputs]
        self.outputs = [self._without_resident(tensors) for tensors in self.index.outputs]
        self.needs = [0] * len(graph.operations)
        for i, tensors in enumerate(self.inputs):
            self.needs[i] = reduce(or_, map(self._needed_for, tensors), 0)

    def floor(self, deadline: Deadline, enough_bytes: int) -> Floor:
        """Follow the set that has needed least memory so far, until one is empty, or that memory is enough."""
        live = self._without_resident(tensor for tensor, result in enumerate(self.index.is_result) if result)
        size, order = self._bytes(live), count()
        # As in `problem.floor`: where the results need most, that is with the last one.
        operation = max((self.index.producers[tensor][0] for tensor in live), default=0)
        least, waiting = {live: size}, list[tuple[int, int, int, frozenset[int]]]()
        for step in count(1):
            is_over = not live or size >= enough_bytes or len(least) > MOST_SETS
            if is_over or (step % _STEPS_PER_LOOK == 0 and deadline.passed):
                break
            for i, before in self._steps(live):
                during = self._bytes(before | self.outputs[i]) + self.graph.operations[i].workspace_bytes
                most, worst = (during, i) if during > size else (size, operation)
                if most < least.get(before, most + 1):
                    least[before] = most
                    heapq.heappush(waiting, (most, next(order), worst, before))
            size, _, operation, live = heapq.heappop(waiting)
        return Floor(size, self.graph.operations[operation].name, alone=False)

    def _steps(self, live: frozenset[int]) -> Iterator[tuple[int, frozenset[int]]]:
        """Yield the operations that may have computed one of some live tensors last, and what was live before."""
        for i in sorted({i for tensor in live for i in self.index.producers[tensor]}):
            others = live - self.outputs[i]
            # What cannot be computed without an operation that runs only once was not live before its run.
            is_once = not self.graph.operations[i].repeatable
            if not (is_once and any(self._needed_for(tensor) >> i & 1 for tensor in others)):
                yield i, others | self.inputs[i]

    def _needed_for(self, tensor: int) -> int:
        """Return the operations without which a tensor cannot be computed, as a bit mask."""
        return reduce(and_, (self.needs[i] | 1 << i for i in self.index.producers[tensor]))

    def _without_resident(self, tensors: Iterable[int]) -> frozenset[int]:
        return frozenset(tensor for tensor in tensors if not self.index.is_resident[tensor])

    def _bytes(self, live: frozenset[int]) -> int:
        """Return the bytes of the storages of some tensors, and of the resident ones."""
        storages = {self.index.storage_of[tensor] for tensor in live}
        return self.index.resident_bytes + sum(self.index.storage_bytes[storage] for storage in storages)
