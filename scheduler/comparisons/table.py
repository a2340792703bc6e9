"""Comparisons: the answers of several solvers on several graphs and budgets, as a table."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import distributions
from typing import TYPE_CHECKING, Any, get_type_hints

from scheduler.api import lower
from scheduler.comparisons.journal import read_entries
from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.files import write_text
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.planning.frontiers import Frontier
from scheduler.problem import Problem
from scheduler.solution import Solution, Status
from scheduler.units import format_percent, html_table, text_table

if TYPE_CHECKING:
    import pandas

UNSUITABLE, NOT_INSTALLED, FAILED = "unsuitable", "not installed", "failed"
"""The status of a row whose solver gave no answer. Its `reason` says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case of a comparison: a graph, a budget and a solver, with the answer.

    Attributes
    ----------
    graph, graph_digest : str
        Name and digest of the graph or chain.
    operations, resident_bytes : int
    time_unit : str
        Unit of all times but `seconds` and `time_limit`.
    baseline_time, baseline_peak_bytes : float, int
        Time and peak of the save-everything schedule.
    budget : str
        The budget as it was given.
    budget_bytes : int
    solver : str
    reorder : bool
    seed : int
    stop_gap : float
        The gap at which the solver may stop; 0 if it searches on.
    time_limit : float or None
        Seconds; None without a limit.
    version : str
        Version of this package.
    status : str
        Name of a `Status`; or "unsuitable" if the solver does not solve such problems,
        "not installed" if it needs an extra, "failed" if it raised an error.
    reason : str
        Messages of the solver, or the error.
    search_space : str
    time, overhead : float or None
        Of the schedule; None without one.
    peak_bytes : int or None
    bound, global_bound, gap, global_gap : float or None
        As in `Solution`; None if the solver gave no answer.
    seconds : float
        Time that the solver took. Bounds that `ilp` proves for a solver without bounds of
        its own come on top.
    machine : str
        Machine that the case ran on.
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
    reorder: bool
    seed: int
    stop_gap: float
    time_limit: float | None
    version: str
    status: str = ""
    reason: str = ""
    search_space: str = ""
    time: float | None = None
    overhead: float | None = None
    peak_bytes: int | None = None
    bound: float | None = None
    global_bound: float | None = None
    gap: float | None = None
    global_gap: float | None = None
    seconds: float = 0.0
    machine: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """The values that identify a case, and with it the answer."""
        return (
            self.graph_digest,
            self.budget_bytes,
            self.solver,
            self.reorder,
            self.seed,
            self.stop_gap,
            self.time_limit,
            self.version,
        )

    @staticmethod
    def asked(problem: Problem, name: str, budget: str, solver: str, time_limit: float, seed: int) -> Row:
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
            reorder=problem.reorder,
            seed=seed,
            stop_gap=float(problem.gap),
            time_limit=_finite(time_limit),
            version=_version(),
        )

    def answered(self, solution: Solution) -> Row:
        """Return the row with the solver's answer."""
        return replace(
            self,
            status=solution.status.name,
            reason="; ".join(solution.messages),
            search_space=solution.search_space,
            time=_finite(solution.time),
            overhead=_finite(solution.overhead),
            peak_bytes=solution.peak_bytes,
            bound=_finite(solution.bound),
            global_bound=_finite(solution.global_bound),
            gap=solution.gap,
            global_gap=solution.global_gap,
            seconds=solution.solve_seconds,
            machine=_machine(),
        )

    def unanswered(self, status: str, reason: str, seconds: float) -> Row:
        """Return the row with the reason why the solver gave no answer."""
        return replace(self, status=status, reason=reason, seconds=seconds, machine=_machine())

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Row:
        """Return the row with these fields, as written by `dataclasses.asdict`.

        Raises
        ------
        InvalidOptionError
            If a field is missing, unknown or of the wrong type.
        """
        kinds = get_type_hints(Row)
        wrong = sorted(kinds.keys() ^ data.keys()) or [
            name for name in kinds if not isinstance(data[name], kinds[name])
        ]
        if wrong:
            raise InvalidOptionError(f"not a row of a comparison: wrong fields {', '.join(map(repr, wrong))}")
        return Row(**data)


@dataclass(frozen=True, repr=False)
class Comparison:
    """A table of cases.

    Attributes
    ----------
    rows : tuple of Row
        By graph, then budget, then solver, in the order given to `compare`.
    missing : int
        Number of cases that did not run because of Ctrl-C.
    """

    rows: tuple[Row, ...]
    missing: int = 0

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        graphs = len({row.graph_digest for row in self.rows})
        solvers = len({row.solver for row in self.rows})
        return f"Comparison({len(self)} rows, graphs={graphs}, solvers={solvers}, missing={self.missing})"

    def summary(self) -> str:
        """Return the overheads as text; see `to_markdown`."""
        return text_table(self._overheads())

    def _repr_html_(self) -> str:
        return html_table(self._overheads())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Comparison:
        """Read the rows that `compare` wrote to a path, in the order in which they were finished.

        Raises
        ------
        OSError
            If the file cannot be read.
        InvalidOptionError
            If it is not a file of rows.
        """
        return Comparison(tuple(read_rows(path, read_entries(path).values)))

    @staticmethod
    def of_frontier(
        frontier: Frontier,
        graph_or_chain: Graph | Chain,
        *,
        time_limit: float = 60.0,
        gap: float = 0.0,
        reorder: bool = True,
        seed: int = 0,
        name: str | None = None,
    ) -> Comparison:
        """Return a frontier as a table.

        Parameters
        ----------
        frontier : Frontier
        graph_or_chain, time_limit, gap, reorder, seed
            The arguments of `frontier`.
        name : str, optional
            Name to show instead of the graph's own.
        """
        graph, chain = lower(graph_or_chain)
        rows = []
        for solution in frontier:
            problem = Problem(graph, solution.budget_bytes, reorder, chain, gap=gap)
            budget = str(solution.budget_bytes)
            asked = Row.asked(problem, graph.name if name is None else name, budget, solution.solver, time_limit, seed)
            rows.append(asked.answered(solution))
        return Comparison(tuple(rows))

    def to_dicts(self) -> list[dict[str, object]]:
        """Return each row as plain data, ready for JSON."""
        return [asdict(row) for row in self.rows]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table as CSV with a header; None is an empty cell.

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

        A star marks a proof: no schedule in the solver's search space is faster or, next to a
        dash, none fits. A dash alone means that no schedule was found, and an empty cell that
        the solver does not solve such problems. The last column is the smallest overhead that
        any schedule can have, as proven at this budget or a larger one, or a dash if none fits.

        Raises
        ------
        OSError
            If the path cannot be written; an existing file is left as it was.
        """
        header, *lines = ([cell.replace("|", "\\|") for cell in line] for line in self._overheads())
        table = [header, ["---"] * len(header), *lines]
        write_text(path, "".join(f"| {' | '.join(line)} |\n" for line in table))

    def _overheads(self) -> list[list[str]]:
        """Return the cells of the table of overheads, its header first; see `to_markdown`."""
        solvers = list(dict.fromkeys(row.solver for row in self.rows))
        cases: dict[tuple[str, str, str], dict[str, Row]] = {}
        for row in self.rows:
            cases.setdefault((row.graph, row.graph_digest, row.budget), {})[row.solver] = row
        lines = [["graph", "budget", *solvers, "bound"]]
        for (graph, digest, budget), by_solver in cases.items():
            least = min(row.budget_bytes for row in by_solver.values())
            above = [row for row in self.rows if row.graph_digest == digest and row.budget_bytes >= least]
            cells = [_cell(by_solver[solver]) if solver in by_solver else "" for solver in solvers]
            lines.append([graph, budget, *cells, _proven(above)])
        return lines

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


def read_rows(path: str | os.PathLike[str] | None, entries: Iterable[dict[str, object]]) -> Iterator[Row]:
    """Yield the rows in the entries of a journal; an error names the path and the line."""
    for number, entry in enumerate(entries, 1):
        try:
            yield Row.from_dict(entry)
        except InvalidOptionError as error:
            raise InvalidOptionError(f"{path}, line {number}: {error}; give another path") from error


def _cell(row: Row) -> str:
    """Return the cell of a row in the table of overheads."""
    if row.status not in Status.__members__:
        return "" if row.status == UNSUITABLE else row.status
    proven = row.status in (Status.OPTIMAL.name, Status.INFEASIBLE.name)
    return ("-" if row.overhead is None else format_percent(row.overhead)) + "*" * proven


def _proven(rows: Iterable[Row]) -> str:
    """Return the highest lower bound over all schedules as an overhead, or a dash if no schedule exists."""
    if any(row.status == Status.INFEASIBLE.name for row in rows):
        return "-"
    bounds = [row.global_bound / row.baseline_time - 1 for row in rows if row.global_bound and row.baseline_time]
    return format_percent(max(bounds)) if bounds else ""


@cache
def _version() -> str:
    return next((found.version for found in distributions(name="checkpoint-scheduler")), "unknown")


def _machine() -> str:
    return f"{platform.node()}: {platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
