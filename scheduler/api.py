"""Entry points for graphs and chains: solve for a budget, find the smallest one, make a plan."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from threading import Lock
from typing import NamedTuple, TypedDict, Unpack

from scheduler.errors import (
    BudgetTooSmallError,
    InvalidOptionError,
    OutOfTimeError,
    SlowPlanWarning,
    UnsuitableProblemError,
)
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.plan import Granularity, Plan
from scheduler.problem import Problem
from scheduler.simulator import Simulation, simulate
from scheduler.solution import Progress, Proposal, Solution, Status, grade
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.solvers.explanations import explain, explain_slow
from scheduler.solvers.registry import load_solver
from scheduler.solvers.smallest_peak import quick_peak, squeeze, with_budget

MIN_EXPLANATION_SECONDS, MAX_EXPLANATION_SECONDS = 0.3, 2.0
"""Limits of the time to look for the smallest peak that an error message names."""


SLOW_PLAN, FAST_PLAN = 2.0, 1.5
"""A plan that takes more than the first multiple of the plain step is handed over with a warning, which names a
budget for which the second is known to suffice."""

BOUND_SHARE = 0.1
"""Share of the remaining time for the bounds of `ilp` on the answer of a solver that has none of its own."""

TRAINING_GAP = 0.005
"""The gap at which a search ends where a model is about to be trained; `solve` by itself searches on."""

MOST_SECONDS_BEFORE_TRAINING = 20.0


def training_time_limit(graph: Graph) -> float:
    """Return how many seconds the search for a plan takes at most where a model is about to be trained.

    They grow with the step, of which training takes many: 4 s and the time of five steps, and no
    more than 20 s. If the graph's times are not in seconds, they are 20 s.
    """
    if graph.time_unit != "s":
        return MOST_SECONDS_BEFORE_TRAINING
    step = math.fsum(graph.operations[i].time for i in graph.index.defaults)
    return min(4.0 + 5.0 * step, MOST_SECONDS_BEFORE_TRAINING)


class SolveOptions(TypedDict, total=False):
    """Keyword options of `solve`, passed through by `make_plan`."""

    solver: str
    time_limit: float
    gap: float
    reorder: bool
    seed: int


class SmallestPeak(NamedTuple):
    """The result of `minimum_budget`; both sizes include the resident tensors.

    Attributes
    ----------
    peak_bytes : int
        Smallest peak of the known schedules.
    floor_bytes : int
        Proven lower bound on the peak of every schedule.
    operation : str
        The operation during whose first run the floor is needed: by the run alone, or together
        with results and with what later operations need and nothing can compute again.
    """

    peak_bytes: int
    floor_bytes: int
    operation: str


def solve(
    graph_or_chain: Graph | Chain,
    budget: int | str,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.0,
    reorder: bool = True,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """Find the fastest schedule that fits a budget, and prove how good it is.

    Parameters
    ----------
    graph_or_chain : Graph or Chain
    budget : int or str
        Largest peak of the whole step, resident tensors (parameters, optimizer state,
        inputs) included: bytes as an int, "8GiB", "8GB", or "60%" of what the
        save-everything step adds to the resident bytes. "min" is the smallest peak for which a
        schedule is known, and "min+10%" is 10 % of the way from there to the peak of the
        save-everything step; finding it takes up to a tenth of the time limit, or a second, and
        `auto` always has an answer.
    solver : str
        One of `solver_names()`.
    time_limit : float
        Seconds, without the compilation of kernels on the first run on a machine. At the
        limit, or at Ctrl-C, the best answer so far is returned with its bound.
    gap : float
        The search ends as soon as `Solution.gap` is at most this: 0.005 ends it when the answer
        is proven to be within half a percent of the optimum of its search space.
    reorder : bool
        Whether tasks may first run in any order instead of the input order.
    seed : int
        Seed of searches that draw random numbers.
    progress : callable, optional
        Called with a `Progress` whenever the best schedule or the bound improves, from the
        thread that found it.

    Returns
    -------
    Solution

    Raises
    ------
    InvalidBudgetError, InvalidOptionError, UnknownSolverError
        If an argument is invalid.
    MissingExtraError
        If the solver needs a package that is not installed.
    UnsuitableProblemError
        If the solver does not solve problems of this kind.

    Examples
    --------
    >>> from scheduler.graph import Graph, Operation, Tensor
    >>> steps = [Operation("f", ["x"], ["y"], 1.0), Operation("g", ["y"], ["z"], 1.0)]
    >>> graph = Graph(steps, [Tensor("x", 4), Tensor("y", 4), Tensor("z", 4)], ["x"], ["z"])
    >>> solution = solve(graph, 12)
    >>> solution.status.name, solution.time, solution.peak_bytes
    ('OPTIMAL', 2.0, 12)
    """
    check_options(time_limit, seed)
    graph, chain = lower(graph_or_chain)
    if progress is not None and not callable(progress):
        raise InvalidOptionError(f"progress must be a function or None, got {progress!r}")
    load_solver(solver)
    started = clock.now()
    deadline = Deadline(time_limit)
    with stopped_by_interrupt(deadline):
        problem = with_budget(Problem(graph, 0, reorder, chain, gap=gap), budget, deadline)
        search = deadline.within(math.inf, progress and _Reporter(problem, progress))
        proposal = propose_with_bounds(problem, solver, search, seed)
        search.report(proposal)
        solution = grade(problem, proposal, solver=solver, seconds=clock.now() - started)
    return _with_smallest_peak(problem, proposal, solution, deadline)


def minimum_budget(graph_or_chain: Graph | Chain, *, time_limit: float = 60.0) -> SmallestPeak:
    """Find a schedule with the smallest peak, and a proven lower bound on every peak.

    Parameters
    ----------
    graph_or_chain : Graph or Chain
    time_limit : float
        Seconds.

    Returns
    -------
    SmallestPeak
        The smallest peak found, the proven floor, and the operation that it is needed for.

    Raises
    ------
    InvalidOptionError
        If an argument is invalid.
    """
    check_options(time_limit, 0)
    graph, chain = lower(graph_or_chain)
    problem, deadline = Problem(graph, 0, chain=chain), Deadline(time_limit)
    with stopped_by_interrupt(deadline):
        found = squeeze(problem, deadline)
    return SmallestPeak(found.peak_bytes, found.floor.bytes, found.floor.operation)


class _Reporter:
    """Listens to the intermediate results of a search, and passes on what is better than before."""

    def __init__(self, problem: Problem, progress: Callable[[Progress], None]) -> None:
        self.problem, self.progress = problem, progress
        self.started = clock.now()
        self.time, self.bound = math.inf, 0.0
        self._lock = Lock()

    def __call__(self, found: Proposal) -> None:
        with self._lock:
            time, bound = self._time(found), max(found.bound, found.global_bound)
            if math.isinf(bound) or (time, bound) == (self.time, self.bound):
                return
            self.time, self.bound = time, bound
            self.progress(Progress(clock.now() - self.started, time, min(time, bound)))

    def _time(self, found: Proposal) -> float:
        if found.schedule is None:
            return self.time
        simulation = simulate(self.problem.graph, found.schedule)
        return min(self.time, simulation.time) if simulation.peak_bytes <= self.problem.budget_bytes else self.time


def make_plan(
    graph_or_chain: Graph | Chain,
    budget: int | str,
    *,
    progress: Callable[[Progress], None] | None = None,
    **options: Unpack[SolveOptions],
) -> Plan:
    """Solve for a budget and return the answer as a plan, which can be saved.

    Parameters
    ----------
    graph_or_chain, budget, progress, **options
        As for `solve`, which also lists further errors.

    Returns
    -------
    Plan

    Raises
    ------
    BudgetTooSmallError
        If it is proven that no schedule fits, or the solver found none.
    OutOfTimeError
        If the time limit passed before a schedule was found.

    Warns
    -----
    SlowPlanWarning
        If the plan takes more than twice as long as the plain step.
    """
    solution = solve(graph_or_chain, budget, progress=progress, **options)
    plan = plan_of(graph_or_chain, solution, time_limit=options.get("time_limit", 60.0))
    warn_if_slow(graph_or_chain, solution)
    return plan


def plan_of(
    graph_or_chain: Graph | Chain,
    solution: Solution,
    *,
    time_limit: float = math.inf,
    granularity: Granularity | None = None,
) -> Plan:
    """Return the plan of a solution; its granularity is "operations" or "layers" unless another is given.

    Raises
    ------
    BudgetTooSmallError, OutOfTimeError
        If the solution has no schedule; out of time if it took `time_limit` seconds.
    """
    graph, chain = lower(graph_or_chain)
    if solution.schedule is None:
        message = solution.messages[0]
        if solution.status is Status.UNKNOWN and solution.solve_seconds >= time_limit:
            raise OutOfTimeError(f"no schedule found in {time_limit:g} s: {message}")
        raise BudgetTooSmallError(message, proven=solution.status is Status.INFEASIBLE)
    granularity = granularity or ("operations" if chain is None else "layers")
    return Plan.of(graph, solution, granularity=granularity)


def warn_if_slow(graph_or_chain: Graph | Chain, solution: Solution) -> None:
    """Issue a `SlowPlanWarning` if a solution takes more than `SLOW_PLAN` times as long as the plain step."""
    if math.isfinite(solution.time) and solution.time > SLOW_PLAN * solution.baseline_time > 0:
        faster = _faster(lower(graph_or_chain)[0], solution, Deadline(MAX_EXPLANATION_SECONDS))
        warnings.warn(explain_slow(solution, faster), SlowPlanWarning, stacklevel=3)


def _faster(graph: Graph, solution: Solution, deadline: Deadline) -> Simulation:
    """Return the simulation of a schedule that is fast enough, by the greedy search for larger budgets if need be."""
    problem = Problem(graph, solution.budget_bytes)
    if problem.baseline.peak_bytes <= solution.budget_bytes:
        return problem.baseline
    added = problem.baseline.peak_bytes - solution.budget_bytes
    for eighths in range(1, 8):
        larger = problem.changed(budget_bytes=solution.budget_bytes + added * eighths // 8)
        found = None if deadline.passed else load_solver("greedy")(larger, deadline=deadline, seed=0).schedule
        simulation = problem.baseline if found is None else simulate(graph, found)
        if simulation.peak_bytes <= larger.budget_bytes and simulation.time <= FAST_PLAN * problem.baseline.time:
            return simulation
    return problem.baseline


def lower(graph_or_chain: Graph | Chain) -> tuple[Graph, Chain | None]:
    """Return a graph, and the chain that it is lowered from or None."""
    if isinstance(graph_or_chain, Graph):
        return graph_or_chain, None
    if isinstance(graph_or_chain, Chain):
        return graph_or_chain.graph, graph_or_chain
    raise InvalidOptionError(f"the graph must be a Graph or a Chain, got {type(graph_or_chain).__name__}")


def check_options(time_limit: float, seed: int) -> None:
    """Raise an error if the time limit or the seed is invalid."""
    if isinstance(time_limit, (bool, str)) or not time_limit > 0:
        raise InvalidOptionError(f"time_limit must be a number of seconds above 0, got {time_limit!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidOptionError(f"seed must be an int >= 0, got {seed!r}")


def propose_with_bounds(problem: Problem, solver: str, deadline: Deadline, seed: int) -> Proposal:
    """Return the proposal of a solver, with the bounds of `ilp` if it has none of its own.

    The bounds take at most as long as the solver, or `BOUND_SHARE` of the time that is left if that is longer.
    """
    started = clock.now()
    proposal = load_solver(solver)(problem, deadline=deadline, seed=seed)
    seconds = max(clock.now() - started, BOUND_SHARE * deadline.remaining)
    return with_bounds(problem, proposal, deadline.within(seconds))


def with_bounds(problem: Problem, proposal: Proposal, deadline: Deadline) -> Proposal:
    """Return a proposal, with the bounds of `ilp` if it has none of its own."""
    if max(proposal.bound, proposal.global_bound) > 0 or proposal.infeasible or proposal.schedule is None:
        return proposal
    least = replace(proposal, bound=problem.least_time, global_bound=problem.least_time)
    if simulate(problem.graph, proposal.schedule).time <= problem.least_time:
        return least
    try:
        proven = load_solver("ilp")(problem, deadline=deadline, seed=0)
    except UnsuitableProblemError:  # the graph is too large
        return least
    if proposal.search_space != "input order":
        return replace(proposal, global_bound=proven.global_bound)
    return replace(proposal, bound=proven.bound, global_bound=proven.global_bound)


def _with_smallest_peak(problem: Problem, proposal: Proposal, solution: Solution, deadline: Deadline) -> Solution:
    """Return a solution with the smallest known peak and, without a schedule, with an explanation."""
    if solution.schedule is not None and deadline.passed:
        return replace(solution, smallest_peak_bytes=solution.peak_bytes)
    was_searched = bool(problem.starts)  # for a budget such as "min"
    known = dict.fromkeys((proposal.schedule, proposal.smallest, *problem.starts))
    problem = problem.changed(starts=tuple(schedule for schedule in known if schedule is not None))
    if solution.schedule is not None:
        with stopped_by_interrupt(deadline):
            is_persistent = proposal.search_space == "persistent"
            peak_bytes = quick_peak(problem, deadline, only_known=was_searched, is_persistent=is_persistent)
        return replace(solution, smallest_peak_bytes=peak_bytes)
    deadline = Deadline(max(MIN_EXPLANATION_SECONDS, deadline.remaining))
    with stopped_by_interrupt(deadline):
        found = squeeze(problem, deadline.within(MAX_EXPLANATION_SECONDS))
    if found.floor.bytes > problem.budget_bytes:
        solution = replace(solution, status=Status.INFEASIBLE)
    messages = (explain(problem, solution, found.peak_bytes, floor=found.floor), *solution.messages)
    return replace(solution, messages=messages, smallest_peak_bytes=found.peak_bytes)
