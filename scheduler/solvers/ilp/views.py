"""Fold views into their base tensors."""

from __future__ import annotations

from dataclasses import dataclass

from scheduler.graph import Graph


@dataclass(frozen=True)
class FoldedViews:
    """The operations of a graph that are pure views, and the base of each tensor.

    Attributes
    ----------
    root : tuple of int
        The base of each tensor: the tensor itself unless a folded operation produces it;
        -1 for resident tensors and their views.
    folded : tuple of bool
        Whether each operation is a pure view.
    """

    root: tuple[int, ...]
    folded: tuple[bool, ...]


def fold_views(graph: Graph, *, free: bool = False) -> FoldedViews:
    """Find the pure views of a graph.

    A pure view is an operation that is repeatable, has no workspace and no alternative, reads
    one storage, and whose outputs all lie on that storage.

    Parameters
    ----------
    graph : Graph
    free : bool
        Whether to fold only views that take no time.
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
