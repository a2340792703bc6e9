"""`torch.compile(model, backend="scheduler")` finds the backend by its entry point."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from scheduler.errors import BudgetTooSmallError, ExecutionError, InvalidBudgetError, InvalidOptionError
from scheduler.pytorch.compile.entry_point import compile_graph
from tests.support.pytorch.regression import batch, mlp

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

ROOT = Path(__file__).parents[3]
GROUP = "torch_dynamo_backends"

BY_NAME = """
import sys
import torch
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.GELU())]
model = torch.nn.Sequential(*layers)
x = torch.randn(512, 16)
assert "scheduler" in torch._dynamo.list_backends()
assert "scheduler" not in sys.modules
compiled = torch.compile(model, backend="scheduler", options={"budget": "60%", "solver": "greedy"})
compiled(x).sum().backward()
found = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()
model(x).sum().backward()
assert all(torch.equal(one, parameter.grad) for one, parameter in zip(found, model.parameters(), strict=True))
(planned,) = sys.modules["scheduler.pytorch.compile.entry_point"].BACKENDS
(graph,) = planned.plans
print(graph.plan.solver, sum(graph.plan.simulation.recomputed.values()) > 0)
"""


def registered() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["entry-points"][GROUP]


def test_the_registered_name_is_that_of_the_adapter():
    ((name, value),) = registered().items()
    assert name == "scheduler"
    assert EntryPoint(name, value, GROUP).load() is compile_graph


def test_a_process_that_does_not_import_the_package_compiles_with_it_by_name(tmp_path):
    folder = tmp_path / "checkpoint_scheduler-0.1.0.dist-info"  # what an installation writes
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: checkpoint-scheduler\nVersion: 0.1.0\n")
    entries = "\n".join(f"{name} = {value}" for name, value in registered().items())
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", BY_NAME], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "greedy True"


def compiled(model, **arguments):
    return torch.compile(model, backend=compile_graph, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, InvalidOptionError, 'needs a budget: pass options={"budget": "8GiB"}; its options are budget, compiler'),
        ({"options": {"solver": "greedy"}}, InvalidOptionError, "needs a budget"),
        (
            {"options": {"budget": "8GiB", "memory": 1, "depth": 2}},
            InvalidOptionError,
            "no option depth, memory: its options are budget, compiler, graph_breaks, costs, reserve, optimizer,"
            " solver, time_limit, gap, reorder, seed",
        ),
        ({"options": {"budget": "8GiB", "compiler": "llvm"}}, InvalidOptionError, '"eager" or "inductor", got'),
        ({"options": {"budget": "8G"}}, InvalidBudgetError, 'write "8GiB"'),
        ({"mode": "max-autotune"}, InvalidOptionError, "no modes, got mode='max-autotune'"),
        ({"options": {"budget": "1KiB"}}, BudgetTooSmallError, "must stay in memory while"),
    ],
)
def test_wrong_options_raise_the_packages_own_errors_at_the_first_call(arguments, error, text):
    model = compiled(mlp(), **arguments)
    with pytest.raises(error, match=text):
        model(batch(8, 16))


def test_the_graphs_of_one_compilation_share_its_budget_and_those_of_another_do_not():
    block, x = mlp(), batch(64, 16)
    one, other = (compiled(torch.nn.Sequential(block), options={"budget": "8GiB", "solver": "save-all"}) for _ in "12")
    first = one(x)
    with pytest.raises(ExecutionError, match="runs more than once before its backward"):
        one(x)
    torch._dynamo.reset()
    other(x)
    del first


def test_options_that_have_changed_since_the_last_graph_apply_to_the_next():
    options: dict[str, object] = {"budget": "8GiB", "solver": "save-all"}
    model = compiled(mlp(), options=options, dynamic=False)
    model(batch(8, 16)).sum().backward()
    options["budget"] = "1KiB"
    with pytest.raises(BudgetTooSmallError):
        model(batch(4, 16))
