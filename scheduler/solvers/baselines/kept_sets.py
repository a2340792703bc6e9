"""Turn a kept set into a schedule: kept tensors stay live between the phases, the rest is recomputed on demand."""

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
        Name of the solver, for the error.

    Raises
    ------
    UnsuitableProblemError
        If the graph has no forward or no backward phase.
    """
    forward = [i for i in graph.index.defaults if graph.operations[i].phase == "forward"]
    if not forward or len(forward) == len(graph.index.defaults):
        raise UnsuitableProblemError(
            f'"{solver}" needs a forward and a backward phase, but this graph has only one: use "auto" or "ilp"'
        )
    return forward


def schedule_keeping(graph: Graph, kept: Iterable[int]) -> Schedule:
    """Return the schedule that frees all but some tensors at the end of the forward phase.

    All operations first run in the input order; a backward operation recomputes the inputs that
    are missing, and recomputed tensors stay live until their last reader.

    Parameters
    ----------
    graph : Graph
    kept : iterable of int
        Tensors. Results, the inputs of the first backward operation, and the outputs of
        non-repeatable operations are kept as well.
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
