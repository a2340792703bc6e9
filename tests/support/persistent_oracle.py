"""An exhaustive search over persistent schedules of a chain, on its lowered graph.

It shares no code with the solver: it tries every choice that the definition leaves open, with
the memory of `tests.support.oracle`, which takes the judge's rules literally. Persistent means:

1. What a layer saves stays, and the layer runs forward no more, until its backward.
2. An output that outlives the run after its own stays until its reader has saved, and no longer.
3. Every forward run reads the latest output that stands.
4. The loss and each backward run once, as soon as what they read stands.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from scheduler.graph.chain import Chain
from tests.support import oracle


class Node(NamedTuple):
    memory: oracle.State
    todo: int
    """Layers that have not run backward."""
    fresh: bool
    """Whether the latest output has only just been made: the next run may let it go."""

    def stands(self, tensor: str) -> bool:
        return any(tensor in instance for instance in self.memory.instances)


class PersistentSearch:
    """The moves of persistent schedules, by the names of the lowered graph."""

    def __init__(self, chain: Chain) -> None:
        lowered, operations = chain.lowered, chain.graph.operations
        self.graph = oracle.read(chain.graph.to_dict())
        self.layers = len(chain.layers)
        self.operation = {operation.name: operation for operation in operations}
        self.plain = [operations[i].name for i in lowered.without_saving]
        self.saving = [[operations[i].name for i in modes] for modes in lowered.saving]
        self.backward = [[operations[i].name for i in modes] for modes in lowered.backward]
        self.loss = [operations[lowered.loss].name, operations[lowered.loss_backward].name]
        self.output = ["input", *(self.operation[name].outputs[0] for name in self.plain)]

    def frontier(self) -> list[tuple[int, float]]:
        """Return all useful (peak, time) of persistent schedules, by ascending peak."""
        number = itertools.count()
        first = Node(oracle.start(), self.layers, False)
        heap = [(0.0, self.graph.resident_bytes, next(number), first)]
        least_peak: dict[tuple[object, ...], int] = {}
        found: list[tuple[int, float]] = []
        while heap:
            time, peak, _, node = heapq.heappop(heap)
            # What has run plays no part: the moves keep the phases apart by themselves.
            key = (node.memory.instances, node.todo, node.fresh)
            if peak >= least_peak.get(key, peak + 1):
                continue
            least_peak[key] = peak
            if node.todo == 0:
                oracle.check_end(self.graph, node.memory)
                found.append((peak, time))
                continue
            for spent, needed, after in self.moves(node):
                heapq.heappush(heap, (time + spent, max(peak, needed), next(number), after))
        return found[::-1]

    def moves(self, node: Node) -> Iterator[tuple[float, int, Node]]:
        """Yield time, peak and the node after of everything that the definition allows next."""
        last = node.todo - 1
        modes = [m for m, name in enumerate(self.backward[last]) if self._can_run(node, name)]
        if node.todo == self.layers and node.stands(self.output[-1]) and not node.stands("loss"):
            yield self._run(node, self.loss, [self.output[-1]], last + 1, fresh=False)
        elif modes:
            name = self.backward[last][modes[0]]
            read = [tensor for tensor in self.operation[name].inputs if tensor not in self.graph.resident]
            yield self._run(node, [name], read, last, fresh=False)
        else:
            yield from self._forward_moves(node)

    def _forward_moves(self, node: Node) -> Iterator[tuple[float, int, Node]]:
        i = max((k for k in range(1, node.todo) if node.stands(self.output[k])), default=0)
        if any(node.stands(self._saved(name)[0]) for name in self.saving[i]):
            return  # a saved layer runs no more; only the first one, whose input is resident, gets here
        source = [self.output[i]] if i else []
        unread = [self.output[i + 1]] if i + 1 == node.todo and node.stands("loss") else []
        for name in self.saving[i]:
            yield self._run(node, [name], [*source, *unread], node.todo, fresh=not unread)
        for name in [self.plain[i], *self.saving[i]]:
            dropped = [*self._saved(name), *unread]
            yield self._run(node, [name], dropped, node.todo, fresh=not unread)
            if source and node.fresh:
                yield self._run(node, [name], [*source, *dropped], node.todo, fresh=not unread)

    def _run(
        self, node: Node, names: Sequence[str], freed: Sequence[str], todo: int, *, fresh: bool
    ) -> tuple[float, int, Node]:
        memory, peak = node.memory, 0
        for name in names:
            memory, needed = oracle.step(self.graph, memory, ("compute", name))
            peak = max(peak, needed)
        for tensor in freed:
            memory, _ = oracle.step(self.graph, memory, ("free", tensor))
        return sum(self.operation[name].time for name in names), peak, Node(memory, todo, fresh)

    def _can_run(self, node: Node, name: str) -> bool:
        return all(tensor in self.graph.resident or node.stands(tensor) for tensor in self.operation[name].inputs)

    def _saved(self, name: str) -> tuple[str, ...]:
        return tuple(self.operation[name].outputs[1:])
