"""The sweep of a comparison: every solver on every graph and budget, under one judge."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache

from scheduler.api import check_options, lower, with_bounds
from scheduler.comparisons.journal import Journal
from scheduler.comparisons.table import FAILED, NOT_INSTALLED, UNSUITABLE, Comparison, Row, read_rows
from scheduler.errors import InvalidOptionError, MissingExtraError, UnsuitableProblemError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.problem import Problem, parse_budget
from scheduler.solution import grade
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.zoo import random_layered, uniform_chain

_SECONDS_BETWEEN_LOOKS = 0.2
"""At Ctrl-C, while other processes work."""


def compare(
    graphs: Sequence[Graph | Chain] | Mapping[str, Graph | Chain],
    budgets: Sequence[int | str],
    solvers: Sequence[str],
    *,
    time_limit: float = 60.0,
    reorder: bool = True,
    seed: int = 0,
    executor: Executor | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, Row], None] | None = None,
) -> Comparison:
    """Run every solver on every graph and budget.

    Parameters
    ----------
    graphs : sequence or mapping of Graph or Chain
        A mapping gives the names; else they are the graphs' own.
    budgets : sequence of int or str
        As for `solve`.
    solvers : sequence of str
        Of `solver_names()`.
    time_limit : float
        Seconds for each case.
    reorder : bool
    seed : int
    executor : concurrent.futures.Executor, optional
        That runs the cases: processes, a Dask or MPI cluster. By default one case after the
        other runs in this process. `seconds` are comparable where the cases have cores of
        their own.
    path : path, optional
        A file of JSON lines. Each finished row is appended and synced; a case whose row is
        there (same graph, budget in bytes, solver, order, seed, time limit and version) is
        not run again. Where a solver failed or lacks its extra, the case is tried anew.
    progress : callable, optional
        Called with the number of cases done, of all cases, and the row, as each is finished.

    Returns
    -------
    Comparison
        At the first Ctrl-C the finished rows; a second one raises KeyboardInterrupt.

    Raises
    ------
    InvalidBudgetError, InvalidOptionError, UnknownSolverError
        If an argument cannot be understood; nothing has run then.
    OSError
        If the path cannot be written.

    Examples
    --------
    >>> from scheduler.graph import Operation, Tensor
    >>> steps = [Operation("f", ["x"], ["y"], 1.0), Operation("g", ["y"], ["z"], 1.0)]
    >>> graph = Graph(steps, [Tensor("x", 4), Tensor("y", 4), Tensor("z", 4)], ["x"], ["z"], name="two steps")
    >>> for row in compare([graph], ["100%", 11], ["save-all", "ilp"]):
    ...     print(row.graph, row.budget, row.solver, row.status, row.overhead)
    two steps 100% save-all OPTIMAL 0.0
    two steps 100% ilp OPTIMAL 0.0
    two steps 11 save-all UNKNOWN None
    two steps 11 ilp INFEASIBLE None
    """
    check_options(time_limit, seed)
    cases = _cases(graphs, budgets, solvers, time_limit, reorder, seed)
    wanted = {case.row.key: case for case in cases}
    whole = Deadline(math.inf)
    with ExitStack() as stack:
        journal = None if path is None else stack.enter_context(Journal(path))
        found = {row.key: row for row in read_rows(path, journal.entries)} if journal is not None else {}
        waiting = [case for key, case in wanted.items() if key not in found]
        stack.enter_context(stopped_by_interrupt(whole))
        solved = stack.enter_context(closing(_solved(waiting, executor, whole)))
        for number, row in enumerate(solved, len(wanted) - len(waiting) + 1):
            found[row.key] = row
            if journal is not None and row.status not in (NOT_INSTALLED, FAILED):
                journal.append(asdict(row))
            if progress is not None:
                progress(number, len(wanted), row)
    answered = [case.row for case in cases if case.row.key in found]
    rows = [replace(found[asked.key], graph=asked.graph, budget=asked.budget) for asked in answered]
    return Comparison(tuple(rows), len(cases) - len(rows))


@dataclass(frozen=True)
class _Case:
    """A problem, and the row that waits for its answer: a plain value, that can travel to another process."""

    problem: Problem
    row: Row


def _cases(
    graphs: Sequence[Graph | Chain] | Mapping[str, Graph | Chain],
    budgets: Sequence[int | str],
    solvers: Sequence[str],
    time_limit: float,
    reorder: bool,
    seed: int,
) -> list[_Case]:
    for what, given in (("graphs", graphs), ("budgets", budgets), ("solvers", solvers)):
        if isinstance(given, str) or not isinstance(given, Collection) or not len(given):
            raise InvalidOptionError(f"{what} is a sequence of at least one, not {given!r:.80}")
    for solver in solvers:
        load_solver(solver)
    cases = []
    for name, graph_or_chain in graphs.items() if isinstance(graphs, Mapping) else _named(graphs):
        graph, chain = lower(graph_or_chain)
        anything = Problem(graph, 0, reorder, chain)
        for budget in budgets:
            problem = replace(anything, budget_bytes=parse_budget(budget, graph, baseline=anything.baseline))
            rows = [Row.asked(problem, str(name), str(budget), solver, time_limit, seed) for solver in solvers]
            cases += [_Case(problem, row) for row in rows]
    return cases


def _named(graphs: Iterable[Graph | Chain]) -> Iterator[tuple[str, Graph | Chain]]:
    for number, graph_or_chain in enumerate(graphs, 1):
        yield lower(graph_or_chain)[0].name or f"graph {number}", graph_or_chain


def _solved(cases: Sequence[_Case], executor: Executor | None, whole: Deadline) -> Generator[Row, None, None]:
    """Yield rows as they are finished, until the deadline is stopped."""
    if executor is not None:
        yield from _solved_elsewhere(cases, executor, whole)
        return
    for case in cases:
        row = _solve(case, whole)
        if whole.stopped:  # cut short: this is not the solver's answer
            return
        yield row


def _solved_elsewhere(cases: Sequence[_Case], executor: Executor, whole: Deadline) -> Iterator[Row]:
    waiting: set[Future[Row]] = {executor.submit(_solve, case) for case in cases}
    try:
        while waiting and not whole.stopped:
            done, waiting = wait(waiting, _SECONDS_BETWEEN_LOOKS, FIRST_COMPLETED)
            for future in done:
                if not whole.stopped or future.exception() is None:
                    yield future.result()
    finally:
        for future in waiting:
            future.cancel()


def _solve(case: _Case, whole: Deadline | None = None) -> Row:
    """Run one case; whatever the solver raises is told in its row, so that the other cases go on."""
    problem, asked = case.problem, case.row
    _make_ready(asked.solver)
    started = clock.now()
    deadline = Deadline(math.inf if asked.time_limit is None else asked.time_limit, whole)
    try:
        proposal = load_solver(asked.solver)(problem, deadline=deadline, seed=asked.seed)
        seconds = clock.now() - started
        proposal = with_bounds(problem, proposal, deadline)
        solution = grade(problem, proposal, solver=asked.solver, seconds=seconds)
        return asked.answered(solution)
    except UnsuitableProblemError as error:
        status, reason = UNSUITABLE, str(error)
    except MissingExtraError as error:
        status, reason = NOT_INSTALLED, str(error)
    except Exception as error:
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    return asked.unanswered(status, reason, clock.now() - started)


@cache
def _make_ready(solver: str) -> None:
    """Let a solver import and compile what it needs, once per process, before any clock runs."""
    for graph_or_chain in (uniform_chain(2), random_layered(8)):
        graph, chain = lower(graph_or_chain)
        problem = Problem(graph, 0, chain=chain)
        problem = replace(problem, budget_bytes=problem.baseline.peak_bytes - 1)
        with suppress(Exception):  # its rows will tell
            load_solver(solver)(problem, deadline=Deadline(1.0), seed=0)
