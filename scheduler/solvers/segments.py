"""Equal segments: keep what crosses their boundaries, compute the inside again."""

from __future__ import annotations

import math

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.registry import Deadline
from scheduler.solvers.walk import Walk


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest schedule of k equal segments that fits, over several k.

    The forward operations, in the given order, are cut into k runs of equal length. The
    backward phase keeps only the tensors that cross a boundary and computes each segment
    again when its first backward operation needs it. k = sqrt(n) is tried first; then, if
    it does not fit, other k in geometric steps.

    Guarantee: none; on a uniform chain O(sqrt n) memory and at most one extra forward. Search
    space: given order. Cost: O(log n) walks. Reference: Chen, Xu, Zhang and Guestrin 2016,
    "Training deep nets with sublinear memory cost", arXiv 1604.06174, section 4.

    Raises
    ------
    UnsuitableProblemError
        If the graph has no backward phase.
    """
    graph = problem.graph
    forward = [i for i in graph.index.defaults if graph.operations[i].phase == "forward"]
    if not forward or len(forward) == len(graph.index.defaults):
        raise UnsuitableProblemError(
            'segments need a forward and a backward phase, and this graph has only one: use "auto" or "cuts"'
        )
    first = max(1, round(math.sqrt(len(forward))))
    best, best_key = None, (math.inf, math.inf)
    for k in dict.fromkeys([first, *_geometric(len(forward))]):
        schedule = segment_schedule(problem, k)
        judged = simulate(graph, schedule)
        over = max(0, judged.peak_bytes - problem.budget_bytes)
        if (over, judged.time) < best_key:
            best, best_key = schedule, (over, judged.time)
        if (k == first and over == 0) or deadline.passed:
            break
    return Proposal(best, "given order")


def segment_schedule(problem: Problem, segments: int) -> Schedule:
    """Return the schedule that keeps only what crosses the boundaries of equal segments.

    Parameters
    ----------
    problem : Problem
    segments : int
        Number of runs of equal length that the forward operations are cut into.
    """
    graph, index = problem.graph, problem.graph.index
    forward = [i for i in index.defaults if graph.operations[i].phase == "forward"]
    segment = {i: number * segments // len(forward) for number, i in enumerate(forward)}
    crossing = {
        tensor
        for i in forward
        for tensor in index.outputs[i]
        if index.is_result[tensor] or any(segment.get(r, segment[i]) != segment[i] for r in index.readers[tensor])
    }
    walk = Walk(graph)
    in_forward = True
    for i in index.defaults:
        if in_forward and graph.operations[i].phase == "backward":
            in_forward = False
            walk.keep_only(crossing)
        walk.run(i)
    return schedule_from_runs(graph, walk.runs)


def _geometric(most: int) -> list[int]:
    return sorted({max(1, round(most ** (step / 12))) for step in range(13)})
