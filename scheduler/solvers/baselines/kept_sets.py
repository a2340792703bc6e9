"""A kept set as a schedule: what stands between the phases stays, the rest is computed again when it is needed."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.errors import UnsuitableProblemError
from scheduler.graph import Graph
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.solvers.walk import Walk


def forward_operations(graph: Graph, solver: str) -> list[int]:
    """Return the needed forward operations in the input order.

    Parameters
    ----------
    graph : Graph
    solver : str
        Who asks; named in the error.

    Raises
    ------
    UnsuitableProblemError
        If the graph has no forward or no backward phase.
    """
    forward = [i for i in graph.index.defaults if graph.operations[i].phase == "forward"]
    if not forward or len(forward) == len(graph.index.defaults):
        raise UnsuitableProblemError(
            f'"{solver}" needs a forward and a backward phase, and this graph has only one: use "auto" or "ilp"'
        )
    return forward


def schedule_keeping(graph: Graph, kept: Iterable[int]) -> Schedule:
    """Return the schedule that drops all but some tensors at the end of the forward phase.

    All operations first run in the input order; a backward operation computes again what it
    finds missing, and what is computed again stands until its last reader.

    Parameters
    ----------
    graph : Graph
    kept : iterable of int
        Tensors; results, what the first backward operation reads, and what only non-repeatable
        operations make are kept as well.
    """
    index = graph.index
    results = [t for t, result in enumerate(index.is_result) if result]
    walk = Walk(graph)
    in_forward = True
    for i in index.defaults:
        if in_forward and graph.operations[i].phase == "backward":
            in_forward = False
            walk.keep_only([*kept, *results, *index.inputs[i]])
        walk.run(i)
    return schedule_from_runs(graph, walk.runs)
