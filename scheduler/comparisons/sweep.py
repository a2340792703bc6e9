"""Compare solvers: run each of them on all graphs and budgets, and simulate every answer."""

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
from scheduler.problem import Problem, read_budget
from scheduler.solution import grade
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.solvers.smallest_peak import with_budget
from scheduler.zoo import random_layered, uniform_chain

_POLL_SECONDS = 0.2
"""How often to check for Ctrl-C while other processes work."""


def compare(
    graphs: Sequence[Graph | Chain] | Mapping[str, Graph | Chain],
    budgets: Sequence[int | str],
    solvers: Sequence[str],
    *,
    time_limit: float = 60.0,
    gap: float = 0.0,
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
        The keys of a mapping name the graphs; otherwise their own names do.
    budgets : sequence of int or str
        As for `solve`. For "min", a solver gets the bytes, but not the schedule that fits.
    solvers : sequence of str
        Names from `solver_names()`.
    time_limit : float
        Seconds for each case.
    gap, reorder, seed
        As for `solve`.
    executor : concurrent.futures.Executor, optional
        Runs the cases, for example in processes or on a Dask or MPI cluster. By default they
        run in this process, one after the other. Solve times are comparable only if each
        case has a core of its own.
    path : path, optional
        A file of JSON lines, to which each finished row is appended and synced. A case that
        it already holds (same graph, budget in bytes, solver, order, seed, time limit and
        version) is not run again, unless its solver failed or was not installed.
    progress : callable, optional
        Called after each case with the number of finished cases, the number of all cases,
        and the row.

    Returns
    -------
    Comparison
        After the first Ctrl-C only the finished rows; a second one raises KeyboardInterrupt.

    Raises
    ------
    InvalidBudgetError, InvalidOptionError, UnknownSolverError
        If an argument is invalid; no case has run then.
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
    problems = _problems(graphs, budgets, solvers, gap, reorder)
    whole = Deadline(math.inf)
    with ExitStack() as stack:
        journal = None if path is None else stack.enter_context(Journal(path))
        found = {} if journal is None else {row.key: row for row in read_rows(path, journal.entries)}
        stack.enter_context(stopped_by_interrupt(whole))
        cases = _cases(problems, budgets, solvers, time_limit, seed, found.values(), whole)
        _run(cases, found, executor, whole, journal, progress)
    finished = [case.row for case in cases if case.row.key in found]
    rows = [replace(found[row.key], graph=row.graph, budget=row.budget) for row in finished]
    return Comparison(tuple(rows), len(cases) - len(rows))


@dataclass(frozen=True)
class _Case:
    """A problem and its row without an answer; both can be sent to another process."""

    problem: Problem
    row: Row


def _problems(
    graphs: Sequence[Graph | Chain] | Mapping[str, Graph | Chain],
    budgets: Sequence[int | str],
    solvers: Sequence[str],
    gap: float,
    reorder: bool,
) -> list[tuple[str, Problem]]:
    """Return each graph as a problem without a budget, with its name, after a check of all arguments."""
    for what, given in (("graphs", graphs), ("budgets", budgets), ("solvers", solvers)):
        if isinstance(given, str) or not isinstance(given, Collection) or not len(given):
            raise InvalidOptionError(f"{what} must be a sequence of at least one, got {given!r:.80}")
    for solver in solvers:
        load_solver(solver)
    for budget in budgets:
        read_budget(budget).resolve(0, 0, lambda: 0)
    named = graphs.items() if isinstance(graphs, Mapping) else _named(graphs)
    lowered = [(str(name), lower(graph_or_chain)) for name, graph_or_chain in named]
    return [(name, Problem(graph, 0, reorder, chain, gap=gap)) for name, (graph, chain) in lowered]


def _cases(
    problems: Sequence[tuple[str, Problem]],
    budgets: Sequence[int | str],
    solvers: Sequence[str],
    time_limit: float,
    seed: int,
    finished: Iterable[Row],
    whole: Deadline,
) -> list[_Case]:
    known = {(row.graph_digest, row.budget, row.reorder, row.time_limit): row.budget_bytes for row in finished}
    cases = []
    for name, without_budget in problems:
        digest = (without_budget.chain or without_budget.graph).digest
        for budget in budgets:
            # The smallest known peak must be the same when a comparison is resumed.
            earlier = known.get((digest, str(budget), without_budget.reorder, time_limit))
            given = budget if earlier is None else earlier
            problem = with_budget(without_budget, given, Deadline(time_limit, whole)).changed(starts=())
            rows = [Row.asked(problem, name, str(budget), solver, time_limit, seed) for solver in solvers]
            cases += [_Case(problem, row) for row in rows]
    return cases


def _named(graphs: Iterable[Graph | Chain]) -> Iterator[tuple[str, Graph | Chain]]:
    for number, graph_or_chain in enumerate(graphs, 1):
        yield lower(graph_or_chain)[0].name or f"graph {number}", graph_or_chain


def _run(
    cases: Sequence[_Case],
    found: dict[tuple[object, ...], Row],
    executor: Executor | None,
    whole: Deadline,
    journal: Journal | None,
    progress: Callable[[int, int, Row], None] | None,
) -> None:
    """Run all cases that are not in `found`, equal ones only once, and add their rows to it."""
    by_key = {case.row.key: case for case in cases}
    waiting = [case for key, case in by_key.items() if key not in found]
    with closing(_rows(waiting, executor, whole)) as rows:
        for number, row in enumerate(rows, len(by_key) - len(waiting) + 1):
            found[row.key] = row
            if journal is not None and row.status not in (NOT_INSTALLED, FAILED):
                journal.append(asdict(row))
            if progress is not None:
                progress(number, len(by_key), row)


def _rows(cases: Sequence[_Case], executor: Executor | None, whole: Deadline) -> Generator[Row, None, None]:
    """Yield the row of each case when it is finished, until the deadline is stopped."""
    if executor is not None:
        yield from _rows_from_executor(cases, executor, whole)
        return
    for case in cases:
        row = _solve(case, whole)
        if whole.stopped:  # the search was cut short, so this is not the solver's answer
            return
        yield row


def _rows_from_executor(cases: Sequence[_Case], executor: Executor, whole: Deadline) -> Iterator[Row]:
    waiting: set[Future[Row]] = {executor.submit(_solve, case) for case in cases}
    try:
        while waiting and not whole.stopped:
            done, waiting = wait(waiting, _POLL_SECONDS, FIRST_COMPLETED)
            for future in done:
                if not whole.stopped or future.exception() is None:
                    yield future.result()
    finally:
        for future in waiting:
            future.cancel()


def _solve(case: _Case, whole: Deadline | None = None) -> Row:
    """Run one case and return its row, which also reports any error, so that the other cases go on."""
    problem, asked = case.problem, case.row
    _warm_up(asked.solver)
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
def _warm_up(solver: str) -> None:
    """Let a solver import and compile its code, once per process, before its time is measured."""
    for graph_or_chain in (uniform_chain(2), random_layered(8)):
        graph, chain = lower(graph_or_chain)
        problem = Problem(graph, 0, chain=chain)
        problem = problem.changed(budget_bytes=problem.baseline.peak_bytes - 1)
        with suppress(Exception):  # its rows will report it
            load_solver(solver)(problem, deadline=Deadline(1.0), seed=0)
