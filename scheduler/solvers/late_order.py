"""Run operations late: those that take memory and for which only one other waits, right before that one is read.

Autograd runs the backward in an order that ignores memory. Where a loop over time reads a tensor
slice by slice, it adds up the gradient of the whole tensor at every step, which takes three times
the tensor, although the slices' gradients could wait; and it computes what only the next layer's
backward reads long before that. An order in which these operations run late needs less memory at
most moments, so that schedules which follow it recompute less.
"""

from __future__ import annotations

from dataclasses import replace

from scheduler.graph import Graph
from scheduler.problem import Problem, save_everything
from scheduler.simulator import simulate

LARGEST_GRAPH = 20_000
"""Graphs of more operations stay in the given order: to look for another takes over a second."""
MOST_MEMBERS = 400_000
"""So many members of groups are looked at, about a second; groups that are left then stay in their places."""


def in_late_order(problem: Problem) -> Problem:
    """Return a problem with its graph in the late order, if another order is allowed and something is recomputed.

    Schedules and bounds for any order hold for both problems; what a solver says of the input
    order of the new one holds for the late order.
    """
    if not problem.reorder or problem.chain is not None or problem.baseline.peak_bytes <= problem.budget_bytes:
        return problem
    graph = late_order(problem.graph)
    return problem if graph is problem.graph else replace(problem, graph=graph)


def late_order(graph: Graph) -> Graph:
    """Return the graph in an order in which the save-everything step takes less memory on average.

    An operation's group is itself and all for which only it waits: every path from there to the
    end of the step leads through it (it is the postdominator). Members that free at least as much
    memory as they take stay in their places. The others move to right before the first reader of
    the operation, if that shortens the lives of storages more than it prolongs others.

    Returns the graph itself if nothing is gained, if it has alternatives, or if it has more than
    `LARGEST_GRAPH` operations.
    """
    if len(graph.operations) > LARGEST_GRAPH or any(len(task) > 1 for task in graph.index.tasks):
        return graph
    order = _Groups(graph).order()
    late = replace(graph, operations=tuple(graph.operations[i] for i in order))
    return late if _mean_bytes(late) < _mean_bytes(graph) else graph


def _mean_bytes(graph: Graph) -> float:
    return float(simulate(graph, save_everything(graph)).memory.mean())


class _Groups:
    """The groups of a graph without alternatives, and when they should run.

    Times are positions in the graph's order; half a position means right before an operation.

    Attributes
    ----------
    phase_end : list of int
        For each operation, the first one after its phase.
    made, read : list of list of int
        For each storage, the operations that make and that read its tensors; the end of the step
        reads results.
    first, last : list of int
        For each storage, the first and the last of these; of no use for resident ones, which
        nothing makes.
    freed_bytes : list of int
        For each operation, the bytes of the storages that it is the last to read.
    members : list of list of int
        For each operation, and then for the end, its children in the tree of postdominators.
    sizes : list of int
        For each operation, the size of its group.
    """

    def __init__(self, graph: Graph) -> None:
        index = graph.index
        self.index, self.count = index, len(graph.operations)
        phases = [operation.phase for operation in graph.operations]
        self.phase_end = [self.count] * self.count
        for i in range(self.count - 2, -1, -1):
            self.phase_end[i] = self.phase_end[i + 1] if phases[i] == phases[i + 1] else i + 1
        self.made: list[list[int]] = [[] for _ in index.storage_bytes]
        self.read: list[list[int]] = [[] for _ in index.storage_bytes]
        for t, storage in enumerate(index.storage_of):
            self.made[storage] += index.producers[t]
            self.read[storage] += [self.count] if index.is_result[t] else index.readers[t]
        self.first = [min(made, default=0) for made in self.made]
        self.last = [
            max((*made, *read)) if made else self.count for made, read in zip(self.made, self.read, strict=True)
        ]
        self.freed_bytes = [0] * self.count
        for made, read, size in zip(self.made, self.read, index.storage_bytes, strict=True):
            if made and max(read, default=self.count) < self.count:
                self.freed_bytes[max(read)] += size
        self.members = self._members()
        self.sizes = [1] * self.count
        for i in range(self.count):  # Members come before their top.
            self.sizes[i] += sum(self.sizes[member] for member in self.members[i])

    def order(self) -> list[int]:
        """Return the operations in the order in which they should run."""
        pending, moves, left = list(self.members[self.count]), [], MOST_MEMBERS
        while pending:
            top = pending.pop()
            late = set[int]()
            if self.sizes[top] <= left:
                left -= self.sizes[top]
                late = self._late(top, self._group(top))
            if late:
                moves.append((top, late))
            else:
                pending += self.members[top]
        times = [(float(i), i) for i in range(self.count)]
        for top, late in sorted(moves, key=lambda move: -self._first_read(move[0])):
            # The readers have moved already, if they are in groups that move.
            first = min([float(self.phase_end[top]), *(times[reader][0] for reader in self._readers(top))])
            for i in late:
                times[i] = (first - 0.5 if first.is_integer() else first, top)
        return sorted(range(self.count), key=lambda i: (times[i], i))

    def _members(self) -> list[list[int]]:
        """Return for which operations each one is the next that all readers lead to; the last entry is for the end.

        These are its children in the tree of postdominators.
        """
        end = self.count
        parent, depth = [end] * end, [0] * (end + 1)
        members: list[list[int]] = [[] for _ in range(end + 1)]
        for i in range(end - 1, -1, -1):
            readers = self._readers(i)
            is_result = any(self.index.is_result[t] for t in self.index.outputs[i])
            if readers and not is_result and max(readers) < self.phase_end[i]:
                top, *others = readers
                for other in others:
                    while top != other:
                        if depth[top] >= depth[other]:
                            top = parent[top]
                        else:
                            other = parent[other]
                parent[i] = top
            depth[i] = depth[parent[i]] + 1
            members[parent[i]].append(i)
        return members

    def _readers(self, i: int) -> set[int]:
        return {reader for t in self.index.outputs[i] for reader in self.index.readers[t]}

    def _first_read(self, i: int) -> int:
        """Return when the outputs of an operation are first read, or when its phase ends."""
        return min([self.phase_end[i], *self._readers(i)])

    def _group(self, top: int) -> list[int]:
        """Return the group of an operation, in order."""
        group = [top]
        for i in group:
            group += self.members[i]
        return sorted(group)

    def _late(self, top: int, group: list[int]) -> set[int]:
        """Return the members of a group that should move, if that gains anything."""
        index, late = self.index, set[int]()
        for i in group:
            sources = {source for t in index.inputs[i] for source in index.producers[t]}
            if not late.isdisjoint(sources) or index.allocated_bytes[i] > self.freed_bytes[i]:
                late.add(i)
        time = self._first_read(top) - 0.5
        touched = {index.storage_of[t] for i in late for t in (*index.inputs[i], *index.outputs[i])}
        gain = sum(index.storage_bytes[s] * self._shortened_by(s, late, time) for s in touched if self.made[s])
        return late if gain > 0 else set()

    def _shortened_by(self, storage: int, late: set[int], time: float) -> float:
        """Return by how much a storage lives shorter if all of some operations move to a time after theirs."""
        first, last = self.first[storage], self.last[storage]
        moved_first = min(time if i in late else i for i in self.made[storage]) if first in late else first
        return (last - first) - (max(last, time) - moved_first)
