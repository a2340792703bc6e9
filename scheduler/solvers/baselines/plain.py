"""Graphs that the stage program and the interval program can express."""

from __future__ import annotations

from scheduler.errors import UnsuitableProblemError
from scheduler.graph import Graph


def check_plain(graph: Graph, solver: str, most_operations: int) -> None:
    """Refuse graphs that are large, or have alternatives, or tensors that share a storage.

    Parameters
    ----------
    graph : Graph
    solver : str
        Who asks; named in the error.
    most_operations : int

    Raises
    ------
    UnsuitableProblemError
    """
    index = graph.index
    count = len(index.defaults)
    if count > most_operations:
        raise UnsuitableProblemError(
            f'"{solver}" takes up to {most_operations} operations, and this graph has {count}: use "ilp" or "auto"'
        )
    if any(len(task) > 1 for task in index.tasks):
        raise UnsuitableProblemError(f'"{solver}" knows no alternatives, and this graph has some: use "ilp" or "auto"')
    storages = [storage for storage in index.storage_of if index.storage_bytes[storage]]
    if len(set(storages)) < len(storages):
        raise UnsuitableProblemError(
            f'"{solver}" gives each tensor bytes of its own, and some here share a storage: use "ilp" or "auto"'
        )
