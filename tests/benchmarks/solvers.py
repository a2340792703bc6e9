"""Every solver on every graph of a folder, and on generated ones: time lost, bound, seconds.

    python tests/benchmarks/solvers.py FOLDER > tests/benchmarks/solvers.csv

Each solver has `SECONDS` for an answer, bounds included, on two cores. Times lost and bounds are
in per cent of the save-everything time; a solver that does not serve a graph has no row.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import scheduler as sc
from scheduler.errors import SchedulerError
from scheduler.problem import Problem

SECONDS = 20.0
BUDGETS = ("90%", "80%", "70%", "60%", "50%")
HEAD = ("graph", "operations", "budget", "solver", "status", "search space", "lost %", "bound %", "any %", "seconds")


def graphs(folder: Path) -> Iterator[sc.Graph]:
    """The graphs of the folder that can be read, and generated ones."""
    for path in sorted(folder.iterdir()):
        try:
            yield sc.read_graph(path)
        except SchedulerError as error:
            print(f"left out: {error}", file=sys.stderr)
    for operations in (250, 500, 1000):
        yield sc.zoo.random_layered(operations, seed=1)


def row(graph: sc.Graph, budget: str, solver: str) -> tuple[object, ...] | None:
    """One line of the table; None if the solver does not serve such graphs."""
    try:
        solution = sc.solve(graph, budget, solver=solver, time_limit=SECONDS)
    except SchedulerError:
        return None
    percent = [f"{100 * (time / solution.baseline_time - 1):.3f}" for time in (solution.bound, solution.bound_any)]
    lost = f"{100 * solution.overhead:.3f}" if solution.schedule else ""
    return (
        graph.name, len(graph.operations), budget, solver, solution.status.name, solution.search_space,
        lost, *percent, f"{solution.solve_seconds:.1f}",
    )  # fmt: skip


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEAD)
    for graph in graphs(Path(sys.argv[1])):
        print(f"{graph.name}: peak {Problem(graph, 0).baseline.peak_bytes}", file=sys.stderr)
        for budget in BUDGETS:
            for solver in sc.solver_names():
                line = row(graph, budget, solver)
                if line is not None:
                    writer.writerow(line)
                    sys.stdout.flush()
