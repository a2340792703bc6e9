"""Frontiers: the fastest known schedule and the proven lower bound for each of several budgets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from threading import Lock

from scheduler.api import check_options, lower, propose_with_bounds
from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.problem import Problem, read_budget
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import Proposal, Solution, grade
from scheduler.solvers.deadline import Deadline, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.solvers.smallest_peak import share_for_peak, squeeze
from scheduler.units import format_bytes, format_peak, format_percent, html_table, text_table

_DEFAULT_BUDGETS = 10


@dataclass(frozen=True, repr=False)
class Frontier:
    """One solution per budget.

    A larger budget never has a slower schedule, and a smaller one never has a lower bound: a
    schedule or bound found at one budget is used at every budget that it is valid for.

    Attributes
    ----------
    rows : tuple of Solution
        In ascending order of their budgets.
    """

    rows: tuple[Solution, ...]

    def __iter__(self) -> Iterator[Solution]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        if not self.rows:
            return "Frontier(0 budgets)"
        first, last = (format_bytes(row.budget_bytes) for row in (self.rows[0], self.rows[-1]))
        return f"Frontier({len(self)} budgets from {first} to {last})"

    def summary(self) -> str:
        """Return budget, peak, overhead, gaps and status of each solution as a table."""
        return text_table(self._cells())

    def _repr_html_(self) -> str:
        return html_table(self._cells())

    def _cells(self) -> list[list[str]]:
        header = ["budget", "peak", "overhead", "gap", "global gap", "status", "search space"]
        return [header, *(_cells_of(row) for row in self.rows)]


def _cells_of(row: Solution) -> list[str]:
    def peak(count: int) -> str:
        return format_peak(count, row.resident_bytes, row.baseline_peak_bytes)

    if row.peak_bytes is None:
        return [peak(row.budget_bytes), "-", "-", "-", "-", row.status.name, "-"]
    shares = (format_percent(share) for share in (row.overhead, row.gap, row.global_gap))
    return [peak(row.budget_bytes), peak(row.peak_bytes), *shares, row.status.name, row.search_space]


def frontier(
    graph_or_chain: Graph | Chain,
    budgets: Sequence[int | str] | None = None,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = 0.0,
    reorder: bool = True,
    seed: int = 0,
) -> Frontier:
    """Find the fastest schedule for each of several budgets.

    The budgets are solved in parallel, from the largest down, and each search may start from
    the schedules of the others.

    Parameters
    ----------
    graph_or_chain : Graph or Chain
    budgets : sequence of int or str, optional
        As for `solve`. By default ten, evenly spaced from the smallest known peak to the
        peak of the save-everything schedule.
    solver : str
        One of `solver_names()`.
    time_limit : float
        Seconds for all budgets together.
    gap, reorder, seed
        As for `solve`.

    Returns
    -------
    Frontier

    Raises
    ------
    InvalidBudgetError, InvalidOptionError, UnknownSolverError
        If an argument is invalid.
    UnsuitableProblemError
        If the solver does not solve problems of this kind.

    Examples
    --------
    >>> from scheduler.graph import Operation, Tensor
    >>> steps = [Operation("f", ["x"], ["y"], 1.0), Operation("g", ["y"], ["z"], 1.0)]
    >>> graph = Graph(steps, [Tensor("x", 4), Tensor("y", 4), Tensor("z", 4)], ["x"], ["z"])
    >>> [(row.budget_bytes, row.status.name, row.overhead) for row in frontier(graph, [12, 11])]
    [(11, 'INFEASIBLE', inf), (12, 'OPTIMAL', 0.0)]
    """
    check_options(time_limit, seed)
    load_solver(solver)
    if isinstance(budgets, (int, str)) or (budgets is not None and not len(budgets)):
        raise InvalidOptionError(f"budgets must be a sequence of at least one budget, got {budgets!r}")
    graph, chain = lower(graph_or_chain)
    sweep = _Sweep(Problem(graph, 0, reorder, chain, gap=gap), solver, Deadline(time_limit), seed)
    with stopped_by_interrupt(sweep.deadline):
        most = sweep.problem.baseline.peak_bytes
        if budgets is None:
            smallest = sweep.smallest_peak
            wanted = {smallest + (most - smallest) * k // (_DEFAULT_BUDGETS - 1) for k in range(_DEFAULT_BUDGETS)}
        else:
            wanted = {read_budget(b).resolve(graph.resident_bytes, most, lambda: sweep.smallest_peak) for b in budgets}
        sweep.run(sorted(wanted, reverse=True))
    return Frontier(tuple(sweep.merged(budget) for budget in sorted(wanted)))


@dataclass(frozen=True)
class _Found:
    proposal: Proposal
    time: float
    peak_bytes: int


class _Sweep:
    """The searches at all budgets, which share their schedules and bounds."""

    def __init__(self, problem: Problem, solver: str, deadline: Deadline, seed: int) -> None:
        self.problem, self.solver, self.deadline, self.seed = problem, solver, deadline, seed
        self.proposals: dict[int, Proposal] = {}
        self.seconds: dict[int, float] = {}
        self.found: list[_Found] = []
        self.starts: list[Schedule] = []
        self._lock = Lock()

    @cached_property
    def smallest_peak(self) -> int:
        """The smallest known peak; searches start from its schedule."""
        deadline = share_for_peak(self.deadline)
        found = squeeze(self.problem, deadline)
        self.starts.append(found.schedule)
        return found.peak_bytes

    def run(self, budgets: Sequence[int]) -> None:
        """Solve all budgets in this order, as many at once as there are cores."""
        waiting, running = list(budgets), list[Deadline]()
        workers = min(len(waiting), os.cpu_count() or 1)

        def work() -> None:
            while True:
                with self._lock:
                    if not waiting:
                        return
                    # What the running searches leave is shared by the budgets that wait.
                    free = workers * self.deadline.remaining - sum(other.remaining for other in running)
                    limit = self.deadline.within(free / len(waiting))
                    running.append(limit)
                    budget = waiting.pop(0)
                    problem = self.problem.changed(budget_bytes=budget, starts=tuple(self.starts))
                started = self.deadline.remaining
                proposal = propose_with_bounds(problem, self.solver, limit, self.seed)
                with self._lock:
                    running.remove(limit)
                    self._keep(budget, proposal)
                    self.seconds[budget] = started - self.deadline.remaining

        with ThreadPoolExecutor(workers) as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()

    def _keep(self, budget: int, proposal: Proposal) -> None:
        self.proposals[budget] = proposal
        if proposal.schedule is not None:
            simulation = simulate(self.problem.graph, proposal.schedule)
            self.found.append(_Found(proposal, simulation.time, simulation.peak_bytes))
            self.starts.append(proposal.schedule)

    def merged(self, budget: int) -> Solution:
        """Return the solution of a budget, made of the schedules and bounds of all budgets."""
        own = self.proposals[budget]
        above = [proposal for other, proposal in self.proposals.items() if other >= budget]
        fitting = [found for found in self.found if found.peak_bytes <= budget]
        best = min(fitting, key=lambda found: (found.time, found.proposal is not own)).proposal if fitting else own
        proposal = Proposal(
            best.schedule,
            best.search_space,
            bound=max((other.bound for other in above if other.search_space == best.search_space), default=0.0),
            global_bound=max(other.global_bound for other in above),
            infeasible=not fitting and any(other.infeasible for other in above),
            messages=own.messages,
        )
        problem = self.problem.changed(budget_bytes=budget)
        return grade(problem, proposal, solver=self.solver, seconds=self.seconds[budget])
