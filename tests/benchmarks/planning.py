"""Seconds from a model to its plan: tracing, and planning at one budget.

    python tests/benchmarks/planning.py > tests/benchmarks/planning.csv

Each model of the comparison with PyTorch's own checkpointing (`peers.py`), in a process of
its own: what torch does once in a process counts, but for imports. Tracing is with
`costs="flops"`, the time limit that of `checkpointed`. Times are wall-clock; arguments are
names of models.
"""

from __future__ import annotations

import csv
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch._dynamo.functional_export
import torch._functorch.aot_autograd
from peers import MODELS

import scheduler as sc
from scheduler.pytorch import trace
from scheduler.pytorch.checkpointing import PLANNING_DEFAULTS

BUDGET = "60%"
COLUMNS = ["model", "operations", "tracing", "planning", "together", "overhead", "gap"]


def row(title: str) -> list[object]:
    """The row of one model."""
    torch.set_num_threads(1)
    case = MODELS[title].make()
    begun = time.perf_counter()
    graph = trace(case.module, case.args, case.kwargs, loss=case.loss, costs="flops")
    traced = time.perf_counter()
    plan = sc.make_plan(graph, BUDGET, **PLANNING_DEFAULTS)
    planned = time.perf_counter()
    return [
        title,
        len(graph.operations),
        f"{traced - begun:.1f}",
        f"{planned - traced:.1f}",
        f"{planned - begun:.1f}",
        f"{plan.overhead:.4f}",
        f"{plan.gap:.5f}",
    ]


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    own_process = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=own_process, max_tasks_per_child=1) as pool:
        for cells in pool.map(row, sys.argv[1:] or MODELS):
            writer.writerow(cells)
            sys.stdout.flush()
