"""Overhead of one schedule: predicted by two traces of the same model, and measured.

    python tests/benchmarks/predicted_times.py > tests/benchmarks/predicted_times.csv

Each trace measures all operators itself; the schedule is the one found for the first. Steps are
measured in CPU seconds of the process on one thread, in turn with a step that saves everything:
the median of the paired ratios, less 1, and the quartiles of these ratios. "noise" is the spread
of repeated runs of single operators, the larger one of the two traces. Names of models as arguments
restrict the table to them.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time

import torch

import scheduler as sc
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.costs.progress import TracingProgress
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import measure_times, training_step
from scheduler.pytorch.models.catalog import ModelCase, make_model
from scheduler.pytorch.tracing import capture

MODELS: dict[str, dict[str, object]] = {
    "gpt2": {"vocabulary": 4096, "heads": 8, "dropout": 0.0},
    "resnet50": {"batch_size": 8, "width": 32, "size": 128},
    "unet": {"batch_size": 2, "width": 32, "size": 96},
    "hf-vit": {},
    "predicted_times:mamba": {},
}
BUDGETS = ("70%", "50%")
SECONDS = 8.0
REPEATS = 9
COLUMNS = ["model", "budget", "first trace", "second trace", "measured", "lower quartile", "upper quartile", "noise"]


def mamba() -> tuple[object, ...]:
    """A state-space model, whose scan over 64 positions consists of small operators."""
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16}
    model = MambaForCausalLM(MambaConfig(**sizes, use_cache=False)).train()
    tokens = torch.randint(0, 512, (2, 64))
    return model, (tokens,), {"labels": tokens}, lambda output: output.loss


def traced(case: ModelCase) -> tuple[Capture, float]:
    """A capture with times of its own, and how far they are noise."""
    spreads: list[float] = []

    def collect(progress: TracingProgress) -> None:
        if progress.spread is not None:
            spreads.append(progress.spread)

    arguments = case.module, case.args, case.kwargs, case.loss
    captured = capture(*arguments, costs="measured-again", workspaces=False, progress=collect)
    return captured, spreads[-1]


def rows(name: str, options: dict[str, object]) -> list[list[object]]:
    """The rows of one model."""
    case = make_model(name, **options)
    (captured, noise), (again, other_noise) = traced(case), traced(case)
    schedules = {"everything": sc.solve(captured.graph, "100%", solver="save-all").schedule}
    for budget in BUDGETS:
        schedules[budget] = sc.solve(captured.graph, budget, time_limit=SECONDS).schedule
    steps = {
        budget: training_step(
            build(case.module, captured, schedule, case.args, case.kwargs, loss=case.loss), case.args, case.kwargs
        )
        for budget, schedule in schedules.items()
        if schedule is not None
    }
    times = measure_times(steps, REPEATS, clock=time.process_time)
    found: list[list[object]] = []
    for budget in BUDGETS:
        schedule = schedules[budget]
        if schedule is None:
            continue
        ratios = [own / other - 1 for own, other in zip(times[budget], times["everything"], strict=True)]
        lower, median, upper = statistics.quantiles(ratios, n=4)
        predicted = [_overhead(graph, schedule) for graph in (captured.graph, again.graph)]
        shares = [*predicted, median, lower, upper, max(noise, other_noise)]
        found.append([name.partition(":")[2] or name, budget, *(f"{share:.4f}" for share in shares)])
    return found


def _overhead(graph: sc.Graph, schedule: sc.Schedule) -> float:
    return sc.simulate(graph, schedule).time / sum(operation.time for operation in graph.operations) - 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name in sys.argv[1:] or MODELS:
        writer.writerows(rows(name, MODELS[name]))
        sys.stdout.flush()
