"""Time that a planned step takes to see that nothing differs from what its plan was made for.

    python tests/benchmarks/guards.py > tests/benchmarks/guards.csv

The first row is the check of a model of many modules, repeated: the shortest time of many. The
second is the check inside steps of GPT-2, where the steps have emptied the caches: its share of
the CPU seconds of a step is the median of several. The share is timed inside the steps because
it is far smaller than the difference between two equal steps.
"""

from __future__ import annotations

import csv
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from scheduler.pytorch import checkpointed
from scheduler.pytorch.capture.arguments import read_arguments
from scheduler.pytorch.execute.guards import CallKey, call_key
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.models.catalog import make_model

BLOCKS = 90
REPEATS = 1000
STEPS = 9


class Block(nn.Module):
    """A block of eleven modules with ten parameters, like those of a transformer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, width, bias=False)
        self.proj, self.drop = nn.Linear(width, width), nn.Dropout(0.1)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False), nn.Dropout(0.1)
        )
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.proj(self.qkv(self.norm(x)))) * self.scale
        return torch.add(x, self.mlp(self.norm2(x)))


def planned_blocks(blocks: int = BLOCKS) -> tuple[CheckpointedModule, Tensor]:
    """Return a planned model of `11 * blocks + 1` modules, and its input."""
    x = torch.randn(2, 8)
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    planned = checkpointed(model, "100%", (x,), loss=torch.sum, solver="save-all", costs="flops")
    assert isinstance(planned, CheckpointedModule)
    return planned, x


def microseconds(planned: CheckpointedModule, x: Tensor, repeats: int = REPEATS) -> float:
    """Return the shortest time of a check of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        signature, tensors = read_arguments((x,), {})
        found = planned.difference(call_key(signature, tensors), tensors)
        times.append(time.perf_counter() - start)
        assert not found
    return min(times) * 1e6


def share_of_step(name: str, steps: int = STEPS) -> tuple[float, float]:
    """Return the median share of the check in a model's step, and its median microseconds there."""
    case = make_model(name)
    planned = checkpointed(
        case.module, "100%", case.args, case.kwargs, loss=case.loss, solver="save-all", costs="flops"
    )
    assert isinstance(planned, CheckpointedModule)
    check, checks, totals = planned.difference, [], []

    def timed(call: CallKey, inputs: Sequence[Tensor]) -> str:
        start = time.process_time()
        found = check(call, inputs)
        checks.append(time.process_time() - start)
        return found

    planned.difference = timed  # type: ignore[method-assign]
    for _ in range(steps):
        start = time.process_time()
        planned(*case.args, **case.kwargs).backward()
        totals.append(time.process_time() - start)
    shares = [spent / total for spent, total in zip(checks, totals, strict=True)]
    return statistics.median(shares), statistics.median(checks) * 1e6


def rows() -> Iterator[list[str]]:
    """Yield a row per model."""
    torch.set_num_threads(1)
    planned, x = planned_blocks()
    count = len([*planned.module.modules()]), len([*planned.module.parameters()])
    yield [f"{count[0]} modules, {count[1]} parameters", "repeated", f"{microseconds(planned, x):.0f}", ""]
    share, spent = share_of_step("gpt2")
    yield ["gpt2 at its default size", "inside steps", f"{spent:.0f}", f"{share:.3%}"]


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["model", "check", "microseconds", "share of a step"])
    writer.writerows(rows())
