"""Memory of a step that adds to gradients that exist: plain, with a plan, and with a plan that knows of them.

    python tests/benchmarks/accumulation.py > tests/benchmarks/accumulation.csv

Bytes are live storages beyond parameters, inputs and existing gradients. The plans recompute
nothing, so that the difference is that of the gradients.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes
from scheduler.pytorch.models.catalog import ModelCase, make_model

SIZES: dict[str, dict[str, int]] = {
    "resnet50": {"batch_size": 2, "size": 64},
    "gpt2": {"batch_size": 1, "length": 64},
}


def accumulate_gradients(module: nn.Module) -> list[Tensor]:
    """The gradients that the module has."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def peak(case: ModelCase, module: Callable[..., Tensor]) -> int:
    """Bytes that the second of two steps adds to what stands."""
    module(*case.args).backward()
    with StorageTracker([*resident_tensors(case.module, case.args), *accumulate_gradients(case.module)]) as tracker:
        module(*case.args).backward()
    return tracker.peak_bytes


def rows() -> Iterator[list[str]]:
    """One row per model."""
    torch.set_num_threads(1)
    for name, size in SIZES.items():
        case = make_model(name, **size)
        peaks = [peak(case, case.module)]  # and of each plan its peak, measured and predicted
        for known in (False, True):
            planned = checkpointed(
                case.module, "100%", case.args, solver="save-all", costs="flops", accumulate_gradients=known
            )
            assert planned.plan is not None
            peaks += [peak(case, planned), planned.plan.peak_bytes - planned.plan.graph.resident_bytes]
        gradients = storage_bytes(accumulate_gradients(case.module))
        what = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in size.items())
        yield [name, what, *(f"{value / 2**20:.1f}" for value in (gradients, *peaks))]


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(
        ["model", "size", "gradients", "plain", "a plan", "its prediction", "a plan that knows", "its prediction"]
    )
    writer.writerows(rows())
