"""A step that does not fit into its process is measured and trained by modules all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.abuse

STEP = """
import resource, sys
import torch
from torch import nn
from scheduler.pytorch import checkpointed

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.act, self.narrow = nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)

    def forward(self, x):
        return x if x.sum().item() == 12345.678 else x + self.narrow(self.act(self.wide(x)))

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(24))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

def mean_square(y):
    return y.square().mean()

torch.manual_seed(0)
torch.set_num_threads(1)
model, x = Blocks(), torch.randn(192 * 1024, 64)  # 48 MiB; a block saves 5 times as much
resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30))
if sys.argv[1] == "plain":
    mean_square(model(x)).backward()
else:
    planned = checkpointed(model, "2GiB", (x,), loss=mean_square, granularity="modules")
    planned(x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
"""


def run(how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", STEP, how], cwd=ROOT, capture_output=True, text=True, check=False)


def test_six_gibibytes_of_activations_train_in_two_under_a_limit_of_three() -> None:
    plain = run("plain")
    assert plain.returncode == 1
    assert "can't allocate memory" in plain.stderr
    planned = run("planned")
    assert planned.returncode == 0, planned.stderr
