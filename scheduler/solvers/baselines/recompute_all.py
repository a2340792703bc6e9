"""Save nothing: the smallest-memory extreme."""

from __future__ import annotations

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import schedule_from_runs
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.walk import Walk

MOST_RUNS = 1_000_000


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the schedule in which every backward operation recomputes its forward inputs.

    Without a backward phase, every operation recomputes its inputs.

    Guarantee: none; on a uniform chain O(1) memory and O(n^2) time. Search space: input order
    (one schedule of it). Cost: linear in the number of runs, at most `MOST_RUNS`. Memory: at most
    256 MiB.

    Raises
    ------
    UnsuitableProblemError
        If the schedule would have more than `MOST_RUNS` runs.
    """
    graph = problem.graph
    operations, index = graph.operations, graph.index
    has_backward = any(operations[i].phase == "backward" for i in index.defaults)
    forward = [t for t, makers in enumerate(index.producers) if makers and operations[makers[0]].phase == "forward"]
    walk = Walk(graph)
    for i in index.defaults:
        if operations[i].phase == "backward" or not has_backward:
            walk.drop(forward)
        walk.run(i)
        if len(walk.runs) > MOST_RUNS:
            raise UnsuitableProblemError(
                f"saving nothing takes more than {MOST_RUNS} runs on this graph of {len(operations)} operations:"
                ' use "segments", "greedy" or "auto"'
            )
    walk.ensure(t for t, result in enumerate(index.is_result) if result)
    return Proposal(schedule_from_runs(graph, walk.runs), "input order")
