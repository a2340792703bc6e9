"""Comparisons: every solver on every graph and budget, under one judge, in one table."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any, get_type_hints

from scheduler.api import check_options, lower, with_bounds
from scheduler.errors import InvalidOptionError, MissingExtraError, UnsuitableProblemError
from scheduler.formats import write_text
from scheduler.graph import Graph
from scheduler.journal import Journal, read_entries
from scheduler.layers import Chain
from scheduler.pareto import Frontier
from scheduler.problem import Order, Problem, parse_budget
from scheduler.solution import Solution, Status, judge
from scheduler.solvers import clock
from scheduler.solvers.registry import Deadline, load_solver, stopped_by_interrupt
from scheduler.zoo import random_layered, uniform_chain

if TYPE_CHECKING:
    import pandas

UNSUITABLE, NOT_INSTALLED, FAILED = "unsuitable", "not installed", "failed"
"""What a row says, beside the members of `Status`, where the solver gave no answer; `reason` says why."""

_SECONDS_BETWEEN_LOOKS = 0.2
"""At Ctrl-C, while other processes work."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a comparison and what came of it.

    Attributes
    ----------
    graph, graph_digest : str
        Name, and the digest of the graph or chain.
    operations, resident_bytes : int
    time_unit : str
        Of all times but `seconds` and `time_limit`.
    baseline_time, baseline_peak_bytes : float, int
        Of the save-everything schedule.
    budget : str
        As it was asked for.
    budget_bytes : int
    solver, order : str
    seed : int
    time_limit : float or None
        Seconds; None for none.
    version : str
        Of this package.
    status : str
        The name of a `Status`, or "unsuitable" if the solver does not serve such a graph,
        "not installed" if it needs an extra, "failed" if it raised an error.
    reason : str
        What the solver has to say; empty if nothing.
    search_space : str
    time, overhead : float or None
        Of the schedule; None without one.
    peak_bytes : int or None
    bound, bound_any, gap, gap_any : float or None
        As in `Solution`; None if the solver gave no answer.
    seconds : float
        That the solver took; `cuts` proves the bounds of one that brings none, after that.
    machine : str
        That it ran on.
    """

    graph: str
    graph_digest: str
    operations: int
    resident_bytes: int
    time_unit: str
    baseline_time: float
    baseline_peak_bytes: int
    budget: str
    budget_bytes: int
    solver: str
    order: str
    seed: int
    time_limit: float | None
    version: str
    status: str = ""
    reason: str = ""
    search_space: str = ""
    time: float | None = None
    overhead: float | None = None
    peak_bytes: int | None = None
    bound: float | None = None
    bound_any: float | None = None
    gap: float | None = None
    gap_any: float | None = None
    seconds: float = 0.0
    machine: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells this case from every other; two rows of one key would say the same."""
        return (
            self.graph_digest,
            self.budget_bytes,
            self.solver,
            self.order,
            self.seed,
            self.time_limit,
            self.version,
        )

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Row:
        """Return the row that `dataclasses.asdict` wrote.

        Raises
        ------
        InvalidOptionError
            If it is no such row.
        """
        kinds = get_type_hints(Row)
        wrong = sorted(kinds.keys() ^ data.keys()) or [
            name for name in kinds if not isinstance(data[name], kinds[name])
        ]
        if wrong:
            raise InvalidOptionError(f"not a row of a comparison: see {', '.join(map(repr, wrong))}")
        return Row(**data)


@dataclass(frozen=True)
class Comparison:
    """A table of cases.

    Attributes
    ----------
    rows : tuple of Row
        By graph, then budget, then solver, as they were asked for.
    missing : int
        Cases that Ctrl-C left out.
    """

    rows: tuple[Row, ...]
    missing: int = 0

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparison:
        """Read the rows that `compare` wrote to a path, in the order in which they were finished.

        Raises
        ------
        OSError
            If the file cannot be read.
        InvalidOptionError
            If it holds something else.
        """
        return Comparison(tuple(_rows(path, read_entries(path).values)))

    @staticmethod
    def of_frontier(
        frontier: Frontier,
        graph_or_chain: Graph | Chain,
        *,
        time_limit: float = 60.0,
        order: Order = "any",
        seed: int = 0,
        name: str | None = None,
    ) -> Comparison:
        """Return a frontier as a table.

        Parameters
        ----------
        frontier : Frontier
        graph_or_chain, time_limit, order, seed
            That the frontier was asked for with.
        name : str, optional
            Of the graph, instead of its own.
        """
        graph, chain = lower(graph_or_chain)
        rows = []
        for solution in frontier:
            problem = Problem(graph, solution.budget_bytes, order, chain)
            budget = str(solution.budget_bytes)
            asked = _asked(problem, graph.name if name is None else name, budget, solution.solver, time_limit, seed)
            rows.append(_answered(asked, solution))
        return Comparison(tuple(rows))

    def to_dicts(self) -> list[dict[str, object]]:
        """Return each row as plain data, ready for JSON."""
        return [asdict(row) for row in self.rows]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table as CSV with a head; what is None is left empty.

        Raises
        ------
        OSError
            If the path cannot be written; an existing file is left as it was.
        """
        text = io.StringIO()
        table = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(self.to_dicts())
        write_text(path, text.getvalue())

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write the table as a JSON list of objects.

        Raises
        ------
        OSError
            If the path cannot be written; an existing file is left as it was.
        """
        write_text(path, json.dumps(self.to_dicts(), indent=1, allow_nan=False) + "\n")

    def to_markdown(self, path: str | os.PathLike[str]) -> None:
        """Write the overheads as a Markdown table: a line per graph and budget, a column per solver.

        A star marks what is proven: that no schedule in the solver's search space is faster or,
        at a dash, that none fits. A dash alone says that no schedule was found, an empty cell
        that the solver does not serve such a graph. The last column is the least overhead that
        any schedule has, as proven at this budget or a larger one, or a dash if none fits.

        Raises
        ------
        OSError
            If the path cannot be written; an existing file is left as it was.
        """
        solvers = list(dict.fromkeys(row.solver for row in self.rows))
        cases: dict[tuple[str, str, str], dict[str, Row]] = {}
        for row in self.rows:
            cases.setdefault((row.graph, row.graph_digest, row.budget), {})[row.solver] = row
        lines = [["graph", "budget", *solvers, "bound"], ["---"] * (len(solvers) + 3)]
        for (graph, digest, budget), by_solver in cases.items():
            least = min(row.budget_bytes for row in by_solver.values())
            above = [row for row in self.rows if row.graph_digest == digest and row.budget_bytes >= least]
            cells = [_cell(by_solver[solver]) if solver in by_solver else "" for solver in solvers]
            lines.append([graph.replace("|", "\\|"), budget, *cells, _proven(above)])
        write_text(path, "".join(f"| {' | '.join(line)} |\n" for line in lines))

    def to_pandas(self) -> pandas.DataFrame:
        """Return the table as a data frame, one column per attribute of `Row`.

        Raises
        ------
        MissingExtraError
            If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError(
                'a data frame needs pandas: pip install "checkpoint-scheduler[tables]", or use to_csv'
            ) from error
        return pandas.DataFrame(self.to_dicts(), columns=[field.name for field in fields(Row)])


def compare(
    graphs: Sequence[Graph | Chain] | Mapping[str, Graph | Chain],
    budgets: Sequence[int | str],
    solvers: Sequence[str],
    *,
    time_limit: float = 60.0,
    order: Order = "any",
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
    order : "any" or "given"
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
    >>> for row in compare([graph], ["100%", 11], ["save-all", "cuts"]):
    ...     print(row.graph, row.budget, row.solver, row.status, row.overhead)
    two steps 100% save-all OPTIMAL 0.0
    two steps 100% cuts OPTIMAL 0.0
    two steps 11 save-all UNKNOWN None
    two steps 11 cuts INFEASIBLE None
    """
    check_options(time_limit, seed)
    cases = _cases(graphs, budgets, solvers, time_limit, order, seed)
    wanted = {case.row.key: case for case in cases}
    whole = Deadline(math.inf)
    with ExitStack() as stack:
        journal = None if path is None else stack.enter_context(Journal(path))
        found = {row.key: row for row in _rows(path, journal.entries)} if journal is not None else {}
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
    order: Order,
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
        anything = Problem(graph, 0, order, chain)
        for budget in budgets:
            problem = replace(anything, budget_bytes=parse_budget(budget, graph, baseline=anything.baseline))
            rows = [_asked(problem, str(name), str(budget), solver, time_limit, seed) for solver in solvers]
            cases += [_Case(problem, row) for row in rows]
    return cases


def _named(graphs: Iterable[Graph | Chain]) -> Iterator[tuple[str, Graph | Chain]]:
    for number, graph_or_chain in enumerate(graphs, 1):
        yield lower(graph_or_chain)[0].name or f"graph {number}", graph_or_chain


def _rows(path: str | os.PathLike[str] | None, entries: Iterable[dict[str, object]]) -> Iterator[Row]:
    for number, entry in enumerate(entries, 1):
        try:
            yield Row.from_dict(entry)
        except InvalidOptionError as error:
            raise InvalidOptionError(f"{path}, line {number}: {error}; give another path") from error


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
        solution = judge(problem, proposal, solver=asked.solver, seconds=seconds)
        return _answered(asked, solution)
    except UnsuitableProblemError as error:
        status, reason = UNSUITABLE, str(error)
    except MissingExtraError as error:
        status, reason = NOT_INSTALLED, str(error)
    except Exception as error:
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    return replace(asked, status=status, reason=reason, seconds=clock.now() - started, machine=_machine())


@cache
def _make_ready(solver: str) -> None:
    """Let a solver import and compile what it needs, once per process, before any clock runs."""
    for graph_or_chain in (uniform_chain(2), random_layered(8)):
        graph, chain = lower(graph_or_chain)
        problem = Problem(graph, 0, "any", chain)
        problem = replace(problem, budget_bytes=problem.baseline.peak_bytes - 1)
        with suppress(Exception):  # its rows will tell
            load_solver(solver)(problem, deadline=Deadline(1.0), seed=0)


def _asked(problem: Problem, name: str, budget: str, solver: str, time_limit: float, seed: int) -> Row:
    """Return the row of a case that has not run."""
    graph = problem.graph
    return Row(
        graph=name,
        graph_digest=(problem.chain or graph).digest,
        operations=len(graph.operations),
        resident_bytes=graph.resident_bytes,
        time_unit=graph.time_unit,
        baseline_time=problem.baseline.time,
        baseline_peak_bytes=problem.baseline.peak_bytes,
        budget=budget,
        budget_bytes=problem.budget_bytes,
        solver=solver,
        order=problem.order,
        seed=seed,
        time_limit=_finite(time_limit),
        version=_version(),
    )


def _answered(asked: Row, solution: Solution) -> Row:
    return replace(
        asked,
        status=solution.status.name,
        reason="; ".join(solution.messages),
        search_space=solution.search_space,
        time=_finite(solution.time),
        overhead=_finite(solution.overhead),
        peak_bytes=solution.peak_bytes,
        bound=_finite(solution.bound),
        bound_any=_finite(solution.bound_any),
        gap=solution.gap,
        gap_any=solution.gap_any,
        seconds=solution.solve_seconds,
        machine=_machine(),
    )


def _cell(row: Row) -> str:
    """Return what a row says in the Markdown table."""
    if row.status not in Status.__members__:
        return "" if row.status == UNSUITABLE else row.status
    proven = row.status in (Status.OPTIMAL.name, Status.INFEASIBLE.name)
    return ("-" if row.overhead is None else f"{row.overhead:.2%}") + "*" * proven


def _proven(rows: Iterable[Row]) -> str:
    """Return the highest lower bound over all schedules, as an overhead, or that there are none."""
    if any(row.status == Status.INFEASIBLE.name for row in rows):
        return "-"
    bounds = [row.bound_any / row.baseline_time - 1 for row in rows if row.bound_any and row.baseline_time]
    return f"{max(bounds):.2%}" if bounds else ""


@cache
def _version() -> str:
    return next((found.version for found in distributions(name="checkpoint-scheduler")), "unknown")


def _machine() -> str:
    return f"{platform.node()}: {platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
