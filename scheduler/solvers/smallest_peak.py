"""The small end of the frontier: the smallest peak that the fast methods reach."""

from __future__ import annotations

from dataclasses import replace

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import load_solver

_SMALL = ("recompute-all", "segments")
_BISECTIONS = 12
_LAYERS = 100
"""Of a chain whose smallest persistent peak is found exactly."""
_FINENESS = 500
"""Parts of the way from the floor to the peak that are told apart."""


def smallest_peak(problem: Problem, deadline: Deadline) -> tuple[int, Schedule]:
    """Return the smallest peak found, in bytes with the resident tensors, and its schedule.

    Whatever the starts of the problem need is known already. Methods that keep little run
    once, a chain's persistent schedules are searched exactly, and the greedy search aims at
    the floor first and then half way to the best peak, again and again. A peak within the
    problem's budget is small enough: the search ends there.
    """
    graph, floor = problem.graph, problem.floor.bytes
    best = (problem.baseline.peak_bytes, problem.save_everything)
    for start in problem.starts:
        best = min(best, (simulate(graph, start).peak_bytes, start), key=lambda entry: entry[0])
    at_floor = replace(problem, budget_bytes=floor)

    def offer(name: str, aimed: Problem) -> None:
        nonlocal best
        if best[0] <= problem.budget_bytes:
            return
        try:
            schedule = load_solver(name)(aimed, deadline=deadline, seed=0).schedule
        except UnsuitableProblemError:
            return
        if schedule is not None:
            best = min(best, (simulate(graph, schedule).peak_bytes, schedule), key=lambda entry: entry[0])

    if problem.chain is not None and len(problem.chain.layers) <= _LAYERS:
        from scheduler.solvers.dp.solver import chain_frontier

        least = chain_frontier(problem.chain)[0][0]
        offer("dp", replace(problem, budget_bytes=least))
    for name in _SMALL:
        offer(name, at_floor)
    aim = floor
    for _ in range(_BISECTIONS):
        if aim >= best[0] or best[0] <= problem.budget_bytes or deadline.passed:
            break
        offer("greedy", replace(problem, budget_bytes=aim))
        aim = (aim + best[0] + 1) // 2
    return best


def squeeze(problem: Problem, deadline: Deadline) -> tuple[int, Schedule]:
    """Return the smallest peak that annealing finds from there on; see `smallest_peak`.

    The next budget is half way from the last one that failed, at first the floor, to the
    best peak, but never below the problem's own, at which the search ends; it also ends
    when the two are close. A chain's smallest peak stands.
    """
    if problem.chain is not None:
        return smallest_peak(problem, deadline)
    best = smallest_peak(problem, deadline.within(deadline.remaining / 2))
    failed = problem.floor.bytes - 1
    step = max(1, (problem.baseline.peak_bytes - failed) // _FINENESS)
    wanted = problem.budget_bytes
    while best[0] - failed > step and best[0] > max(wanted, problem.floor.bytes) and not deadline.passed:
        half_way = (best[0] + failed) // 2
        aim, share = (wanted, 1 / 2) if wanted > max(failed, half_way) else (half_way, 1 / 4)
        aimed = replace(problem, budget_bytes=aim, starts=(best[1],))
        found = load_solver("anneal")(aimed, deadline=deadline.within(share * deadline.remaining), seed=0).schedule
        if found is None:
            failed = aimed.budget_bytes
        else:
            best = (simulate(problem.graph, found).peak_bytes, found)
    return best
