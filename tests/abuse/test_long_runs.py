"""Long runs, in a bounded sample: many graphs against the oracle, many plans and many steps without growth."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import scheduler as sc
from tests.abuse.lots import LOT, run_lot
from tests.abuse.many_graphs import check
from tests.abuse.tally import BOOK
from tests.support.paths import ROOT
from tests.support.training_graphs import conv_net

pytestmark = pytest.mark.abuse
LOTS, PLANS, STEPS = 4, 100, 1000
MOST_GROWTH = 8 * 2**20
"""Bytes that a process may grow by: what malloc keeps for itself comes and goes."""


def resident_bytes() -> int:
    """What this process holds of the machine's memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")


@pytest.mark.parametrize("number", range(LOTS))
def test_every_answer_on_random_graphs_is_true(number: int) -> None:
    tally = BOOK.of("random graphs and the oracle")
    try:
        tally.tried += run_lot(number, check).total()
    except AssertionError:
        tally.accept(False, f"an untrue answer in lot {number}: see many_graphs.py")
    assert tally.tried % LOT == 0


def test_tens_of_thousands_of_operations_take_time_and_memory_in_proportion() -> None:
    """So that 10^6 of them would pass in minutes and GB, but for the time limit of the solvers."""
    count, limit, tally = 30_000, 2.0, BOOK.of("very many operations")
    command = [sys.executable, "tests/abuse/many_operations.py", str(count), str(limit), "counted"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    tally.accept(ran.returncode == 0, ran.stderr)
    rows = re.findall(r"^(.{16}) *([\d.]+) +[\d.]+ +(\d+)  (.*)$", ran.stdout, flags=re.MULTILINE)
    tally.tried += len(rows)
    assert len(rows) == 10
    for name, seconds, mebibytes, said in rows:
        assert float(seconds) < 2 * limit + 200e-6 * count, name
        assert int(mebibytes) * 2**20 < 512 * 2**20 + 10_000 * count, name
        tally.accept(said.startswith("UnsuitableProblemError") == (name.strip() == "ilp"), (name, said))


@needs_proc
def test_a_hundred_plans_made_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    tally = BOOK.of("a hundred plans")

    def make(number: int) -> None:
        graph = conv_net(6, width=64 + number)
        plan = tally.attempt(sc.make_plan, graph, "75%", time_limit=5.0)
        tally.accept(isinstance(plan, sc.Plan), plan)
        plan.save(tmp_path / "plan.json")
        tally.accept(sc.Plan.load(tmp_path / "plan.json") == plan)

    for number in range(PLANS // 5):
        make(number)
    gc.collect()
    objects, held = len(gc.get_objects()), resident_bytes()
    for number in range(PLANS // 5, PLANS):
        make(number)
    gc.collect()
    assert len(gc.get_objects()) - objects < PLANS
    assert resident_bytes() - held < MOST_GROWTH


@needs_proc
def test_a_thousand_training_steps_under_a_plan_leave_nothing_behind() -> None:
    torch = pytest.importorskip("torch")
    from torch import nn

    from scheduler.pytorch import checkpointed

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(16, 1))
    batch = torch.randn(32, 16)
    module = checkpointed(model, "60%", (batch,), loss=lambda y: y.square().mean(), costs="flops", time_limit=5.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tally = BOOK.of("a thousand training steps")

    def step() -> float:
        optimizer.zero_grad()
        loss = module(batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(entry), torch.Tensor) for entry in gc.get_objects())

    first, *_ = [step() for _ in range(STEPS // 10)]
    alive, held = tensors(), resident_bytes()
    for _ in range(STEPS // 10, STEPS):
        tally.tried += 1
        last = step()
    tally.keep(last < first, (first, last))
    torch.set_num_threads(threads)
    assert tensors() == alive
    assert resident_bytes() - held < MOST_GROWTH
