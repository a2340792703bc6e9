"""What capturing a step buys: plans by modules next to plans by operations, within the same bytes.

    python tests/benchmarks/modules.py > tests/benchmarks/modules.csv

Every model of the catalog at its default sizes, at four budgets: shares of what the captured step
adds to its resident bytes when everything is saved. Overheads are predicted from measured times,
peaks are predicted for the allocator, and `measured` is the allocator's peak of a planned step.
Where a granularity has no plan within the budget, its columns are empty.

The choice of modules is compared with two others, in the same simulation: "blocks" recomputes
every block (the outermost calls of modules of which a list or an `nn.Sequential` holds several of
one class), and "random" is the fastest of 200 random choices of blocks. Their peaks, of which at
most 8 are taken, are given to the choice of modules as budgets: `slower_than_blocks` and
`slower_than_random` count those at which the plan, made in the default time, is slower by more than
the gap at which its search may end, and `slower_by` is the largest of these differences.

It takes about 8 minutes on two idle cores.
"""

from __future__ import annotations

import csv
import random
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from scheduler.api import TRAINING_GAP, make_plan
from scheduler.errors import BudgetTooSmallError, OutOfTimeError
from scheduler.plan import Plan
from scheduler.problem import parse_budget
from scheduler.pytorch import checkpointed, trace
from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
from scheduler.pytorch.models.catalog import ModelCase, make_model, model_names
from scheduler.pytorch.modules.choice import first_decisions, plan_modules, with_estimated_backward
from scheduler.pytorch.modules.lowering import LoweredTree, lower
from scheduler.pytorch.modules.measuring.recording import record
from scheduler.pytorch.modules.search import Chooser

SHARES = (0.8, 0.6, 0.4, 0.2)
CHOICES = 200
COMPARED = 8
"""Of the peaks of random choices, how many are given to the search as budgets."""
SECONDS = 4.0
"""For each plan of a row."""
COLUMNS = [
    "model",
    "share",
    "budget_bytes",
    "calls",
    "measuring_over_step",
    "modules_overhead",
    "modules_gap",
    "modules_peak",
    "modules_measured",
    "modules_smallest",
    "operations_overhead",
    "operations_gap",
    "operations_peak",
    "operations_measured",
    "operations_smallest",
    "blocks_overhead",
    "blocks_peak",
    "slower_than_blocks",
    "slower_than_random",
    "slower_by",
]


def rows_of(name: str) -> list[dict[str, object]]:
    """Return the rows of a model."""
    torch.manual_seed(0)
    case = make_model(name)
    args, kwargs = case.args, dict(case.kwargs)
    step = training_step(case.module, args, kwargs, loss=case.loss)
    plain = min(seconds_of(step) for _ in range(3))
    started = time.perf_counter()
    tree = record(
        case.module,
        args,
        kwargs,
        case.loss,
        decide=lambda tree: sorted(first_decisions(with_estimated_backward(tree))),
    )
    measuring = time.perf_counter() - started
    lowered, graph = lower(tree), trace(case.module, args, kwargs, loss=case.loss)
    compared = compare_choices(case.module, lowered, measuring)
    rows = []
    for share in SHARES:
        budget = parse_budget(f"{share:.0%}", graph)
        row = {"model": name, "share": share, "budget_bytes": budget, "calls": len(tree.calls)}
        row |= {"measuring_over_step": f"{measuring / plain:.1f}", **compared}
        row |= columns(case, "modules", lambda: plan_modules(lowered, budget, time_limit=SECONDS))  # noqa: B023
        row |= columns(
            case,
            "operations",
            lambda: make_plan(graph, budget, gap=TRAINING_GAP, time_limit=SECONDS),  # noqa: B023
        )
        rows.append(row)
    return rows


def columns(case: ModelCase, granularity: str, make: Callable[[], Plan]) -> dict[str, object]:
    """Return the columns of a plan, predicted and measured; none if there is no plan."""
    try:
        plan = make()
    except (BudgetTooSmallError, OutOfTimeError):
        return {}
    planned = checkpointed(case.module, plan, case.args, dict(case.kwargs), loss=case.loss)
    resident = resident_tensors(planned, (case.args, dict(case.kwargs)))
    measured = measure(training_step(planned, case.args, dict(case.kwargs)), resident=resident, repeats=1)
    return {
        f"{granularity}_overhead": f"{plan.overhead:.4f}",
        f"{granularity}_gap": f"{plan.gap:.4f}",
        f"{granularity}_peak": plan.peak_bytes,
        f"{granularity}_measured": measured.allocator_peak_bytes,
        f"{granularity}_smallest": plan.smallest_peak_bytes,
    }


def compare_choices(model: nn.Module, lowered: LoweredTree, measuring: float) -> dict[str, object]:
    """Compare plans by modules with recomputing every block, and with random choices of blocks.

    The plans are made in the default time, which depends on the seconds of measuring.
    """
    chooser = Chooser(lowered.layout)
    blocks = blocks_of(model, lowered)
    everything = chooser.candidate(dict.fromkeys(blocks, False))
    draw = random.Random(0)
    choices = [draw.sample(blocks, draw.randint(0, len(blocks))) for _ in range(CHOICES)]
    candidates = [chooser.candidate(dict.fromkeys(chosen, False)) for chosen in choices]
    fastest: dict[int, float] = {}
    for candidate in sorted(candidates, key=lambda one: (one.peak_bytes, one.time)):
        if candidate.time < min(fastest.values(), default=float("inf")):
            fastest[candidate.peak_bytes] = candidate.time
    peaks = sorted(fastest)
    peaks = [peaks[number * (len(peaks) - 1) // (COMPARED - 1)] for number in range(COMPARED)]
    slower = [slower_by(lowered, measuring, peak, fastest[peak]) for peak in {*peaks}]
    slower_than_blocks = slower_by(lowered, measuring, everything.peak_bytes, everything.time)
    return {
        "blocks_overhead": f"{everything.time / chooser.plain.time - 1:.4f}",
        "blocks_peak": everything.peak_bytes,
        "slower_than_blocks": int(slower_than_blocks > TRAINING_GAP),
        "slower_than_random": sum(share > TRAINING_GAP for share in slower),
        "slower_by": f"{max(0.0, slower_than_blocks, *slower):.4f}",
    }


def slower_by(lowered: LoweredTree, measuring: float, budget_bytes: int, seconds: float) -> float:
    """Return by which share of its own time the plan within a budget is slower than some seconds."""
    return 1 - seconds / plan_modules(lowered, budget_bytes, measuring_seconds=measuring).time


def blocks_of(model: nn.Module, lowered: LoweredTree) -> list[int]:
    """Return the outermost calls of modules of which their container holds several of one class."""
    modules = dict(model.named_modules())
    calls = lowered.layout.tree.calls
    found: list[int] = []
    for position, call in enumerate(calls):
        container = modules[call.module.rpartition(".")[0]]
        kinds = Counter(type(child) for child in container.children())
        is_block = isinstance(container, nn.Sequential | nn.ModuleList) and kinds[type(modules[call.module])] > 1
        is_inside = any(calls[other].start <= call.start < calls[other].stop for other in found)
        if is_block and not is_inside and not call.refusal and not call.span and any(modules[call.module].children()):
            found.append(position)
    return found


def seconds_of(step: Callable[[], object]) -> float:
    """Return the wall-clock seconds of a call."""
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def main(names: list[str]) -> None:
    """Print the table."""
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for name in names:
        writer.writerows(rows_of(name))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:] or list(model_names()))
