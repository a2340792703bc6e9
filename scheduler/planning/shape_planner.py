"""Plan one step in several shapes: what was found for one shape is where the next one begins.

A step at another batch size or length usually has the same operations, with other sizes and
times. A schedule of the one, as a sequence of operations, is then a schedule of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from scheduler.api import (
    MOST_SECONDS_BEFORE_TRAINING,
    SolveOptions,
    lower,
    make_plan,
    plan_of,
    propose_with_bounds,
    training_time_limit,
    warn_if_slow,
)
from scheduler.errors import BudgetTooSmallError, OutOfTimeError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.plan import Plan
from scheduler.planning.batch_scaling import structure
from scheduler.problem import Problem, least_time, read_budget
from scheduler.schedule import Schedule, follows_input_order, runs_of, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solution import TOLERANCE, Progress, Proposal, Solution, grade, relative_gap
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.units import format_bytes

LATER_SEARCH_SHARE = 0.2
"""Share of the longest search so far that the search for another shape of the same step may take."""

LEAST_SEARCH_SECONDS = 1.0
"""Every search may take this long."""

SAME_TIMES = 0.01
"""Steps of the same sizes are taken for the same if their times differ by at most this share: measured ones vary."""

MOST_KNOWN = 8
"""Number of different schedules of one structure from which a search begins."""


class ShapePlanner:
    """Makes plans for one step in several shapes, all within the same bytes.

    The first shape is planned as by `make_plan`. For another shape with the same operations,
    the schedules found so far are simulated. The fastest that fits is taken over if no schedule
    can be faster by more than the gap, or if a step of the same sizes has been planned: a number
    in it has changed. Otherwise a search begins with all of them, and may
    take `LATER_SEARCH_SHARE` of the longest search so far, or `LEAST_SEARCH_SECONDS` if that is
    more. It takes its full time limit only if no schedule is known to fit at the end. Without a time
    limit in the options, it is `training_time_limit`, or longer where nothing is found by then.

    Parameters
    ----------
    budget : int or str
        As for `solve`. It is resolved for the first shape, and its bytes hold for all. Only "min" and
        "min+10%" are resolved anew, for a shape for which no schedule within those bytes is found.
    options : SolveOptions
        As for `solve`.
    progress : callable, optional
        As for `solve`, for searches with the full time limit.

    Attributes
    ----------
    budget_bytes : int or None
        The budget in bytes; None before the first plan.
    searches : int
        Number of searches so far; a schedule that is taken over needs none.
    """

    def __init__(
        self, budget: int | str, options: SolveOptions, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.budget, self.options, self._progress = budget, options, progress
        self.budget_bytes: int | None = None
        self.searches = 0
        self._known: dict[Hashable, list[tuple[int, ...]]] = {}
        self._longest: dict[Hashable, float] = {}
        self._least_times: dict[Hashable, float] = {}
        """Of the steps planned so far, by structure, sizes and budget."""

    def plan(self, graph_or_chain: Graph | Chain) -> Plan:
        """Return a plan for the step in one shape.

        Parameters
        ----------
        graph_or_chain : Graph or Chain

        Raises
        ------
        BudgetTooSmallError, OutOfTimeError
            As for `make_plan`.
        """
        graph, chain = lower(graph_or_chain)
        key = structure(graph)
        solution = None
        if self.budget_bytes is not None:
            starts = tuple(schedule_from_runs(graph, runs) for runs in self._known.get(key, ()))
            problem = Problem(graph, self.budget_bytes, self.options.get("reorder", True), chain, starts, gap=self._gap)
            before = self._least_times.get(self._exact(key, graph), 0.0)
            is_known = math.isclose(before, problem.least_time, rel_tol=SAME_TIMES)
            solution = self._take_over(problem, is_known=is_known) or self._search_from(problem, self._longest.get(key))
        if solution is None:
            plan = self._search_anew(graph_or_chain)
        else:
            plan = plan_of(graph_or_chain, solution)
            warn_if_slow(graph_or_chain, solution)
        self.budget_bytes = plan.budget_bytes
        self._keep(key, plan)
        return plan

    def _take_over(self, problem: Problem, *, is_known: bool) -> Solution | None:
        """Return the fastest known schedule that fits, if no schedule can be much faster or the problem is known."""
        started = clock.now()
        fitting = [(time, start) for start in problem.starts if (time := _time_if_valid(problem, start)) is not None]
        if not fitting:
            return None
        time, schedule = min(fitting, key=lambda entry: entry[0])
        if not is_known and relative_gap(time, problem.least_time) > max(problem.gap, TOLERANCE):
            return None
        space = "input order" if follows_input_order(problem.graph, schedule) else "any order"
        found = Proposal(schedule, space, messages=("the schedule of an earlier plan for this step",))
        return grade(problem, found, solver=self._solver, seconds=clock.now() - started)

    def _search_from(self, problem: Problem, longest: float | None) -> Solution | None:
        """Return what a short search from the known schedules finds; None if nothing, or if there was no search yet."""
        if longest is None:
            return None
        started = clock.now()
        seconds = max(LEAST_SEARCH_SECONDS, LATER_SEARCH_SHARE * longest)
        deadline = Deadline(min(seconds, self.options.get("time_limit", seconds)))
        self.searches += 1
        with stopped_by_interrupt(deadline):
            proposal = propose_with_bounds(problem, self._solver, deadline, self.options.get("seed", 0))
            solution = grade(problem, proposal, solver=self._solver, seconds=clock.now() - started)
        return None if solution.schedule is None else solution

    def _search_anew(self, graph_or_chain: Graph | Chain) -> Plan:
        """Return a plan from a search with the full time limit; the first one gives the bytes for all shapes."""
        self.searches += 1
        if self.budget_bytes is None:
            return self._make_plan(graph_or_chain, self.budget)
        try:
            return self._make_plan(graph_or_chain, self.budget_bytes)
        except (BudgetTooSmallError, OutOfTimeError) as error:
            form = read_budget(self.budget).form
            if form == "min":
                return self._make_plan(graph_or_chain, self.budget)
            if form == "bytes" or isinstance(error, OutOfTimeError):
                raise
            message = (
                f'{error} The budget "{self.budget}" means {format_bytes(self.budget_bytes)} for all shapes,'
                " computed for the first: plan the largest shape first, or give the budget in bytes."
            )
            raise BudgetTooSmallError(message, proven=error.proven) from error

    def _make_plan(self, graph_or_chain: Graph | Chain, budget: int | str) -> Plan:
        """Make a plan; without a time limit in the options, in that of a model that is about to be trained."""
        limit = training_time_limit(lower(graph_or_chain)[0])
        options: SolveOptions = {"time_limit": limit, **self.options}
        try:
            return make_plan(graph_or_chain, budget, progress=self._progress, **options)
        except OutOfTimeError:
            if "time_limit" in self.options or limit >= MOST_SECONDS_BEFORE_TRAINING:
                raise
            options["time_limit"] = MOST_SECONDS_BEFORE_TRAINING
            return make_plan(graph_or_chain, budget, progress=self._progress, **options)

    def _keep(self, key: Hashable, plan: Plan) -> None:
        """Let later searches begin with the schedule of a plan."""
        runs = tuple(runs_of(plan.graph, plan.schedule))
        known = [other for other in self._known.get(key, ()) if other != runs]
        self._known[key] = [*known, runs][-MOST_KNOWN:]
        self._least_times[self._exact(key, plan.graph)] = least_time(plan.graph)
        if plan.overhead > 0:  # otherwise it needed no search, and says nothing about how long one takes
            self._longest[key] = max(self._longest.get(key, 0.0), plan.solve_seconds)

    def _exact(self, key: Hashable, graph: Graph) -> Hashable:
        """Return a key that graphs of one structure share if they also have the same sizes and budget."""
        return key, tuple(tensor.size_bytes for tensor in graph.tensors), self.budget_bytes

    @property
    def _gap(self) -> float:
        return self.options.get("gap", 0.0)

    @property
    def _solver(self) -> str:
        return self.options.get("solver", "auto")


def _time_if_valid(problem: Problem, schedule: Schedule) -> float | None:
    """Return the time of a schedule that solves a problem, None if it does not."""
    simulation = simulate(problem.graph, schedule)
    fits = simulation.peak_bytes <= problem.budget_bytes
    return simulation.time if fits and (problem.reorder or follows_input_order(problem.graph, schedule)) else None
