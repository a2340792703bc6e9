"""Choose which calls of a step to recompute: fastest within a budget, with a proof."""

from __future__ import annotations

import math
from dataclasses import replace

from scheduler.api import MAX_EXPLANATION_SECONDS, MIN_EXPLANATION_SECONDS, TRAINING_GAP, check_options, plan_of
from scheduler.graph.decisions import Decision
from scheduler.plan import Plan
from scheduler.problem import Problem, parse_budget, read_budget
from scheduler.pytorch.modules.calls import CallTree
from scheduler.pytorch.modules.lowering import LoweredTree, lower
from scheduler.pytorch.modules.regions import Layout
from scheduler.pytorch.modules.search import TOLERANCE, Candidate, Chooser
from scheduler.solution import Proposal, grade
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.solvers.explanations import explain

SEARCH_SPACE = "modules"
_SCOPE = "for every choice of modules to recompute"
_ADVICE = ' If the step can be captured, granularity="operations" may need less.'
_STEPS = 500
"""The smallest peak is searched to within the distance from the floor to the save-everything peak over this."""
_MOST_MISSED = 1.5
"""How many times the memory that is estimated, resident tensors left out, a measured step may need."""
_SECONDS, _STEPS_LONG = 1.7, 5.0
"""How long measuring and the search may take together by default: these seconds and the time of as many steps."""
_LEAST_SECONDS, _MOST_SECONDS = 0.5, 60.0
"""The least of these that is left to the search, and how long it may go on until something is found."""
_SHARE_OF_TIME = 0.4
"""Of the time until something is found, for the smallest peak where the budget depends on it."""


def plan_modules(
    tree: CallTree | LoweredTree,
    budget: int | str,
    *,
    gap: float = TRAINING_GAP,
    time_limit: float | None = None,
    measuring_seconds: float = 0.0,
) -> Plan:
    """Choose the calls to recompute within a budget, and return the choice as a plan.

    Parameters
    ----------
    tree : CallTree or LoweredTree
    budget : int or str
        As for `make_plan`; "min" is the smallest peak that recomputing calls can reach.
    gap : float
        The search ends as soon as `Plan.gap` is at most this.
    time_limit : float, optional
        Seconds. At the limit, or at Ctrl-C, the best answer so far is returned with its bound. By
        default, it is what measuring leaves of 2 s and the time of six steps, with some to spare;
        or longer, where nothing is found by then.
    measuring_seconds : float
        How long it took to measure the tree.

    Returns
    -------
    Plan
        Of granularity "modules"; `decisions_of` reads its decisions.

    Raises
    ------
    BudgetTooSmallError
        If it is proven that no choice fits, or none was found.
    OutOfTimeError
        If the time limit passed before one was found.
    InvalidBudgetError, InvalidOptionError
        If an argument is invalid.
    """
    is_given, time_limit = time_limit is not None, _MOST_SECONDS if time_limit is None else time_limit
    check_options(time_limit, 0)
    lowered = tree if isinstance(tree, LoweredTree) else lower(tree)
    started, deadline = clock.now(), Deadline(time_limit)
    problem, chooser = Problem(lowered.graph, 0, gap=gap), Chooser(lowered.layout)
    with stopped_by_interrupt(deadline):
        starts: list[Candidate] = []
        left = _SECONDS + _STEPS_LONG * problem.baseline.time - measuring_seconds
        patience = deadline if is_given else deadline.within(max(_LEAST_SECONDS, left))

        def smallest_peak() -> int:
            search = patience.within(_SHARE_OF_TIME * patience.remaining)
            starts.append(chooser.smallest(step=_step(problem), deadline=search).smallest)
            return starts[0].peak_bytes

        budget_bytes = parse_budget(budget, problem.graph, baseline=problem.baseline, smallest_peak=smallest_peak)
        problem = problem.changed(budget_bytes=budget_bytes)
        found = chooser.fastest(budget_bytes, gap=gap, deadline=deadline, patience=patience, starts=starts)
        best = found.best or found.smallest
        proposal = Proposal(
            lowered.schedule(best.regions),
            SEARCH_SPACE,
            bound=found.bound,
            infeasible=found.infeasible,
            smallest=lowered.schedule(found.smallest.regions),
        )
        solution = grade(problem, proposal, solver=SEARCH_SPACE, seconds=clock.now() - started)
    if solution.schedule is None:
        deadline = Deadline(min(MAX_EXPLANATION_SECONDS, max(MIN_EXPLANATION_SECONDS, deadline.remaining)))
        with stopped_by_interrupt(deadline):
            least = chooser.smallest(step=_step(problem), deadline=deadline, starts=[found.smallest])
        known, proven = least.smallest.peak_bytes, math.ceil(least.bound * (1 - TOLERANCE))
        message = explain(problem, solution, known, least_bytes=proven, scope=_SCOPE) + _ADVICE
        solution = replace(solution, messages=(message, *solution.messages), smallest_peak_bytes=known)
    return plan_of(lowered.graph, solution, time_limit=time_limit, granularity="modules")


def first_decisions(tree: CallTree, budget: int | str = "min", *, time_limit: float = 0.15) -> frozenset[Decision]:
    """Return decisions for measuring a step within a budget, from a tree whose backward is only estimated.

    They leave room for what the estimate misses. If no such decisions are found, they are those with
    the smallest peak that is found in the time limit.

    Parameters
    ----------
    tree : CallTree
    budget : int or str
        As for `make_plan`.
    time_limit : float
        Seconds.
    """
    chooser, deadline, read = Chooser(Layout(tree)), Deadline(time_limit), read_budget(budget)
    plain, resident = chooser.plain.peak_bytes, tree.resident_bytes
    room = read.resolve(resident, plain, lambda: resident) - resident  # at least, for "min+25%"
    tightened = chooser.tightened(resident + math.floor(room / _MOST_MISSED), deadline)
    found = tightened.best or tightened.smallest
    if tightened.best is None and not deadline.passed:
        step, starts = max(1, plain // _STEPS), [tightened.smallest]
        found = chooser.smallest(step=step, deadline=deadline, starts=starts).smallest
    calls = [(tree.calls[c], keeps) for c, keeps in found.regions.items()]
    return frozenset(call.decision(keeps_expensive=keeps) for call, keeps in calls)


def with_estimated_backward(tree: CallTree) -> CallTree:
    """Return a tree whose backward figures, which are not measured yet, are estimated from its forward.

    The gradients after a segment are as large as the storages that cross its start, and its
    backward needs these for what it allocates and reads.
    """
    crossing = [0] * (len(tree.segments) + 1)
    touched = [0] * len(tree.segments)
    for storage in tree.storages:
        uses = [i for i in {*storage.read_by, *storage.saved_by} if storage.born < i < len(tree.segments)]
        for i in range(storage.born + 1, max(uses, default=storage.born) + 1):
            crossing[i] += storage.size_bytes
        for i in {storage.born, *uses}:
            touched[i] += storage.size_bytes
    segments = (
        replace(segment, gradient_bytes=crossing[i], backward_peak_bytes=touched[i])
        for i, segment in enumerate(tree.segments)
    )
    return replace(tree, segments=tuple(segments))


def _step(problem: Problem) -> int:
    return max(1, (problem.baseline.peak_bytes - problem.floor.bytes) // _STEPS)
