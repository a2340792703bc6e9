"""Find the smallest peak from above and from below, and turn budgets such as "min+10%" into bytes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from scheduler.errors import UnsuitableProblemError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.problem import Floor, Problem, parse_budget
from scheduler.schedule import Schedule, follows_input_order, runs_of
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.late_order import in_late_order
from scheduler.solvers.registry import imported, load_solver

_SHARE_OF_TIME, _QUICK_SHARE, _QUICK_SECONDS = 0.1, 0.3, 1.0
"""Share of a time limit for the search for the smallest peak, where a budget such as "min" needs it; of a
short limit the second share, up to these seconds, since part of them loads kernels and bounds the peak."""
_FIRST_SHARE = 0.8
"""Share of the time of `squeeze` for `smallest_peak`, which usually ends early."""
_FRUGAL_SOLVERS = ("segments", "recompute-all")
_MOST_RUNS_PER_OPERATION = 32
"""A step that recomputes more takes that many times as long, and to simulate its schedule takes seconds."""
_MOST_GREEDY_BUDGETS = 8
_MOST_EXACT_LAYERS = 100
"""For a chain of at most so many layers, a schedule with the smallest persistent peak is found exactly."""
_MOST_COUNTED_LAYERS = 1000
"""For one of at most so many, that peak without its schedule takes no longer than to simulate other schedules."""
_SQUEEZE_STEPS = 1000
"""`squeeze` ends when the gap is one step: the distance from the floor to the save-everything peak over this."""
_FLOOR_SHARE = 0.3
"""Share of the time of `squeeze` for the floor, which usually takes much less."""


class Squeezed(NamedTuple):
    """What `squeeze` found; sizes include the resident tensors.

    Attributes
    ----------
    peak_bytes : int
        Smallest known peak.
    schedule : Schedule
        A schedule with that peak.
    floor : Floor
        A proven lower bound on the peak of every schedule.
    """

    peak_bytes: int
    schedule: Schedule
    floor: Floor


def with_budget(problem: Problem, budget: int | str, deadline: Deadline) -> Problem:
    """Return a problem with a budget in bytes; for "min", its starts include the schedule that fits.

    The search for the smallest peak has the time of `share_for_peak`, except for what the first,
    frugal solvers need.

    Raises
    ------
    InvalidBudgetError
        If the budget cannot be understood, or is "auto".
    """
    starts = problem.starts

    def smallest() -> int:
        nonlocal starts
        found = squeeze(replace(problem, budget_bytes=0), share_for_peak(deadline))
        starts = (found.schedule, *starts)
        return found.peak_bytes

    budget_bytes = parse_budget(budget, problem.graph, baseline=problem.baseline, smallest_peak=smallest)
    return replace(problem, budget_bytes=budget_bytes, starts=starts)


def share_for_peak(deadline: Deadline) -> Deadline:
    """Return the deadline of a search for the smallest peak that precedes another search: a tenth, or a second."""
    quick = min(_QUICK_SECONDS, _QUICK_SHARE * deadline.remaining)
    return deadline.within(max(_SHARE_OF_TIME * deadline.remaining, quick))


def quick_peak(problem: Problem, deadline: Deadline, *, only_known: bool = False, is_persistent: bool = False) -> int:
    """Return the smallest peak in bytes of the problem's starts and, unless `only_known`, of what keeps little.

    That is what solvers find that keep little and need no compiled kernels; but for a chain whose answer is persistent
    the smallest peak of all such schedules, unless the chain is long or time is up before.
    """
    search = _PeakSearch(replace(problem, budget_bytes=0), deadline)
    for start in problem.starts:
        search.offer(start)
    if only_known:
        return search.peak_bytes
    chain = problem.chain
    if is_persistent and chain is not None and len(chain.layers) <= _MOST_COUNTED_LAYERS:
        with suppress(TimeoutError):
            return min(search.peak_bytes, _least_persistent_peak(chain, deadline))
    for name in _FRUGAL_SOLVERS:
        search.ask(name, problem.floor.bytes)
    return search.peak_bytes


def smallest_peak(problem: Problem, deadline: Deadline) -> tuple[int, Schedule]:
    """Return the smallest peak found, in bytes with the resident tensors, and its schedule.

    The starts of the problem are candidates. For a chain, persistent schedules are searched
    exactly. Walks that evict whenever memory is short find the least bytes that they need by
    bisection, and so does the greedy search, which also recomputes results. Solvers that keep
    little run once. All of them run in the late order, if another order is allowed, and at last
    walks in the given one, which at times needs less. The search ends as soon as a peak fits the
    problem's budget.

    Schedules of more than `_MOST_RUNS_PER_OPERATION` runs an operation count only if they are
    what fits the problem's budget, or if nothing else saves memory.
    """
    search = _PeakSearch(problem, deadline)
    for start in problem.starts:
        search.offer(start)
    chain = _short_chain(problem)
    if chain is not None and not search.fits:
        with suppress(TimeoutError):
            search.ask("dp", _least_persistent_peak(chain, deadline))
    search.walk(search.late.graph)
    for name in _FRUGAL_SOLVERS:
        search.ask(name, problem.floor.bytes)
    search.ask_greedy()
    if search.late is not problem:
        search.walk(problem.graph)
    return search.peak_bytes, search.schedule


def squeeze(problem: Problem, deadline: Deadline, *, known: Schedule | None = None) -> Squeezed:
    """Return the smallest peak found by bisection between a proven floor and that of `smallest_peak`.

    If the schedule that `smallest_peak` found is known, it is not searched for again.

    Each budget is half way between the largest one that failed, at first the floor, and the
    best peak, but never below the problem's own budget. `anneal` tries it and then `ilp`, or `dp`
    for a chain of many layers; for a short chain, `smallest_peak` is final. The search ends as
    soon as a peak fits the problem's budget, or when failure and success are close.
    """
    if known is None:
        peak_bytes, schedule = smallest_peak(problem, deadline.within(_FIRST_SHARE * deadline.remaining))
    else:
        peak_bytes, schedule = simulate(problem.graph, known).peak_bytes, known
    best = Squeezed(peak_bytes, schedule, problem.floor)
    wanted = problem.budget_bytes
    if peak_bytes <= max(wanted, problem.floor.bytes):
        return best
    with imported("ilp"):
        # Imported on first use: `import scheduler` must not need pulp.
        from scheduler.solvers.moments import proven_floor
    floor_deadline = deadline.within(_FLOOR_SHARE * deadline.remaining)
    best = best._replace(floor=proven_floor(problem, floor_deadline, enough_bytes=peak_bytes))
    if _short_chain(problem) is not None:
        return best
    failed = best.floor.bytes - 1
    step = max(1, (problem.baseline.peak_bytes - failed) // _SQUEEZE_STEPS)
    while best.peak_bytes - failed > step and best.peak_bytes > max(wanted, failed + 1) and not deadline.passed:
        half_way = (best.peak_bytes + failed) // 2
        budget, share = (wanted, 1 / 2) if wanted > max(failed, half_way) else (half_way, 1 / 4)
        attempt = replace(problem, budget_bytes=budget, starts=(best.schedule,))
        found = _fitting(attempt, deadline.within(share * deadline.remaining))
        if found.infeasible:
            best = best._replace(floor=replace(best.floor, bytes=budget + 1, alone=False))
        if found.schedule is None:
            failed = budget
        else:
            best = best._replace(peak_bytes=simulate(problem.graph, found.schedule).peak_bytes, schedule=found.schedule)
    return best


def _fitting(problem: Problem, deadline: Deadline) -> Proposal:
    """Return a proposal with a schedule that fits a problem's budget, the first one that is found."""
    if problem.chain is not None:
        return load_solver("dp")(problem, deadline=deadline, seed=0)
    with imported("anneal"):
        # Imported on first use: `import scheduler` must not need numba.
        from scheduler.solvers.anneal import solver as anneal
    half = deadline.within(deadline.remaining / 2, lambda _: half.stop())
    found = anneal.search(problem, deadline=half, seed=0)
    if found.schedule is not None or deadline.passed:
        return found
    with suppress(UnsuitableProblemError):  # the graph is too large for `ilp`
        return load_solver("ilp")(problem, deadline=deadline, seed=0)
    return found


class _PeakSearch:
    """The schedule with the smallest peak so far; at first, the save-everything schedule."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self.problem, self.deadline = problem, deadline
        self.peak_bytes, self.schedule = problem.baseline.peak_bytes, problem.save_everything
        self.least = max(problem.floor.bytes, problem.budget_bytes)

    @cached_property
    def late(self) -> Problem:
        """The problem with its graph in the late order; to compare known schedules needs none."""
        return in_late_order(self.problem)

    @property
    def fits(self) -> bool:
        """Whether the smallest peak fits the problem's budget."""
        return self.peak_bytes <= self.problem.budget_bytes

    def offer(self, schedule: Schedule) -> None:
        """Simulate a schedule, and keep it if its peak is smaller and the problem allows its order."""
        graph = self.problem.graph
        peak_bytes = simulate(graph, schedule).peak_bytes
        if peak_bytes < self.peak_bytes and (self.problem.reorder or follows_input_order(graph, schedule)):
            self.peak_bytes, self.schedule = peak_bytes, schedule

    def walk(self, graph: Graph) -> None:
        """Offer the schedules of walks that evict, by bisection for the least bytes within which they succeed.

        Parameters
        ----------
        graph : Graph
            The problem's graph, in the order of the walks.
        """
        if self.fits:
            return
        with imported("greedy"):
            # Imported on first use: `import scheduler` must not need numba.
            from scheduler.solvers.eviction_walk import Eviction, EvictionWalks
        walks = EvictionWalks(graph)
        step = max(1, (self.problem.baseline.peak_bytes - self.least) // _SQUEEZE_STEPS)
        for eviction in Eviction:
            budget, failed = self.least, self.least - 1
            while self.peak_bytes - failed > step and not (self.fits or self.deadline.passed):
                schedule = walks.within(budget, eviction)
                if schedule is not None:
                    self.offer(schedule)
                if schedule is None or self.peak_bytes > budget:
                    failed = budget
                budget = (failed + self.peak_bytes) // 2

    def ask_greedy(self) -> None:
        """Offer the schedules of the greedy search, by bisection for the least budget that it fits."""
        budget, failed = self.least, self.least - 1
        for _ in range(_MOST_GREEDY_BUDGETS):
            if budget >= self.peak_bytes or self.fits or self.deadline.passed:
                return
            self.ask("greedy", budget)
            if self.peak_bytes > budget:
                failed = budget
            budget = (failed + self.peak_bytes + 1) // 2

    def ask(self, solver: str, budget_bytes: int) -> None:
        """Offer a solver's schedule for another budget, unless the peak already fits."""
        if self.fits:
            return
        problem = replace(self.late, budget_bytes=budget_bytes)
        try:
            schedule = load_solver(solver)(problem, deadline=self.deadline, seed=0).schedule
        except UnsuitableProblemError:
            return
        if schedule is not None and not self._is_endless(schedule):
            self.offer(schedule)

    def _is_endless(self, schedule: Schedule) -> bool:
        """Whether a schedule takes too long to be the answer to "the smallest peak", if that is what is asked for."""
        graph = self.problem.graph
        saves = self.peak_bytes < self.problem.baseline.peak_bytes
        any_peak = self.problem.budget_bytes < self.problem.floor.bytes
        return saves and any_peak and len(runs_of(graph, schedule)) > _MOST_RUNS_PER_OPERATION * len(graph.operations)


def _short_chain(problem: Problem) -> Chain | None:
    """Return the chain of a problem, if `dp` can search it exactly."""
    chain = problem.chain
    return chain if chain is not None and len(chain.layers) <= _MOST_EXACT_LAYERS else None


def _least_persistent_peak(chain: Chain, deadline: Deadline) -> int:
    with imported("dp"):
        # Imported on first use: `import scheduler` must not need numba.
        from scheduler.solvers.dp.solver import least_persistent_peak
    return least_persistent_peak(chain, deadline)
