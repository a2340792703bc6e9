"""What `solve` answers at small budgets on steps of small models, and how small a budget can be.

    python tests/benchmarks/small_budgets.py [NAME ...] > tests/benchmarks/small_budgets.csv

The graphs are those of `small_steps.py`; their costs were measured. For each, `minimum_budget` has
60 s. Then `auto` has 20 s for each of five budgets: 60 %, 40 % and 35 % of what the save-everything
step adds to the resident tensors, and the smallest peak found plus 5 % and 10 % of that amount
("smallest + 5 %"). Percents of time are of the save-everything step; "gap" is over all orders.
In a row "smallest", "gap" is the distance from the proven floor to the smallest known peak, and
"smallest" that peak, both in percent of what the save-everything step adds.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Iterator

import scheduler as sc
from scheduler.problem import Problem
from tests.benchmarks.small_steps import CATALOG, MODELS, read

SHARES = (60, 40, 35)
ABOVE_SMALLEST = (10, 5)
SECONDS, SMALLEST_SECONDS = 20.0, 60.0
HEAD = ("model", "operations", "budget", "smallest", "time lost", "gap", "status", "seconds", "processor seconds")


def rows(name: str) -> Iterator[tuple[object, ...]]:
    """Yield the rows of a model, the largest budget first."""
    graph = read(name)
    operations = len(graph.operations)
    added = Problem(graph, 0).baseline.peak_bytes - graph.resident_bytes
    started, processor = time.perf_counter(), time.process_time()
    smallest, floor, _ = sc.minimum_budget(graph, time_limit=SMALLEST_SECONDS)
    yield (
        name, operations, "smallest", f"{(smallest - graph.resident_bytes) / added:.1%}", "",
        f"{(smallest - floor) / added:.1%}",
        "", f"{time.perf_counter() - started:.1f}", f"{time.process_time() - processor:.1f}",
    )  # fmt: skip
    budgets: list[tuple[str, int | str]] = [(f"{share} %", f"{share}%") for share in SHARES]
    budgets += [(f"smallest + {share} %", smallest + added * share // 100) for share in ABOVE_SMALLEST]
    for label, budget in budgets:
        processor = time.process_time()
        solution = sc.solve(graph, budget, time_limit=SECONDS)
        lost = "" if solution.schedule is None else f"{solution.overhead:.3%}"
        gap = "" if solution.schedule is None else f"{solution.global_gap:.3%}"
        yield (
            name, operations, label, "", lost, gap, solution.status.name,
            f"{solution.solve_seconds:.1f}", f"{time.process_time() - processor:.1f}",
        )  # fmt: skip


def main() -> None:
    # What is compiled on first use is compiled before any clock runs.
    sc.solve(sc.zoo.random_layered(60), "70%", solver="anneal", time_limit=1)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(HEAD)
    for name in sys.argv[1:] or (*MODELS, *CATALOG):
        for row in rows(name):
            table.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
