"""Equal segments: keep the tensors that cross their boundaries, recompute those inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.baselines.kept_sets import forward_operations, schedule_keeping
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import chain_costs
from scheduler.solvers.dp.one_cut_bound import one_cut_bound
from scheduler.solvers.dp.runs import ChainRuns

if TYPE_CHECKING:
    from scheduler.graph.chain import Chain

_STEPS = 12
"""Geometric steps from one segment to as many as there are layers."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the schedule of sqrt(n) equal segments or, if it does not fit, the fastest other that does.

    The n layers of a chain, or the forward operations of a graph in the input order, are cut
    into k segments of equal length. Only tensors that cross a boundary are kept for the backward
    phase, and each segment is recomputed when its backward begins. If k = sqrt(n) does not fit,
    other k are tried in geometric steps, and on a chain the recursive form: segments that are cut
    into segments, on two or more levels, down to halves of halves.

    Guarantee: none. On a uniform chain, O(sqrt n) memory and at most one extra forward; with
    the recursive form O(log n) memory and O(n log n) time. Search space: input order. Cost:
    O(log n) simulated schedules. Memory: at most 16 MiB and 4 KiB an operation. Reference: Chen, Xu,
    Zhang and Guestrin 2016, "Training deep nets with sublinear memory cost", arXiv 1604.06174,
    sections 4.3 and 4.4.

    Raises
    ------
    UnsuitableProblemError
        If the graph has no forward or no backward phase.
    """
    graph, chain = problem.graph, problem.chain
    if chain is not None:
        return fastest_fitting(problem, _chain_forms(chain), deadline, take_first=True)
    count = len(forward_operations(graph, "segments"))
    forms = [partial(graph_schedule, graph, k) for k in _numbers(count)]
    return fastest_fitting(problem, forms, deadline, take_first=True)


def fastest_fitting(
    problem: Problem, forms: Sequence[Callable[[], Schedule]], deadline: Deadline, *, take_first: bool = False
) -> Proposal:
    """Return the fastest of some schedules that fits, or else the one that exceeds the budget least.

    Parameters
    ----------
    problem : Problem
    forms : sequence of callable
        Each returns a schedule in the input order; the first is called even if the deadline has passed.
    deadline : Deadline
    take_first : bool
        Whether the first is the answer if it fits, even if others are faster.
    """
    best, best_cost = None, (math.inf, math.inf)
    for number, form in enumerate(forms):
        schedule = form()
        simulation = simulate(problem.graph, schedule)
        over = max(0, simulation.peak_bytes - problem.budget_bytes)
        if (over, simulation.time) < best_cost:
            best, best_cost = schedule, (over, simulation.time)
        if (take_first and number == 0 and over == 0) or deadline.passed:
            break
    # On a chain a bound is cheap; on other graphs the caller supplies it.
    bound = one_cut_bound(chain_costs(problem.chain), problem.budget_bytes) if problem.chain else 0.0
    return Proposal(best, "input order", bound=bound, global_bound=bound, infeasible=bound == math.inf)


def graph_schedule(graph: Graph, segments: int) -> Schedule:
    """Return the schedule that keeps only tensors that cross the boundaries of equal segments.

    Parameters
    ----------
    graph : Graph
    segments : int
        Number of segments of equal length into which the forward operations are cut.
    """
    index = graph.index
    forward = forward_operations(graph, "segments")
    segment = {i: number * segments // len(forward) for number, i in enumerate(forward)}
    crossing = {
        tensor
        for i in forward
        for tensor in index.outputs[i]
        if any(segment.get(r, segment[i]) != segment[i] for r in index.readers[tensor])
    }
    return schedule_keeping(graph, crossing)


def chain_schedule(chain: Chain, segments: int, *, levels: int = 1) -> Schedule:
    """Return the schedule of a chain cut into equal segments, each of which is cut on the next level.

    The segments of the last level run with saving. With one level, the input of each segment is
    kept, and all but the last segment run forward twice.

    Parameters
    ----------
    chain : Chain
    segments : int
        Per level; at most one per layer.
    levels : int
        1 for k equal segments; log2(n) with two segments for the recursive form.
    """
    runs = ChainRuns(chain)
    _run_levels(runs, range(len(chain.layers)), segments, levels)
    return runs.schedule()


def chain_schedule_from(chain: Chain, starts: Sequence[int]) -> Schedule:
    """Return the schedule of a chain whose segments begin at the given layers, ascending from 0."""
    runs = ChainRuns(chain)
    _run_segments(runs, starts, len(chain.layers), lambda segment: _run_saving(runs, segment))
    return runs.schedule()


def _run_levels(runs: ChainRuns, layers: range, segments: int, levels: int) -> None:
    if levels == 0 or len(layers) == 1:
        _run_saving(runs, layers)
        return
    count = min(segments, len(layers))
    starts = [layers[len(layers) * number // count] for number in range(count)]
    _run_segments(runs, starts, layers.stop, lambda segment: _run_levels(runs, segment, segments, levels - 1))


def _run_segments(runs: ChainRuns, starts: Sequence[int], stop: int, run_segment: Callable[[range], None]) -> None:
    """Run forward to the last segment, then each segment forward and backward, the last first."""
    for layer in range(starts[0], starts[-1]):
        runs.forward(layer)
    for first, end in reversed(list(pairwise([*starts, stop]))):
        run_segment(range(first, end))


def _run_saving(runs: ChainRuns, layers: range) -> None:
    for layer in layers:
        runs.forward_saving(layer)
    for layer in reversed(layers):
        runs.backward(layer)


def _chain_forms(chain: Chain) -> list[Callable[[], Schedule]]:
    """Return functions that build schedules: sqrt(n) segments, other numbers, then two or more levels."""
    count = len(chain.layers)
    deeper = range(2, count.bit_length())
    return [
        *(partial(chain_schedule, chain, k) for k in _numbers(count)),
        *(partial(chain_schedule, chain, max(2, round(count ** (1 / (k + 1)))), levels=k) for k in deeper),
    ]


def _numbers(most: int) -> list[int]:
    """Return the numbers of segments to try, the square root first."""
    steps = sorted({max(1, round(most ** (step / _STEPS))) for step in range(_STEPS + 1)})
    return list(dict.fromkeys([max(1, round(math.sqrt(most))), *steps]))
