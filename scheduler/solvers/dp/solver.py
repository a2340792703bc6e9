"""The exact dynamic program over persistent schedules of a chain, to the byte."""

from __future__ import annotations

import math
from dataclasses import replace

from scheduler.errors import UnsuitableProblemError
from scheduler.graph.chain import Chain
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import Proposal, relative_gap
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import ChainCosts, chain_costs, layer_kinds
from scheduler.solvers.dp.dynamic_program import whole_frontier
from scheduler.solvers.dp.one_cut_bound import one_cut_bound
from scheduler.solvers.dp.pruned_search import PrunedSearch
from scheduler.solvers.dp.two_passes import TwoPasses
from scheduler.solvers.registry import load_solver

WHOLE_FRONTIER_LAYERS = 100
"""Most layers for which the frontier of all budgets is computed at once."""
EXACT_LAYERS = 600
"""Most layers, if they differ, for which the exact program comes first."""
CLOSE = 1e-4
"""Of so many different layers, a schedule with at most this gap is good enough."""
_SEGMENT_SOLVERS = ("segments", "greedy-segments")
_HURRIED_SECONDS, _SEGMENTS_SHARE = 0.25, 0.8
"""With less time, schedules of segments come first, in this share of it."""
_WHOLE_FRONTIER_SECONDS = 10.0
"""Time limit within which the whole frontier of that many layers is always computed."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest persistent schedule of a chain.

    Persistent means: what a layer saves stays in memory, and the layer does not run forward
    again, until its backward; an output that outlives the run after its own stays until its
    reader has saved; every forward run reads the latest live output; the loss and each backward
    run once, as soon as their inputs are live. Bytes are exact, and times are exact up to 2^-40
    of the step.

    Guarantee: optimal among persistent schedules. Its bound over all schedules considers one
    moment of the backward phase: it can be tight where each layer runs forward at most twice.
    Search space: persistent. When: any chain. Cost: the whole frontier of 100 layers takes a
    second; longer chains are pruned with bounds from a coarse grid of memory, and repeated
    layers share their work: 300 different layers take 1 to 3 s, 500 take 10 s, 1000 of few kinds
    4 s. It begins with schedules in which each layer runs forward at most twice, which take less
    than a second; of more than 600 different layers, such a schedule is returned if it is within
    .01 % of a bound. Where none of them fits, it begins with segments, on several levels.
    Memory: at most 1024 MiB. When the time is up, it returns the best schedule found so far and
    its bound.

    Reference: Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing
    for heterogeneous chains", arXiv 1911.13214, Theorem 1, with the memory limits of this
    package's simulator in place of theirs, and without a grid.

    Raises
    ------
    UnsuitableProblemError
        If the problem does not come from a chain.
    """
    chain = problem.chain
    if chain is None:
        raise UnsuitableProblemError('"dp" solves chains of layers, not graphs: use "auto" or "ilp"')
    costs, budget = chain_costs(chain), problem.budget_bytes
    global_bound = one_cut_bound(costs, budget)
    if problem.floor.bytes > budget or math.isinf(global_bound):
        return Proposal(None, "persistent", infeasible=True)
    if len(chain.layers) <= WHOLE_FRONTIER_LAYERS and deadline.remaining > _WHOLE_FRONTIER_SECONDS:
        schedule, bound, message = _from_frontier(chain, budget)
        return Proposal(schedule, "persistent", bound, global_bound, messages=(message,) if message else ())
    segments = None
    if deadline.remaining < _HURRIED_SECONDS:
        segments = _segments(problem, deadline.within(_SEGMENTS_SHARE * deadline.remaining))
    passes = TwoPasses(chain, costs, budget, global_bound)
    passes.run(deadline)
    if passes.best is not None:
        quick = Proposal(passes.best.schedule, "persistent", passes.bound, passes.bound)
        enough = max(problem.gap, CLOSE if len(chain.layers) > EXACT_LAYERS and _is_varied(costs) else 0.0)
        if relative_gap(costs.time(passes.best.extra_time), passes.bound) <= enough:
            return quick
        deadline.report(quick)
        return _by_search(problem, chain, deadline, passes)
    # Whether the exact program finds any schedule in time is open: segments, on several levels, may fit.
    segments = segments or _segments(problem, deadline)
    if segments is not None:
        deadline.report(Proposal(segments, "persistent", passes.bound, passes.bound))
    found = _by_search(problem, chain, deadline, passes)
    is_open = found.schedule is None and not math.isinf(found.bound)
    return replace(found, schedule=segments) if is_open else found


def chain_frontier(chain: Chain) -> list[tuple[int, float]]:
    """Return the frontier of (peak bytes, time) of persistent schedules, by ascending peak.

    The time is exact up to 2^-40 of the step. Meant for up to about 100 different layers: the
    cost grows faster than their fourth power.

    Examples
    --------
    >>> from scheduler.graph.layers import Layer
    >>> layers = [Layer(f"l{i}", 1, 2, 2, 1, keeps_output=True) for i in range(3)]
    >>> chain_frontier(Chain(layers, input_bytes=2))
    [(11, 12.0), (12, 11.0), (14, 10.0), (15, 9.0)]
    """
    program = whole_frontier(chain)
    costs = program.costs
    return [(m + costs.resident_bytes, costs.time(t)) for m, t in program.frontier]


def least_persistent_peak(chain: Chain, deadline: Deadline) -> int:
    """Return the smallest peak in bytes of a persistent schedule, resident tensors included.

    It takes .3 s for 1000 different layers, and a time that grows with their third power.

    Raises
    ------
    TimeoutError
        If the deadline passes.

    Examples
    --------
    >>> from scheduler.graph.layers import Layer
    >>> layers = [Layer(f"l{i}", 1, 2, 2, 1, keeps_output=True) for i in range(3)]
    >>> least_persistent_peak(Chain(layers, input_bytes=2), Deadline(10))
    11
    """
    return PrunedSearch(chain, 0, deadline).find_least_bytes() + chain.graph.resident_bytes


def _from_frontier(chain: Chain, budget: int) -> tuple[Schedule | None, float, str]:
    program = whole_frontier(chain)
    free = budget - program.costs.resident_bytes
    time = program.time(free)
    if time is None:
        return None, math.inf, _too_small(program.frontier[0][0] + program.costs.resident_bytes)
    return program.schedule(free), time, ""


def _is_varied(costs: ChainCosts) -> bool:
    """Return whether at least half of the layers differ from all before them."""
    return 2 * len(set(layer_kinds(costs).tolist())) >= costs.layers


def _segments(problem: Problem, deadline: Deadline) -> Schedule | None:
    """Return the fastest schedule of segments that fits, all of which are persistent; None if none does."""
    best, best_time = None, math.inf
    for solver in _SEGMENT_SOLVERS:
        schedule = load_solver(solver)(problem, deadline=deadline, seed=0).schedule
        assert schedule is not None  # the one that exceeds the budget least, if none fits
        simulation = simulate(problem.graph, schedule)
        if simulation.peak_bytes <= problem.budget_bytes and simulation.time < best_time:
            best, best_time = schedule, simulation.time
    return best


def _by_search(problem: Problem, chain: Chain, deadline: Deadline, known: TwoPasses) -> Proposal:
    """Return the answer of a pruned search that begins with a known schedule."""
    free = problem.budget_bytes - chain.graph.resident_bytes
    search = PrunedSearch(chain, free, deadline, problem.gap, known.best, known.bound)
    schedule, message = search.run(), search.unfinished
    if math.isinf(search.bound):
        schedule, message = None, _too_small(search.least_bytes + chain.graph.resident_bytes)
    return Proposal(schedule, "persistent", search.bound, known.bound, messages=(message,) if message else ())


def _too_small(least: int) -> str:
    return f"proven: no persistent schedule fits; the smallest peak of one is {least} bytes"
