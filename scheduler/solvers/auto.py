"""The default: the fast methods first, then those that prove."""

from __future__ import annotations

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.registry import Deadline, load_solver

PARTS = ("save-all", "cuts", "greedy", "segments")


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the best answer of several solvers, with the best bounds of all.

    Guarantee: never worse than its parts. Search space: given order. When: always.
    """
    best: Proposal | None = None
    best_time = float("inf")
    bound = bound_any = 0.0
    infeasible = False
    messages: list[str] = []
    for name in PARTS:
        try:
            proposal = load_solver(name)(problem, deadline=deadline, seed=seed)
        except UnsuitableProblemError:
            continue
        bound, bound_any = max(bound, proposal.bound), max(bound_any, proposal.bound_any)
        infeasible = infeasible or proposal.infeasible
        messages += [f"{name}: {message}" for message in proposal.messages]
        if infeasible:
            break
        if proposal.schedule is not None:
            judged = simulate(problem.graph, proposal.schedule)
            if judged.peak_bytes <= problem.budget_bytes and judged.time < best_time:
                best, best_time = proposal, judged.time
        if best is not None and best_time <= max(bound, problem.least_time) * (1 + 1e-9):
            break
        if deadline.passed:
            break
    schedule = best.schedule if best is not None else None
    return Proposal(schedule, "given order", bound, bound_any, infeasible, tuple(messages))
