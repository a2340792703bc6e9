"""The small end of the frontier: the smallest peak that the fast methods reach."""

from __future__ import annotations

from dataclasses import replace

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solvers.registry import Deadline, load_solver

_SMALL = ("recompute-all", "segments")
_BISECTIONS = 12


def smallest_peak(problem: Problem, deadline: Deadline) -> tuple[int, Schedule]:
    """Return the smallest peak found, in bytes with the resident tensors, and its schedule.

    The budget of the problem does not matter: methods that keep little run once, and the
    greedy search aims at the floor first and then half way to the best peak, again and again.
    """
    graph, floor = problem.graph, problem.floor.bytes
    best = (problem.baseline.peak_bytes, problem.save_everything)
    at_floor = replace(problem, budget_bytes=floor)

    def offer(name: str, aimed: Problem) -> None:
        nonlocal best
        try:
            schedule = load_solver(name)(aimed, deadline=deadline, seed=0).schedule
        except UnsuitableProblemError:
            return
        if schedule is not None:
            best = min(best, (simulate(graph, schedule).peak_bytes, schedule), key=lambda entry: entry[0])

    for name in _SMALL:
        offer(name, at_floor)
    aim = floor
    for _ in range(_BISECTIONS):
        if aim >= best[0] or deadline.passed:
            break
        offer("greedy", replace(problem, budget_bytes=aim))
        aim = (aim + best[0] + 1) // 2
    return best
