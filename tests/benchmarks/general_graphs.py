"""What `auto` answers on published and generated general graphs, with its proof, in the time stated.

    python tests/benchmarks/general_graphs.py FOLDER > tests/benchmarks/general_graphs.csv

A second argument keeps to the graphs and budgets whose names begin with it ("cg_resnet50 30").
FOLDER holds the published graphs under the names in `CASES`; the page measured_schedules.md says where each comes from.
Percents are of the save-everything time: time lost, and at most how much of the time any other
schedule of the order could save (gap in the input order, or over all orders).
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import scheduler as sc
from scheduler.problem import Problem

CASES = (
    *(("checkmate_resnet50_256_train.json", f"{share} %", "any", 5) for share in (90, 80, 70, 60, 50)),
    ("checkmate_resnet50_256_train.json", "floor + 25 %", "any", 10),
    ("checkmate_resnet50_256_train.json", "floor + 10 %", "input", 60),
    ("checkmate_vgg_unet_32_train.json", "50 %", "any", 2),
    ("random_layered_n100.json", "90 %", "input", 30),
    ("random_layered_n100.json", "80 %", "input", 30),
    ("random_layered_n100.json", "90 %", "any", 10),
    ("random_layered_n100.json", "80 %", "any", 10),
    ("random_layered_n100.json", "70 %", "any", 10),
    ("cg_unet.txt", "80 %", "any", 10),
    ("cg_unet.txt", "60 %", "any", 10),
    ("cg_unet.txt", "50 %", "any", 10),
    ("cg_unet.txt", "40 %", "any", 60),
    ("cg_resnet50.txt", "60 %", "any", 10),
    ("cg_resnet50.txt", "50 %", "any", 10),
    ("cg_resnet50.txt", "40 %", "any", 60),
    ("cg_resnet50.txt", "30 %", "any", 60),
    *(
        (f"random_layered({operations})", budget, order, 20)
        for operations in (250, 500, 1000)
        for budget in ("90 %", "80 %")
        for order in ("input", "any")
    ),
)
HEAD = ("graph", "budget", "order", "time lost", "gap", "status", "seconds")


def read(name: str, folder: Path) -> sc.Graph:
    """A published graph, or a generated one."""
    if name.startswith("random_layered("):
        return sc.zoo.random_layered(int(name[15:-1]), seed=1)
    return sc.read_graph(folder / name)


def budget_bytes(budget: str, graph: sc.Graph) -> int | str:
    """The budget as `solve` takes it; "floor + x %" goes from the largest working set towards the peak."""
    if not budget.startswith("floor"):
        return budget.replace(" ", "")
    problem = Problem(graph, 0)
    floor, share = problem.floor.bytes, float(budget.split()[2]) / 100
    return int(floor + share * (problem.baseline.peak_bytes - floor))


def rows(folder: Path, only: str) -> Iterator[tuple[str, ...]]:
    """One row per case whose name begins with `only`."""
    # What is compiled on first use is compiled before any clock runs.
    sc.solve(sc.zoo.random_layered(60), "70%", solver="anneal", time_limit=1)
    for name, budget, order, seconds in CASES:
        if not f"{name.split('.')[0]} {budget}".startswith(only):
            continue
        graph = read(name, folder)
        solution = sc.solve(graph, budget_bytes(budget, graph), reorder=order == "any", time_limit=seconds)
        gap = solution.gap if order == "input" else solution.global_gap
        status = solution.status.name
        if status == "OPTIMAL":
            status += f" in {solution.search_space}"
        yield (
            name.split(".")[0], budget, order, f"{solution.overhead:.3%}", f"{gap:.3%}", status,
            f"{solution.solve_seconds:.1f} of {seconds}",
        )  # fmt: skip


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEAD)
    for row in rows(Path(sys.argv[1]), " ".join(sys.argv[2:])):
        writer.writerow(row)
        sys.stdout.flush()
