"""Time of generated code that recomputes nothing, over plain eager PyTorch.

    python tests/benchmarks/overhead.py > tests/benchmarks/overhead.csv

Steps run in turn on one thread and are timed in CPU seconds of the process, so that other
work on the machine falls on both alike; the figure is the median of the paired ratios.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time

import torch

from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.memory import measure_times, training_step
from scheduler.pytorch.models.catalog import make_model

MODELS = {
    "gpt2": "8 layers, width 256, 256 tokens, batch 4",
    "resnet50": "width 64, 128 x 128, batch 16",
    "unet": "width 32, depth 4, 128 x 128, batch 4",
    "convnet": "6 layers, width 32, 32 x 32, batch 32",
}
REPEATS = 9


def ratio(name: str, repeats: int = REPEATS) -> float:
    """Median of the paired ratios of a model's step with the generated code over the plain one."""
    torch.set_num_threads(1)
    case = make_model(name)
    planned = checkpointed(
        case.module, "100%", case.args, case.kwargs, loss=case.loss, solver="save-all", costs="flops"
    )
    plain_step = training_step(case.module, case.args, case.kwargs, loss=case.loss)
    planned_step = training_step(planned, case.args, case.kwargs)
    times = measure_times({"plain": plain_step, "planned": planned_step}, repeats, clock=time.process_time)
    return statistics.median(planned / plain for plain, planned in zip(*times.values(), strict=True))


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["model", "size", "time over eager"])
    for name, size in MODELS.items():
        writer.writerow([name, size, f"{ratio(name):.3f}"])
