"""Comparisons: what solvers found on graphs and budgets, in one table."""

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

if TYPE_CHECKING:
    import pandas

UNSUITABLE, NOT_INSTALLED, FAILED = "unsuitable", "not installed", "failed"
"""What a row says, beside the members of `Status`, where the solver gave no answer; `reason` says why."""


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
    solver : str
    reorder : bool
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
    bound, global_bound, gap, global_gap : float or None
        As in `Solution`; None if the solver gave no answer.
    seconds : float
        That the solver took; `ilp` proves the bounds of one that brings none, after that.
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
    reorder: bool
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
    global_bound: float | None = None
    gap: float | None = None
    global_gap: float | None = None
    seconds: float = 0.0
    machine: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """What tells this case from every other; two rows of one key would say the same."""
        return (
            self.graph_digest,
            self.budget_bytes,
            self.solver,
            self.reorder,
            self.seed,
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
            time_limit=_finite(time_limit),
            version=_version(),
        )

    def answered(self, solution: Solution) -> Row:
        """Return the row with what the solver found."""
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
        """Return the row with why the solver gave no answer, after some seconds."""
        return replace(self, status=status, reason=reason, seconds=seconds, machine=_machine())

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
        return Comparison(tuple(read_rows(path, read_entries(path).values)))

    @staticmethod
    def of_frontier(
        frontier: Frontier,
        graph_or_chain: Graph | Chain,
        *,
        time_limit: float = 60.0,
        reorder: bool = True,
        seed: int = 0,
        name: str | None = None,
    ) -> Comparison:
        """Return a frontier as a table.

        Parameters
        ----------
        frontier : Frontier
        graph_or_chain, time_limit, reorder, seed
            That the frontier was asked for with.
        name : str, optional
            Of the graph, instead of its own.
        """
        graph, chain = lower(graph_or_chain)
        rows = []
        for solution in frontier:
            problem = Problem(graph, solution.budget_bytes, reorder, chain)
            budget = str(solution.budget_bytes)
            asked = Row.asked(problem, graph.name if name is None else name, budget, solution.solver, time_limit, seed)
            rows.append(asked.answered(solution))
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


def read_rows(path: str | os.PathLike[str] | None, entries: Iterable[dict[str, object]]) -> Iterator[Row]:
    """Yield the rows that were written as JSON objects; an error names the path and the line."""
    for number, entry in enumerate(entries, 1):
        try:
            yield Row.from_dict(entry)
        except InvalidOptionError as error:
            raise InvalidOptionError(f"{path}, line {number}: {error}; give another path") from error


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
    bounds = [row.global_bound / row.baseline_time - 1 for row in rows if row.global_bound and row.baseline_time]
    return f"{max(bounds):.2%}" if bounds else ""


@cache
def _version() -> str:
    return next((found.version for found in distributions(name="checkpoint-scheduler")), "unknown")


def _machine() -> str:
    return f"{platform.node()}: {platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
