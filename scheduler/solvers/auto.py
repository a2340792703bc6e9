"""The default: the fast methods first, then those that prove."""

from __future__ import annotations

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import TOLERANCE, Proposal, relative_gap
from scheduler.solvers.registry import Deadline, load_solver
from scheduler.solvers.small_end import smallest_peak

PARTS = ("save-all", "greedy", "cuts", "segments")


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the best answer of several solvers, with the best bounds of all.

    Guarantee: never worse than its parts, and a schedule wherever `minimum_budget` knows
    one. Search space: given order. When: always.
    """
    best: Schedule | None = None
    best_time = float("inf")
    bound = bound_any = 0.0
    messages: list[str] = []

    def offer(schedule: Schedule | None) -> None:
        nonlocal best, best_time
        if schedule is not None:
            judged = simulate(problem.graph, schedule)
            if judged.peak_bytes <= problem.budget_bytes and judged.time < best_time:
                best, best_time = schedule, judged.time

    for name in PARTS:
        try:
            proposal = load_solver(name)(problem, deadline=deadline, seed=seed)
        except UnsuitableProblemError:
            continue
        bound, bound_any = max(bound, proposal.bound), max(bound_any, proposal.bound_any)
        messages += proposal.messages
        if proposal.infeasible:
            return Proposal(None, "given order", bound, bound_any, infeasible=True, messages=tuple(messages))
        offer(proposal.schedule)
        if best is None and name == "greedy" and problem.floor.bytes <= problem.budget_bytes:
            offer(smallest_peak(problem, deadline)[1])
        if relative_gap(best_time, max(bound, problem.least_time)) <= TOLERANCE or deadline.passed:
            break
    return Proposal(best, "given order", bound, bound_any, messages=tuple(messages))
