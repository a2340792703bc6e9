"""Views folded into what they look at."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.graph import Graph


@dataclass(frozen=True)
class FoldedViews:
    """Which operations only look at storages that stand, and what they look at.

    Attributes
    ----------
    root : tuple of int
        Per tensor: the tensor that stands for it, itself unless a folded operation makes
        it; -1 for resident ones and views of them.
    folded : tuple of bool
        Per operation.
    """

    root: tuple[int, ...]
    folded: tuple[bool, ...]


def fold_views(graph: Graph, *, free: bool = False) -> FoldedViews:
    """Return the views of a graph.

    A view is an operation that can run again, has no workspace, reads one instance and makes
    nothing beside it, in a task of its own.

    Parameters
    ----------
    graph : Graph
    free : bool
        Whether only views that take no time count.
    """
    index = graph.index
    root = [-1 if resident else t for t, resident in enumerate(index.is_resident)]
    folded = [False] * len(graph.operations)
    for i, operation in enumerate(graph.operations):
        roots = {root[t] for t in index.inputs[i]} - {-1}
        storages = {index.storage_of[t] for t in index.outputs[i]}
        if (
            len(roots) == 1
            and operation.repeatable
            and operation.workspace_bytes == 0
            and not (free and operation.time)
            and storages == {index.storage_of[min(roots)]}
            and len(index.tasks[index.task_of[i]]) == 1
        ):
            folded[i] = True
            for t in index.outputs[i]:
                root[t] = min(roots)
    return FoldedViews(tuple(root), tuple(folded))
