"""The budget "auto": free memory of the device, and what the step already holds there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scheduler as sc
from scheduler.errors import InvalidBudgetError
from scheduler.pytorch import backend, checkpointed
from scheduler.pytorch.largest_batch import max_batch
from scheduler.pytorch.measurement import free_memory
from scheduler.pytorch.measurement.free_memory import device_budget, free_bytes

FREE = 1 << 20


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


WEIGHTS = 4 * (4 * 8 + 8 + 8 + 1)


@pytest.fixture
def _little_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "free_bytes", lambda device: FREE)


@pytest.mark.usefixtures("_little_is_free")
def test_auto_adds_what_the_step_holds_to_the_free_memory() -> None:
    net, batch = model(), torch.zeros(2, 4)
    assert device_budget("auto", net) == FREE + WEIGHTS
    assert device_budget(" AUTO ", net, ((batch, batch[:1]), {})) == FREE + WEIGHTS + 4 * 8
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    assert device_budget("auto", net, optimizer=optimizer) == FREE + WEIGHTS
    net(batch).sum().backward()
    assert device_budget("auto", net, optimizer=optimizer) == FREE + 2 * WEIGHTS
    optimizer.step()
    assert device_budget("auto", net, optimizer=optimizer) == FREE + 3 * WEIGHTS


def test_other_budgets_are_returned_as_they_are() -> None:
    assert [device_budget(budget, model()) for budget in (7, "60%", "min", "8GiB")] == [7, "60%", "min", "8GiB"]


@pytest.mark.usefixtures("_little_is_free")
def test_checkpointed_backend_and_max_batch_take_auto() -> None:
    net, batch = model(), torch.zeros(2, 4)
    planned = checkpointed(net, "auto", (batch,), loss=lambda y: y.sum(), costs="flops")
    assert planned.plan is not None
    assert planned.plan.budget_bytes == FREE + WEIGHTS + 4 * 8
    compiler = backend("auto")
    torch.compile(model(), backend=compiler)(batch).sum().backward()
    assert [graph.plan.budget_bytes for graph in compiler.plans] == [FREE + WEIGHTS + 4 * 8]
    found = max_batch(
        model, lambda n: ((torch.zeros(n, 4),), {}), "auto", loss=lambda y: y.sum(), costs="flops", limit=4
    )
    assert found.plan.budget_bytes == FREE + WEIGHTS


def test_the_free_memory_of_the_cpu_is_below_all_of_it() -> None:
    total = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert 0 < free_bytes(torch.device("cpu")) < 1024 * total


def test_a_container_with_a_limit_has_less(tmp_path: Path) -> None:
    texts = {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 600\ninactive_file 50\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert list(free_memory._free_in_containers(tmp_path)) == [350]
    (tmp_path / "memory.max").write_text("max\n")
    assert list(free_memory._free_in_containers(tmp_path)) == []


def test_auto_without_one_device_is_rejected() -> None:
    with pytest.raises(InvalidBudgetError, match='unknown for "meta" on this system: give the budget in bytes'):
        device_budget("auto", model().to("meta"))
    with pytest.raises(InvalidBudgetError, match="not known to be on any device"):
        device_budget("auto", nn.Tanh())
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(InvalidBudgetError, match=r"on several devices \(cpu, meta\)"):
        device_budget("auto", two)


def test_max_batch_has_no_smallest_peak() -> None:
    with pytest.raises(sc.InvalidBudgetError, match="grow with the batch"):
        max_batch(model, lambda n: ((torch.zeros(n, 4),), {}), "min+10%")
