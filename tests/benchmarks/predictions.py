"""Memory and time of plans at eight budgets of seven models: predicted against measured.

    python tests/benchmarks/predictions.py > tests/benchmarks/predictions.csv

Budgets rise from the smallest peak known, which is left out, to the save-everything peak in
equal steps. Bytes include resident tensors; the allocator's are those of `measure`. Overheads are
measured in CPU seconds of the process on one thread, in turn with a step that saves
everything: the median of the ratios, less 1. Names of models as arguments restrict the table to them.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

import scheduler as sc
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import measure, measure_times, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.catalog import ModelCase, make_model
from scheduler.pytorch.tracing import capture
from scheduler.schedule import Schedule

MODELS: dict[str, dict[str, object]] = {
    "gpt2": {"vocabulary": 4096, "heads": 8, "dropout": 0.0},
    "resnet50": {"batch_size": 8, "width": 32, "size": 128},
    "unet": {"batch_size": 2, "width": 32, "size": 96},
    "hf-vit": {},
    "hf-bert": {"batch_size": 1},
    "hf-t5": {"batch_size": 1},
    "hf-llama": {"batch_size": 1},
}
BUDGETS = 8
SECONDS = 8.0
"""For all budgets of a model together."""
REPEATS = 3
COLUMNS = [
    "model",
    "budget_bytes",
    "resident_bytes",
    "live_predicted",
    "live_measured",
    "allocator_predicted",
    "allocator_measured",
    "overhead_predicted",
    "overhead_measured",
    "status",
]


def planned_step(case: ModelCase, captured: Capture, schedule: Schedule) -> Callable[[], object]:
    """A training step that follows a schedule."""
    module: CheckpointedModule = build(case.module, captured, schedule, case.args, case.kwargs, loss=case.loss)
    return training_step(module, case.args, case.kwargs)


def rows(name: str, options: dict[str, object]) -> Iterator[list[object]]:
    """The rows of one model, by rising budget."""
    case = make_model(name, **options)
    captured = capture(case.module, case.args, case.kwargs, case.loss, costs="measured")
    graph = captured.graph
    resident = resident_tensors(case.module, (case.args, dict(case.kwargs)))
    constants = graph.resident_bytes - storage_bytes(resident)
    smallest = sc.minimum_budget(graph, time_limit=SECONDS / 2).peak_bytes
    everything = sc.solve(graph, "100%", solver="save-all")
    assert everything.schedule is not None
    most = everything.peak_bytes
    baseline = planned_step(case, captured, everything.schedule)
    budgets = [smallest + (most - smallest) * k // BUDGETS for k in range(1, BUDGETS + 1)]
    for answer in sc.frontier(graph, budgets, time_limit=SECONDS):
        assert answer.schedule is not None
        assert answer.simulation is not None
        step = planned_step(case, captured, answer.schedule)
        measured = measure(step, resident=resident, repeats=1)
        times = measure_times({"step": step, "baseline": baseline}, REPEATS, clock=time.process_time)
        ratios = [own / other for own, other in zip(*times.values(), strict=True)]
        yield [
            name,
            answer.budget_bytes,
            graph.resident_bytes,
            answer.simulation.live_peak_bytes,
            constants + measured.live_peak_bytes,
            answer.peak_bytes,
            constants + measured.allocator_peak_bytes,
            f"{answer.overhead:.4f}",
            f"{statistics.median(ratios) - 1:.4f}",
            answer.status.name,
        ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name in sys.argv[1:] or MODELS:
        for row in rows(name, MODELS[name]):
            writer.writerow(row)
            sys.stdout.flush()
