"""Find the smallest peak for which a schedule is known."""

from __future__ import annotations

from dataclasses import replace

from scheduler.errors import UnsuitableProblemError
from scheduler.graph.chain import Chain
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import load_solver, missing_package_explained

_FRUGAL_SOLVERS = ("recompute-all", "segments")
_MOST_GREEDY_BUDGETS = 12
_MOST_EXACT_LAYERS = 100
"""The smallest persistent peak of a chain of at most so many layers is computed exactly."""
_SQUEEZE_STEPS = 500
"""`squeeze` ends when the gap is one step: the distance from the floor to the save-everything peak over this."""


def smallest_peak(problem: Problem, deadline: Deadline) -> tuple[int, Schedule]:
    """Return the smallest peak found, in bytes with the resident tensors, and its schedule.

    The starts of the problem are candidates. For a chain, persistent schedules are searched
    exactly. Solvers that keep little run once, and the greedy search runs with the floor as its
    budget, then with budgets half way to the best peak, again and again. The search ends as
    soon as a peak fits the problem's budget.
    """
    search = _PeakSearch(problem, deadline)
    for start in problem.starts:
        search.offer(start)
    if problem.chain is not None and len(problem.chain.layers) <= _MOST_EXACT_LAYERS and not search.fits:
        search.ask("dp", _least_persistent_peak(problem.chain))
    budget = problem.floor.bytes
    for name in _FRUGAL_SOLVERS:
        search.ask(name, budget)
    for _ in range(_MOST_GREEDY_BUDGETS):
        if budget >= search.peak_bytes or search.fits or deadline.passed:
            break
        search.ask("greedy", budget)
        budget = (budget + search.peak_bytes + 1) // 2
    return search.peak_bytes, search.schedule


def squeeze(problem: Problem, deadline: Deadline) -> tuple[int, Schedule]:
    """Return the smallest peak that annealing finds, starting from that of `smallest_peak`.

    Each budget is half way between the largest one that failed, at first the floor, and the
    best peak, but never below the problem's own budget. The search ends as soon as a peak fits
    that budget, or when failure and success are close. For a chain, `smallest_peak` is final.
    """
    if problem.chain is not None:
        return smallest_peak(problem, deadline)
    best = smallest_peak(problem, deadline.within(deadline.remaining / 2))
    failed = problem.floor.bytes - 1
    step = max(1, (problem.baseline.peak_bytes - failed) // _SQUEEZE_STEPS)
    wanted = problem.budget_bytes
    while best[0] - failed > step and best[0] > max(wanted, problem.floor.bytes) and not deadline.passed:
        half_way = (best[0] + failed) // 2
        budget, share = (wanted, 1 / 2) if wanted > max(failed, half_way) else (half_way, 1 / 4)
        attempt = replace(problem, budget_bytes=budget, starts=(best[1],))
        found = load_solver("anneal")(attempt, deadline=deadline.within(share * deadline.remaining), seed=0).schedule
        if found is None:
            failed = budget
        else:
            best = (simulate(problem.graph, found).peak_bytes, found)
    return best


class _PeakSearch:
    """The schedule with the smallest peak so far; at first, the save-everything schedule."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self.problem, self.deadline = problem, deadline
        self.peak_bytes, self.schedule = problem.baseline.peak_bytes, problem.save_everything

    @property
    def fits(self) -> bool:
        """Whether the smallest peak fits the problem's budget."""
        return self.peak_bytes <= self.problem.budget_bytes

    def offer(self, schedule: Schedule) -> None:
        """Simulate a schedule, and keep it if its peak is smaller."""
        peak_bytes = simulate(self.problem.graph, schedule).peak_bytes
        if peak_bytes < self.peak_bytes:
            self.peak_bytes, self.schedule = peak_bytes, schedule

    def ask(self, solver: str, budget_bytes: int) -> None:
        """Offer a solver's schedule for another budget, unless the peak already fits."""
        if self.fits:
            return
        problem = replace(self.problem, budget_bytes=budget_bytes)
        try:
            schedule = load_solver(solver)(problem, deadline=self.deadline, seed=0).schedule
        except UnsuitableProblemError:
            return
        if schedule is not None:
            self.offer(schedule)


def _least_persistent_peak(chain: Chain) -> int:
    with missing_package_explained("dp"):
        # Imported on first use: `import scheduler` must not need numba.
        from scheduler.solvers.dp.solver import chain_frontier
    return chain_frontier(chain)[0][0]
