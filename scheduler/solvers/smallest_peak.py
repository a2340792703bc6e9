"""Find the smallest peak from above and from below, and turn budgets such as "min+10%" into bytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from typing import NamedTuple

from scheduler.errors import UnsuitableProblemError
from scheduler.graph.chain import Chain
from scheduler.problem import Floor, Problem, parse_budget
from scheduler.schedule import Schedule, follows_input_order, runs_of
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.kernels import with_smallest_kernels
from scheduler.solvers.late_order import in_late_order
from scheduler.solvers.live_sets import floor_of_live_sets
from scheduler.solvers.registry import imported, load_solver

_SHARE_OF_TIME, _QUICK_SHARE, _QUICK_SECONDS = 0.1, 0.3, 1.0
"""Share of a time limit for the search for the smallest peak, where a budget such as "min" needs it; of a
short limit the second share, up to these seconds, since part of them loads kernels and bounds the peak."""
_FIRST_SHARE = 0.6
"""Share of the time of `squeeze` for `smallest_peak`, which usually ends early."""
_FRUGAL_SOLVERS = ("segments", "recompute-all")
_MOST_RUNS_PER_OPERATION = 32
"""A step that recomputes more takes that many times as long, and to simulate its schedule takes seconds."""
_MOST_GREEDY_BUDGETS = 8
_GREEDY_SHARE, _FIRST_RULES, _WALKS_SHARE = 0.1, 3, 0.3
"""Share of the remaining time for the greedy search, which in long graphs seldom finds a smaller peak than walks; and
of what remains after walks by so many rules, the share for those by the other ones."""
_FITTING_SHARE, _MOST_DECIDED_OPERATIONS = 0.5, 1_500
"""Share of the time for a budget that `anneal` has before `ilp`, and the most operations for which `ilp` is asked: of
longer steps it neither finds a schedule in a share of a minute nor refutes one."""
_QUICK_TIMES = 2.0
"""A schedule is quick if it takes at most so many times the plain step. What recomputes more is a poor start for
annealing, which has to undo that first."""
_MOST_EXACT_LAYERS = 100
"""For a chain of at most so many layers, a schedule with the smallest persistent peak is found exactly."""
_MOST_COUNTED_LAYERS = 1000
"""For one of at most so many, that peak without its schedule takes no longer than to simulate other schedules."""
_SQUEEZE_STEPS = 1000
"""`squeeze` ends when the gap is one step: the distance from the floor to the save-everything peak over this."""
_STEPS_ABOVE, _WALKS_ABOVE = 8, 4
"""Walks within slightly more than the least that is enough: how many of these steps they are apart, and how many."""
_FLOOR_SHARE = 0.4
"""Share of the time of `squeeze` for the floor, which usually takes much less."""


class Smallest(NamedTuple):
    """What `smallest_peak` found; sizes include the resident tensors.

    Attributes
    ----------
    peak_bytes : int
        Smallest known peak.
    schedule : Schedule
        A schedule with that peak.
    quick : Schedule
        Of the known schedules that recompute little, the one with the smallest peak.
    """

    peak_bytes: int
    schedule: Schedule
    quick: Schedule


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
        found = squeeze(problem.changed(budget_bytes=0), share_for_peak(deadline))
        starts = (found.schedule, *starts)
        return found.peak_bytes

    budget_bytes = parse_budget(budget, problem.graph, baseline=problem.baseline, smallest_peak=smallest)
    return problem.changed(budget_bytes=budget_bytes, starts=starts)


def share_for_peak(deadline: Deadline) -> Deadline:
    """Return the deadline of a search for the smallest peak that precedes another search: a tenth, or a second."""
    quick = min(_QUICK_SECONDS, _QUICK_SHARE * deadline.remaining)
    return deadline.within(max(_SHARE_OF_TIME * deadline.remaining, quick))


def quick_peak(problem: Problem, deadline: Deadline, *, only_known: bool = False, is_persistent: bool = False) -> int:
    """Return the smallest peak in bytes of the problem's starts and, unless `only_known`, of what keeps little.

    That is what solvers find that keep little and need no compiled kernels; but for a chain whose answer is persistent
    the smallest peak of all such schedules, unless the chain is long or time is up before.
    """
    search = _PeakSearch(problem.changed(budget_bytes=0), deadline)
    for start in search.problem.starts:
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


def smallest_peak(problem: Problem, deadline: Deadline) -> Smallest:
    """Return the smallest peak found, its schedule, and a quick schedule from which to go on.

    The starts of the problem are candidates. For a chain, persistent schedules are searched
    exactly. Walks that evict whenever memory is short find the least bytes that they need by
    bisection, and so does the greedy search, which also recomputes results. Solvers that keep
    little run once. All of them run in the late order, if another order is allowed, and walks also
    in the given one, which at times needs less. The search ends as soon as a peak fits the
    problem's budget.

    Schedules of more than `_MOST_RUNS_PER_OPERATION` runs an operation count only if they are
    what fits the problem's budget, or if nothing else saves memory.
    """
    search = _PeakSearch(problem, deadline)
    for start in search.problem.starts:
        search.offer(start)
    chain = _short_chain(problem)
    if chain is not None and not search.fits:
        with suppress(TimeoutError):
            search.ask("dp", _least_persistent_peak(chain, deadline))
    search.walk()
    for name in _FRUGAL_SOLVERS:
        search.ask(name, problem.floor.bytes)
    search.ask_greedy()
    return Smallest(search.peak_bytes, search.schedule, search.quick)


def squeeze(problem: Problem, deadline: Deadline, *, known: Smallest | None = None) -> Squeezed:
    """Return the smallest peak found by bisection between a proven floor and that of `smallest_peak`.

    If what `smallest_peak` found is known, it is not searched for again.

    Each budget is half way between the largest one that failed, at first the floor, and the
    best peak, but never below the problem's own budget. `anneal` tries it, from the quick schedule
    with the smallest peak so far, and then `ilp`, or `dp` for a chain of many layers; for a short
    chain, `smallest_peak` is final. Where a budget fails, what comes nearest to it may still be
    better than before. The search ends as soon as a peak fits the problem's budget; when failure
    and success are close, it ends for a chain, and else begins again from the floor if it has found
    anything better.
    """
    problem = with_smallest_kernels(problem)
    if known is None:
        known = smallest_peak(problem, deadline.within(_FIRST_SHARE * deadline.remaining))
    peak_bytes, start = known.peak_bytes, known.quick
    best = Squeezed(peak_bytes, known.schedule, problem.floor)
    wanted = problem.budget_bytes
    if peak_bytes <= max(wanted, problem.floor.bytes):
        return best
    best = best._replace(floor=_floor(problem, deadline.within(_FLOOR_SHARE * deadline.remaining), peak_bytes))
    if _short_chain(problem) is not None:
        return best
    failed = best.floor.bytes - 1
    step = max(1, (problem.baseline.peak_bytes - failed) // _SQUEEZE_STEPS)
    start_bytes, seed, before = simulate(problem.graph, start).peak_bytes, 0, best.peak_bytes
    while best.peak_bytes > max(wanted, best.floor.bytes) and not deadline.passed:
        if best.peak_bytes - failed <= step:
            is_final = problem.chain is not None or best.peak_bytes - best.floor.bytes < step
            if is_final or best.peak_bytes == before:
                break
            failed, before = best.floor.bytes - 1, best.peak_bytes  # Other random numbers may do better.
        half_way = (best.peak_bytes + failed) // 2
        budget, share = (wanted, 1 / 2) if wanted > max(failed, half_way) else (half_way, 1 / 4)
        attempt = problem.changed(budget_bytes=budget, starts=(start,))
        found = _fitting(attempt, deadline.within(share * deadline.remaining), seed)
        seed += 1
        if found.infeasible:
            best = best._replace(floor=replace(best.floor, bytes=budget + 1, alone=False))
        if found.schedule is None:
            failed = budget
        nearest = found.schedule or found.smallest
        if nearest is not None:
            peak_bytes = simulate(problem.graph, nearest).peak_bytes
            if peak_bytes < start_bytes:
                start, start_bytes = nearest, peak_bytes
            if peak_bytes < best.peak_bytes:
                best = best._replace(peak_bytes=peak_bytes, schedule=nearest)
    return best


def _floor(problem: Problem, deadline: Deadline, enough_bytes: int) -> Floor:
    """Return the best proven floor by the deadline, or one that is enough."""
    by_sets = floor_of_live_sets(problem.graph, deadline, enough_bytes=enough_bytes) or problem.floor
    if by_sets.bytes >= enough_bytes:
        return by_sets
    with imported("ilp"):
        # Imported on first use: `import scheduler` must not need pulp.
        from scheduler.solvers.moments import proven_floor
    return max(proven_floor(problem, deadline, enough_bytes=enough_bytes), by_sets, key=lambda floor: floor.bytes)


def _fitting(problem: Problem, deadline: Deadline, seed: int) -> Proposal:
    """Return a proposal with the first schedule found that fits a problem's budget, or with one that is near."""
    if problem.chain is not None:
        return load_solver("dp")(problem, deadline=deadline, seed=seed)
    with imported("anneal"):
        # Imported on first use: `import scheduler` must not need numba.
        from scheduler.solvers.anneal import solver as anneal
    share = _FITTING_SHARE if len(problem.graph.operations) <= _MOST_DECIDED_OPERATIONS else 1.0
    part = deadline.within(share * deadline.remaining, lambda _: part.stop())
    found = anneal.search(problem, deadline=part, seed=seed, only_starts=share == 1.0)
    if found.schedule is not None or share == 1.0 or deadline.passed:
        return found
    with suppress(UnsuitableProblemError):  # the graph is too large for `ilp`
        return replace(load_solver("ilp")(problem, deadline=deadline, seed=seed), smallest=found.smallest)
    return found


class _PeakSearch:
    """The schedule with the smallest peak so far, and the quick one; at first, the save-everything schedule is both."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        problem = with_smallest_kernels(problem)
        self.problem, self.deadline = problem, deadline
        self.peak_bytes, self.schedule = problem.baseline.peak_bytes, problem.save_everything
        self.quick_bytes, self.quick = self.peak_bytes, self.schedule
        self.least = max(problem.floor.bytes, problem.budget_bytes)

    @cached_property
    def late(self) -> Problem:
        """The problem with its graph in the late order; to compare known schedules needs none."""
        return in_late_order(self.problem)

    @property
    def fits(self) -> bool:
        """Whether the smallest peak fits the problem's budget."""
        return self.peak_bytes <= self.problem.budget_bytes

    @property
    def _may_go_on(self) -> bool:
        return not (self.fits or self.deadline.passed)

    def offer(self, schedule: Schedule) -> None:
        """Simulate a schedule, and keep it if its peak is smaller and the problem allows its order."""
        graph, baseline = self.problem.graph, self.problem.baseline
        simulation = simulate(graph, schedule)
        peak_bytes, is_quick = simulation.peak_bytes, simulation.time <= _QUICK_TIMES * baseline.time
        least = self.quick_bytes if is_quick else self.peak_bytes
        if peak_bytes >= least or not (self.problem.reorder or follows_input_order(graph, schedule)):
            return
        if is_quick:
            self.quick_bytes, self.quick = peak_bytes, schedule
        if peak_bytes < self.peak_bytes:
            self.peak_bytes, self.schedule = peak_bytes, schedule

    def walk(self) -> None:
        """Offer the schedules of walks that evict, through the late order and the given one.

        Those by the first rules come first, in either order; after these, such in the late one that keep what is
        smaller.
        """
        if self._may_go_on:
            self._walk(self.deadline, are_first=True)
        if self._may_go_on:
            self._walk(self.deadline.within(_WALKS_SHARE * self.deadline.remaining), are_first=False)

    def _walk(self, deadline: Deadline, *, are_first: bool) -> None:
        """Offer walks by the rules that come first, or by the other ones."""
        with imported("greedy"):
            # Imported on first use: `import scheduler` must not need numba.
            from scheduler.solvers.eviction_walk import Eviction, EvictionWalks
        rules = list(Eviction)[:_FIRST_RULES] if are_first else list(Eviction)[_FIRST_RULES:]
        orders = [self.problem] if self.late is self.problem else [self.late, self.problem]
        walks = [EvictionWalks(problem.graph) for problem in orders]
        if are_first and len(orders) > 1:
            walks.append(EvictionWalks(self.late.graph, keeps_smaller=True))
        for rule, walk in product(rules, walks):
            self._search(partial(walk.within, eviction=rule), deadline)

    def _search(self, within: Callable[[int], Schedule | None], deadline: Deadline) -> None:
        """Offer the schedules of walks, by bisection for the least bytes that are enough, and then within more.

        A walk may take much less than it stays within, so that one within slightly more at times takes less.
        """
        failed, enough = self.least - 1, self.problem.baseline.peak_bytes
        step = max(1, (enough - failed) // _SQUEEZE_STEPS)
        budget, above = self.least, _WALKS_ABOVE
        while above and self._may_go_on and not deadline.passed:
            schedule = within(budget)
            if schedule is not None:
                self.offer(schedule)
            if enough - failed > step:
                failed, enough = (budget, enough) if schedule is None else (failed, budget)
                budget = (failed + enough) // 2
            else:
                budget, above = max(budget, enough) + _STEPS_ABOVE * step, above - 1

    def ask_greedy(self) -> None:
        """Offer the schedules of the greedy search, by bisection for the least budget that it fits."""
        if not self._may_go_on:
            return
        budget, failed = self.least, self.least - 1
        limit = self.deadline.within(_GREEDY_SHARE * self.deadline.remaining)
        for _ in range(_MOST_GREEDY_BUDGETS):
            if budget >= self.peak_bytes or self.fits or limit.passed:
                return
            self.ask("greedy", budget)
            if self.peak_bytes > budget:
                failed = budget
            budget = (failed + self.peak_bytes + 1) // 2

    def ask(self, solver: str, budget_bytes: int) -> None:
        """Offer a solver's schedule for another budget, unless the peak already fits."""
        if self.fits:
            return
        problem = self.late.changed(budget_bytes=budget_bytes)
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
