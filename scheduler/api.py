"""The front door: solve a problem, find the smallest budget, make a plan."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, NamedTuple, TypedDict, Unpack

from scheduler.errors import BudgetTooSmallError, InvalidOptionError, OutOfTimeError, UnsuitableProblemError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.plan import Plan
from scheduler.problem import Problem, parse_budget
from scheduler.simulator import simulate
from scheduler.solution import Proposal, Solution, Status, grade
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.solvers.smallest_peak import smallest_peak, squeeze
from scheduler.units import format_bytes

LEAST_SECONDS_TO_EXPLAIN, MOST_SECONDS_TO_EXPLAIN = 0.3, 10.0
"""To find the smallest budget known, for the message that says why there is no schedule."""


class SolveOptions(TypedDict, total=False):
    """Keyword options of `solve`, passed through by `make_plan`."""

    solver: str
    time_limit: float
    reorder: bool
    seed: int


class SmallestPeak(NamedTuple):
    """What `minimum_budget` finds, resident tensors included.

    Attributes
    ----------
    peak_bytes : int
        Smallest peak for which a schedule is known.
    floor_bytes : int
        Proven: no schedule has a smaller peak.
    operation : str
        The operation that needs most.
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
    reorder: bool = True,
    seed: int = 0,
) -> Solution:
    """Find the fastest schedule that fits a budget, and prove how good it is.

    Parameters
    ----------
    graph_or_chain : Graph or Chain
    budget : int or str
        Bytes of the peak of the whole step, resident tensors included: an int, "8GiB",
        "8GB", or "60%" of what the save-everything step adds to the resident bytes.
    solver : str
        One of `solver_names()`.
    time_limit : float
        Seconds, without those of compiling kernels on the first run on a machine. The best
        answer found by then, or by Ctrl-C, is returned with its bound.
    reorder : bool
        Whether tasks may first run in any order, or in the input order only.
    seed : int
        Of searches that draw random numbers.

    Returns
    -------
    Solution

    Raises
    ------
    InvalidBudgetError, InvalidOptionError, UnknownSolverError
        If an argument cannot be understood.
    UnsuitableProblemError
        If the solver does not serve such graphs.

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
    load_solver(solver)
    started = clock.now()
    deadline = Deadline(time_limit)
    with stopped_by_interrupt(deadline):
        problem = Problem(graph, parse_budget(budget, graph), reorder, chain)
        proposal = propose_with_bounds(problem, solver, deadline, seed)
        solution = grade(problem, proposal, solver=solver, seconds=clock.now() - started)
    if solution.schedule is None:
        deadline = Deadline(max(LEAST_SECONDS_TO_EXPLAIN, deadline.remaining))
        with stopped_by_interrupt(deadline):
            why = _why_nothing(problem, solution, deadline)
        solution = replace(solution, messages=(why, *solution.messages))
    return solution


def minimum_budget(graph_or_chain: Graph | Chain, *, time_limit: float = 60.0) -> SmallestPeak:
    """Find the smallest peak for which a schedule is known, and the floor that is proven.

    Parameters
    ----------
    graph_or_chain : Graph or Chain
    time_limit : float
        Seconds.

    Returns
    -------
    SmallestPeak
        The smallest peak found, the proven floor, and the operation that needs most.
    """
    check_options(time_limit, 0)
    graph, chain = lower(graph_or_chain)
    problem, deadline = Problem(graph, 0, chain=chain), Deadline(time_limit)
    with stopped_by_interrupt(deadline):
        peak, _ = squeeze(problem, deadline)
    return SmallestPeak(peak, problem.floor.bytes, problem.floor.operation)


def make_plan(graph_or_chain: Graph | Chain, budget: int | str, **options: Unpack[SolveOptions]) -> Plan:
    """Solve and return the answer as a plan, ready to be saved.

    Parameters
    ----------
    graph_or_chain, budget, **options
        As for `solve`.

    Raises
    ------
    BudgetTooSmallError
        If it is proven that no schedule fits, or none was found within the solver's space.
    OutOfTimeError
        If the time limit passed before anything was found.
    """
    solution = solve(graph_or_chain, budget, **options)
    return plan_of(graph_or_chain, solution, time_limit=options.get("time_limit", 60.0))


def plan_of(graph_or_chain: Graph | Chain, solution: Solution, *, time_limit: float = math.inf) -> Plan:
    """Return a solution as a plan.

    Raises
    ------
    BudgetTooSmallError, OutOfTimeError
        If the solution has no schedule.
    """
    graph, chain = lower(graph_or_chain)
    if solution.schedule is None:
        message = solution.messages[0]
        if solution.status is Status.UNKNOWN and solution.solve_seconds >= time_limit:
            raise OutOfTimeError(f"no schedule found in {time_limit:g} s: {message}")
        raise BudgetTooSmallError(message, proven=solution.status is Status.INFEASIBLE)
    granularity: Literal["operations", "layers"] = "operations" if chain is None else "layers"
    return Plan.of(graph, solution, granularity=granularity)


def lower(graph_or_chain: Graph | Chain) -> tuple[Graph, Chain | None]:
    """Return the graph, and the chain that it is lowered from, if it is."""
    if isinstance(graph_or_chain, Graph):
        return graph_or_chain, None
    if isinstance(graph_or_chain, Chain):
        return graph_or_chain.graph, graph_or_chain
    raise InvalidOptionError(f"give a Graph or a Chain, not {type(graph_or_chain).__name__}")


def check_options(time_limit: float, seed: int) -> None:
    """Refuse a time limit or a seed that means nothing."""
    if isinstance(time_limit, (bool, str)) or not time_limit > 0:
        raise InvalidOptionError(f"time_limit is a number of seconds above 0, not {time_limit!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InvalidOptionError(f"seed is a whole number >= 0, not {seed!r}")


def propose_with_bounds(problem: Problem, solver: str, deadline: Deadline, seed: int) -> Proposal:
    """Return a solver's proposal, with the bounds of `ilp` if it brings none of its own."""
    return with_bounds(problem, load_solver(solver)(problem, deadline=deadline, seed=seed), deadline)


def with_bounds(problem: Problem, proposal: Proposal, deadline: Deadline) -> Proposal:
    """Return a proposal with the bounds of `ilp` if it brings none of its own."""
    if max(proposal.bound, proposal.global_bound) > 0 or proposal.infeasible or proposal.schedule is None:
        return proposal
    least = replace(proposal, bound=problem.least_time, global_bound=problem.least_time)
    if simulate(problem.graph, proposal.schedule).time <= problem.least_time:
        return least
    try:
        proven = load_solver("ilp")(problem, deadline=deadline, seed=0)
    except UnsuitableProblemError:  # too large a graph
        return least
    if proposal.search_space != "input order":
        return replace(proposal, global_bound=proven.global_bound)
    return replace(proposal, bound=proven.bound, global_bound=proven.global_bound)


def _why_nothing(problem: Problem, solution: Solution, deadline: Deadline) -> str:
    floor = problem.floor
    known, _ = smallest_peak(problem, deadline.within(MOST_SECONDS_TO_EXPLAIN))
    budget = format_bytes(problem.budget_bytes)
    if floor.bytes > problem.budget_bytes:
        why = f'no schedule fits {budget}: "{floor.operation}" alone needs {format_bytes(floor.bytes)}.'
    elif solution.status is Status.INFEASIBLE:
        why = (
            f"proven: no schedule fits {budget}, though no single operation needs that much"
            f' ("{floor.operation}" needs most: {format_bytes(floor.bytes)}).'
        )
    else:
        why = (
            f'{solution.solver} found no schedule of {budget}; "{floor.operation}" needs most:'
            f" {format_bytes(floor.bytes)} alone."
        )
    return (
        f"{why} A schedule of {format_bytes(known)} ({known} bytes) is known;"
        " between the two nothing is proven."
        f" Raise the budget to {known} bytes, use a smaller batch, or split that operation."
    )
