"""A walk through the input order that computes again whatever is missing.

Solvers decide what to drop and when; the walk turns that into a sequence of runs. Frees
follow from the sequence (`schedule_from_runs`).
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.graph import Graph


def cheapest_makers(graph: Graph) -> list[int]:
    """Return, per tensor, the cheapest operation that can make it again; -1 for resident ones.

    Only operations of the phase of their task's default count, and only if what they read is
    made in the same way by tasks before their own: so computing again what is missing comes
    to an end, and begins no phase. A tensor that no such operation makes has -1 too.
    """
    index, operations = graph.index, graph.operations
    makers = [-1] * len(graph.tensors)
    for task in index.tasks:
        phase = operations[task[0]].phase
        sound = [
            i
            for i in task
            if operations[i].phase == phase and all(index.is_resident[t] or makers[t] >= 0 for t in index.inputs[i])
        ]
        for i in sorted(sound, key=lambda i: (operations[i].time, i), reverse=True):
            for tensor in index.outputs[i]:
                makers[tensor] = i
    return makers


class Walk:
    """The runs so far, and which tensors later runs may still read.

    Attributes
    ----------
    runs : list of int
        Operations, by position in the graph.
    available : set of int
        Tensors that stand, resident ones left out.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index = graph.index
        self.runs: list[int] = []
        self.available: set[int] = set()
        self._makers = cheapest_makers(graph)
        self._pinned = {
            tensor for tensor, maker in enumerate(self._makers) if maker >= 0 and not graph.operations[maker].repeatable
        }

    def run(self, operation: int) -> None:
        """Run an operation, its missing inputs first."""
        self.ensure(self.index.inputs[operation])
        self._append(operation)

    def ensure(self, tensors: Iterable[int]) -> None:
        """Compute again those of the tensors that are missing, and what they need."""
        index, available = self.index, self.available
        for wanted in tensors:
            if wanted in available or index.is_resident[wanted]:
                continue
            stack = [wanted]
            while stack:
                tensor = stack[-1]
                if tensor in available:
                    stack.pop()
                    continue
                maker = self._makers[tensor]
                missing = [t for t in index.inputs[maker] if t not in available and not index.is_resident[t]]
                if missing:
                    stack.extend(reversed(missing))
                else:
                    stack.pop()
                    self._append(maker)

    def can_make(self, tensor: int) -> bool:
        """Return whether `ensure` knows how to make a tensor."""
        return self._makers[tensor] >= 0

    def drop(self, tensors: Iterable[int]) -> None:
        """Forget tensors, except those whose maker cannot run again."""
        self.available.difference_update(set(tensors) - self._pinned)

    def keep_only(self, tensors: Iterable[int]) -> None:
        """Forget all but these tensors and those whose maker cannot run again."""
        self.available &= set(tensors) | self._pinned

    def _append(self, operation: int) -> None:
        self.runs.append(operation)
        self.available.update(self.index.outputs[operation])
