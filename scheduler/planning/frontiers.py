"""The frontier: for each budget the fastest schedule known, and what no schedule can beat."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock

from scheduler.api import check_options, lower, propose_with_bounds
from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.problem import Problem, parse_budget
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import Proposal, Solution, grade
from scheduler.solvers.deadline import Deadline, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.solvers.smallest_peak import smallest_peak

_BUDGETS = 10
_SHARE_OF_SMALL_END = 0.1


@dataclass(frozen=True)
class Frontier:
    """One answer per budget.

    A larger budget never has a slower answer, nor a smaller one a lower bound: what is found
    or proven at one budget counts wherever it holds.

    Attributes
    ----------
    rows : tuple of Solution
        By rising budget: `budget_bytes`, `peak_bytes`, `overhead`, `bound`, `gap` and the
        rest of each answer.
    """

    rows: tuple[Solution, ...]

    def __iter__(self) -> Iterator[Solution]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def frontier(
    graph_or_chain: Graph | Chain,
    budgets: Sequence[int | str] | None = None,
    *,
    solver: str = "auto",
    time_limit: float = 60.0,
    reorder: bool = True,
    seed: int = 0,
) -> Frontier:
    """Find the fastest schedule for each of several budgets.

    Budgets are solved side by side, from the largest down; each search may start from the
    answers of the others.

    Parameters
    ----------
    graph_or_chain : Graph or Chain
    budgets : sequence of int or str, optional
        As for `solve`. By default ten, evenly from the smallest peak known to the
        save-everything peak.
    solver : str
        One of `solver_names()`.
    time_limit : float
        Seconds for all budgets together.
    reorder : bool
    seed : int

    Returns
    -------
    Frontier

    Raises
    ------
    InvalidBudgetError, InvalidOptionError, UnknownSolverError
        If an argument cannot be understood.
    UnsuitableProblemError
        If the solver does not serve such graphs.

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
        raise InvalidOptionError(f"budgets is a sequence of at least one budget, not {budgets!r}")
    graph, chain = lower(graph_or_chain)
    sweep = _Sweep(Problem(graph, 0, reorder, chain), solver, Deadline(time_limit), seed)
    with stopped_by_interrupt(sweep.deadline):
        if budgets is None:
            smallest, most = sweep.small_end(), sweep.problem.baseline.peak_bytes
            wanted = {smallest + (most - smallest) * k // (_BUDGETS - 1) for k in range(_BUDGETS)}
        else:
            wanted = {parse_budget(budget, graph, baseline=sweep.problem.baseline) for budget in budgets}
        sweep.run(sorted(wanted, reverse=True))
    return Frontier(tuple(sweep.merged(budget) for budget in sorted(wanted)))


@dataclass(frozen=True)
class _Found:
    proposal: Proposal
    time: float
    peak_bytes: int


class _Sweep:
    """Proposals by budget, and what each says about the others."""

    def __init__(self, problem: Problem, solver: str, deadline: Deadline, seed: int) -> None:
        self.problem, self.solver, self.deadline, self.seed = problem, solver, deadline, seed
        self.proposals: dict[int, Proposal] = {}
        self.seconds: dict[int, float] = {}
        self.found: list[_Found] = []
        self.starts: list[Schedule] = []
        self.cuts: list[int] = []
        self._lock = Lock()

    def small_end(self) -> int:
        """Return the smallest peak known; its schedule is a start."""
        deadline = self.deadline.within(_SHARE_OF_SMALL_END * self.deadline.remaining)
        peak, schedule = smallest_peak(self.problem, deadline)
        self.starts.append(schedule)
        return peak

    def run(self, budgets: Sequence[int]) -> None:
        """Solve all budgets, in that order, as many at once as there are cores."""
        waiting = list(budgets)
        workers = min(len(waiting), os.cpu_count() or 1)

        def work() -> None:
            while True:
                with self._lock:
                    if not waiting:
                        return
                    share = min(1.0, workers / len(waiting))
                    budget = waiting.pop(0)
                    problem = replace(
                        self.problem, budget_bytes=budget, starts=tuple(self.starts), cuts=tuple(self.cuts)
                    )
                begun = self.deadline.remaining
                deadline = self.deadline.within(share * begun)
                proposal = propose_with_bounds(problem, self.solver, deadline, self.seed)
                with self._lock:
                    self._keep(budget, proposal)
                    self.seconds[budget] = begun - self.deadline.remaining

        with ThreadPoolExecutor(workers) as pool:
            for future in [pool.submit(work) for _ in range(workers)]:
                future.result()

    def _keep(self, budget: int, proposal: Proposal) -> None:
        self.proposals[budget] = proposal
        self.cuts += [task for task in proposal.cuts if task not in self.cuts]
        if proposal.schedule is not None:
            simulated = simulate(self.problem.graph, proposal.schedule)
            self.found.append(_Found(proposal, simulated.time, simulated.peak_bytes))
            self.starts.append(proposal.schedule)

    def merged(self, budget: int) -> Solution:
        """Return the best answer to a budget that any of the proposals gives."""
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
        problem = replace(self.problem, budget_bytes=budget)
        return grade(problem, proposal, solver=self.solver, seconds=self.seconds[budget])
