"""Of operations that differ in time and workspace only, leave those that may fit a budget, the fastest first.

They are kernels of one computation: any of them may run wherever another one does. Most solvers run
the default of a task, which may be one that never fits, or slower than need be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scheduler.graph import Graph
from scheduler.problem import Problem, working_set_bytes
from scheduler.schedule import Compute, Schedule


def with_fitting_kernels(problem: Problem) -> Problem:
    """Return a problem of which each computation has its smallest kernel and all others that fit by themselves.

    The fastest one comes first. Schedules that fit, and bounds, hold for both problems. Starts run the smallest kernel
    instead of one that is left out, and the save-everything schedule of the original graph is one of them.
    """
    graph, operations = problem.graph, list(problem.graph.operations)
    smallest_of: dict[str, str] = {}
    for places in _kernels(graph) if problem.chain is None else ():
        kernels = sorted(places, key=lambda i: graph.operations[i].time)
        smallest = min(kernels, key=lambda i: graph.operations[i].workspace_bytes)
        left_out = {i for i in kernels if i != smallest and working_set_bytes(graph, i) > problem.budget_bytes}
        smallest_of |= {graph.operations[i].name: graph.operations[smallest].name for i in left_out}
        for place, i in zip(places, sorted(kernels, key=left_out.__contains__), strict=True):
            operations[place] = graph.operations[i]
    kept = tuple(operation for operation in operations if operation.name not in smallest_of)
    if kept == graph.operations:
        return problem
    starts = (*problem.starts, problem.save_everything)
    exchanged = tuple(_exchanged(start, smallest_of) for start in starts)
    return problem.changed(graph=replace(graph, operations=kept), starts=exchanged)


def with_smallest_kernels(problem: Problem) -> Problem:
    """Return a problem of which each computation has its smallest kernel only, with which some schedule peaks lowest.

    A kernel that fits by itself may not fit beside what must stay in memory.
    """
    smallest = with_fitting_kernels(problem.changed(budget_bytes=0))
    return smallest.changed(budget_bytes=problem.budget_bytes)


def _kernels(graph: Graph) -> Iterator[list[int]]:
    """Yield the operations of one task, in order, that read and make the same tensors in the same phase: several."""
    index = graph.index
    for task in index.tasks:
        alike: dict[object, list[int]] = {}
        for i in task if len(task) > 1 and index.required.isdisjoint(task) else ():
            key = frozenset(index.inputs[i]), frozenset(index.outputs[i]), graph.operations[i].phase
            alike.setdefault(key, []).append(i)
        yield from (places for places in alike.values() if len(places) > 1)


def _exchanged(schedule: Schedule, smallest_of: dict[str, str]) -> Schedule:
    return Schedule(
        Compute(smallest_of.get(action.operation, action.operation)) if isinstance(action, Compute) else action
        for action in schedule
    )
