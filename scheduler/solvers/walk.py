"""Walk through the input order and recompute missing tensors on the way.

A solver decides what to drop and when; the walk turns that into a sequence of runs.
`schedule_from_runs` derives the frees from the sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from scheduler.graph import Graph


def cheapest_producers(graph: Graph) -> list[int]:
    """Return, per tensor, the cheapest operation that can recompute it; -1 for resident tensors.

    An operation qualifies if it has the phase of its task's default, and if its inputs can be
    recomputed in the same way by earlier tasks; forward operations only in tasks that the
    defaults run. So the recursive recomputation of a missing tensor terminates, never starts
    the backward phase early, and runs no forward task for the first time in it. A tensor
    without such an operation has -1 too.
    """
    index, operations = graph.index, graph.operations
    producers = [-1] * len(graph.tensors)
    defaults = set(index.defaults)
    for task in index.tasks:
        phase = operations[task[0]].phase
        eligible = [
            i
            for i in task
            if (phase == "backward" or task[0] in defaults)
            and operations[i].phase == phase
            and all(index.is_resident[t] or producers[t] >= 0 for t in index.inputs[i])
        ]
        for i in sorted(eligible, key=lambda i: (operations[i].time, i), reverse=True):
            for tensor in index.outputs[i]:
                producers[tensor] = i
    return producers


def substitutes(graph: Graph) -> frozenset[int]:
    """Return the operations that may run first instead of their tasks' defaults, with inputs that a walk can compute.

    Those have the phase of the default, and nothing requires another operation of the task.
    """
    index, operations, producers = graph.index, graph.operations, cheapest_producers(graph)

    def is_computed_before(tensor: int, number: int) -> bool:
        return index.is_resident[tensor] or (producers[tensor] >= 0 and index.task_of[producers[tensor]] < number)

    return frozenset(
        i
        for number, (default, *others) in enumerate(index.tasks)
        if index.required.isdisjoint((default, *others))
        for i in others
        if operations[i].phase == operations[default].phase
        and all(is_computed_before(tensor, number) for tensor in index.inputs[i])
    )


class Walk:
    """A growing sequence of runs, and the tensors that later runs may still read.

    Parameters
    ----------
    graph : Graph
    rebuilt_alone : collection of int, optional
        Operations: once `ensure` has run one of them, what it recomputed for that is dropped again.

    Attributes
    ----------
    runs : list of int
        Operations, by position in the graph.
    available : set of int
        Live tensors, without the resident ones.
    """

    def __init__(self, graph: Graph, rebuilt_alone: Collection[int] = ()) -> None:
        self.graph = graph
        self.index = graph.index
        self.runs: list[int] = []
        self.available: set[int] = set()
        self._rebuilt_alone = rebuilt_alone
        self._producers = cheapest_producers(graph)
        self._pinned = {
            tensor
            for tensor, producer in enumerate(self._producers)
            if producer >= 0 and not graph.operations[producer].repeatable
        }

    def run(self, operation: int) -> None:
        """Run an operation, after recomputing its missing inputs."""
        self.ensure(self.index.inputs[operation])
        self._append(operation)

    def ensure(self, tensors: Iterable[int]) -> None:
        """Recompute the missing ones of these tensors, and whatever they need."""
        index, available = self.index, self.available
        before: dict[int, set[int]] = {}
        """Of those that are rebuilt alone and wait for their inputs: what was available before."""
        for wanted in tensors:
            if wanted in available or index.is_resident[wanted]:
                continue
            stack = [wanted]
            while stack:
                tensor = stack[-1]
                if tensor in available:
                    stack.pop()
                    continue
                producer = self._producers[tensor]
                missing = [t for t in index.inputs[producer] if t not in available and not index.is_resident[t]]
                if missing:
                    if producer in self._rebuilt_alone:
                        before.setdefault(producer, set(available))
                    stack.extend(reversed(missing))
                else:
                    stack.pop()
                    self._append(producer)
                    if producer in before:
                        self.drop(available - before.pop(producer) - set(index.outputs[producer]))

    def can_compute(self, tensor: int) -> bool:
        """Return whether `ensure` can compute a tensor."""
        return self._producers[tensor] >= 0

    def drop(self, tensors: Iterable[int]) -> None:
        """Drop tensors, except those whose producer is not repeatable."""
        self.available.difference_update(set(tensors) - self._pinned)

    def keep_only(self, tensors: Iterable[int]) -> None:
        """Drop all tensors except these and those whose producer is not repeatable."""
        self.available &= set(tensors) | self._pinned

    def _append(self, operation: int) -> None:
        self.runs.append(operation)
        self.available.update(self.index.outputs[operation])
