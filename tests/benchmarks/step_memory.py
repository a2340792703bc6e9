"""Live bytes over one training step of GPT-2: plain PyTorch, and a plan for 60 %.

    python tests/benchmarks/step_memory.py > tests/benchmarks/step_memory.csv

A row per operator of the step that changes the sum, parameters and batch included. Costs are
FLOPs, so the table is the same on every machine.
"""

from __future__ import annotations

import csv
import sys

import torch

from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.catalog import make_model

BUDGET = "60%"


class Recorder(StorageTracker):
    """Keep the live bytes after every operator."""

    def __init__(self, ignored: list[torch.Tensor]) -> None:
        super().__init__(ignored)
        self.history: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.history.append(self.live_bytes)
        return result


if __name__ == "__main__":
    torch.manual_seed(0)
    case = make_model("gpt2")
    planned = checkpointed(case.module, BUDGET, case.args, case.kwargs, loss=case.loss, costs="flops")
    assert planned.plan is not None
    resident = resident_tensors(case.module, (case.args, case.kwargs))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["series", "operators", "bytes"])
    steps = {
        "PyTorch": training_step(case.module, case.args, case.kwargs, loss=case.loss),
        "plan": training_step(planned, case.args, case.kwargs),
    }
    for series, step in steps.items():
        step()
        case.module.zero_grad(set_to_none=True)
        with Recorder(resident) as recorder:
            step()
        last = -1
        for number, live in enumerate(recorder.history):
            if live != last:
                writer.writerow([series, number, storage_bytes(resident) + live])
            last = live
    writer.writerow(["budget", 0, planned.plan.budget_bytes])
    writer.writerow(["resident", 0, storage_bytes(resident)])
