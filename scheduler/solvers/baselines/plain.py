"""Check that a graph can be expressed by the programs of `checkmate` and `moccasin`."""

from __future__ import annotations

from scheduler.errors import UnsuitableProblemError
from scheduler.graph import Graph


def check_plain(graph: Graph, solver: str, most_operations: int) -> None:
    """Reject graphs that are large, or have alternatives, or tensors that share a storage.

    Parameters
    ----------
    graph : Graph
    solver : str
        Name of the solver, for the error.
    most_operations : int

    Raises
    ------
    UnsuitableProblemError
    """
    index = graph.index
    count = len(index.defaults)
    if count > most_operations:
        raise UnsuitableProblemError(
            f'"{solver}" takes up to {most_operations} operations, but this graph has {count}: use "ilp" or "auto"'
        )
    if any(len(task) > 1 for task in index.tasks):
        raise UnsuitableProblemError(
            f'"{solver}" does not support alternatives, but this graph has some: use "ilp" or "auto"'
        )
    storages = [storage for storage in index.storage_of if index.storage_bytes[storage]]
    if len(set(storages)) < len(storages):
        raise UnsuitableProblemError(
            f'"{solver}" needs one storage per tensor, but some tensors share a storage: use "ilp" or "auto"'
        )
