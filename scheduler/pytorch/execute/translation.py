"""Translate a schedule for another capture of the same step."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.errors import PlanMismatchError
from scheduler.graph import Graph
from scheduler.schedule import Compute, Free, Schedule


def translate_schedule(schedule: Schedule, planned: Graph, fresh: Graph) -> Schedule:
    """Return a schedule of one graph as a schedule of another capture of the same step.

    Operations correspond by position, tensors by the operation and output that produce them.

    Parameters
    ----------
    schedule : Schedule
        Valid for `planned`.
    planned, fresh : Graph
        The graph of the plan, and that of the new capture.

    Raises
    ------
    PlanMismatchError
        If the structures of the graphs differ.
    """
    if planned.structure_digest != fresh.structure_digest:
        raise PlanMismatchError(_difference(planned, fresh))
    if _names(planned) == _names(fresh):
        return schedule
    operations = {a.name: b.name for a, b in zip(planned.operations, fresh.operations, strict=True)}
    tensors = {
        a: b
        for one, other in zip(planned.operations, fresh.operations, strict=True)
        for a, b in zip(one.outputs, other.outputs, strict=True)
    }
    return Schedule(
        Compute(operations[action.operation]) if isinstance(action, Compute) else Free(tensors[action.tensor])
        for action in schedule
    )


def _names(graph: Graph) -> list[tuple[str, Sequence[str]]]:
    """Return the names that a schedule of a graph may contain."""
    return [(operation.name, operation.outputs) for operation in graph.operations]


def _difference(planned: Graph, fresh: Graph) -> str:
    advice = "make a new plan for this model and these arguments"
    if planned.assumptions:
        advice += (
            f", from a trace on the device that trains it; this plan rests on assumptions: {planned.assumptions[-1]}"
        )
    if len(planned.operations) != len(fresh.operations):
        return (
            f"the plan has {len(planned.operations)} operations and the captured step has"
            f" {len(fresh.operations)} operations: {advice}"
        )
    for i, (one, other) in enumerate(zip(planned.operations, fresh.operations, strict=True)):
        if one.signature != other.signature:
            return (
                f'operation {i} is "{one.signature}" in the plan and "{other.signature}" in the captured step: {advice}'
            )
    return f"the plan's graph and the captured step differ in their edges, sizes or results: {advice}"
