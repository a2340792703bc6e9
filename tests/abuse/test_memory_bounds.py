"""Large steps: each solver keeps to the memory that its docstring states, and what one refuses another takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import scheduler as sc
from scheduler.solvers.registry import MODULES
from tests.abuse.tally import BOOK
from tests.support.paths import ROOT

PEAK = Path("/proc/self/clear_refs")
pytestmark = [
    pytest.mark.abuse,
    pytest.mark.skipif(not PEAK.exists(), reason="the peak of a process is reset by way of /proc"),
]

LARGE = """
import gc, json, sys
from pathlib import Path
import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.solvers.registry import load_solver
from scheduler.solvers.deadline import Deadline
from tests.support.training_graphs import conv_net, uniform_chain
solver, kind, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
STEPS = {
    "chain": sc.zoo.heterogeneous_chain,
    "equal layers": sc.zoo.uniform_chain,
    "net": conv_net,
    "plain": uniform_chain,
    "transformer": lambda size: sc.zoo.transformer(size, width=64, heads=4, length=64, vocabulary=64),
}

def kibibytes(key):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1])

def ask(step, budget):
    graph, chain = (step, None) if isinstance(step, sc.Graph) else (step.graph, step)
    problem = Problem(graph, parse_budget(budget, graph), chain=chain)
    problem.baseline
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = kibibytes("VmRSS")
    try:
        found = load_solver(solver)(problem, deadline=Deadline(2.0), seed=0)
        answer = [found.schedule is not None, ""]
    except sc.SchedulerError as error:
        answer = [False, f"{type(error).__name__}: {error}"]
    return [len(graph.operations), (kibibytes("VmHWM") - before) / 1024, *answer]

for budget in ("100%", "60%"):
    ask(STEPS[kind](5), budget)  # libraries and kernels are loaded
print(json.dumps(ask(STEPS[kind](size), "70%")))
"""


def stated_mib(solver: str, operations: int) -> float:
    """What the docstring says that a solver takes for so many operations."""
    text = " ".join((import_module(MODULES[solver]).propose.__doc__ or "").split())
    (stated,) = re.findall(r"Memory: at most (\d+) MiB(?: and (\d+) KiB an operation)?[.,]", text)
    return int(stated[0]) + int(stated[1] or 0) * operations / 1024


LARGEST = {
    "checkmate": ("plain", 39, 79),
    "moccasin": ("net", 19, 154),
    "ilp": ("net", 2499, 19_994),
    "dp": ("chain", 1000, 3002),
    "revolve": ("equal layers", 1000, 3002),
    "mixed": ("equal layers", 1000, 3002),
    "hierarchical": ("transformer", 360, 9368),
    "knapsack": ("plain", 5000, 10_001),
    "kusumoto": ("plain", 5000, 10_001),
    "greedy-segments": ("plain", 5000, 10_001),
    "recompute-all": ("plain", 1400, 2801),
}
"""Kind of step, its size, and operations: about as many as the solver takes, or serves in seconds."""
SERVED = [(solver, *LARGEST.get(solver, ("net", 2600, 20_802))) for solver in sc.solver_names()]
SERVED.append(("auto", "chain", 1000, 3002))
REFUSED = [(solver, "net", 2600, 20_802) for solver in ("ilp", "checkmate", "moccasin", "recompute-all")]


@pytest.mark.parametrize(("solver", "kind", "size", "operations"), SERVED + REFUSED)
def test_a_large_step_is_solved_or_refused_within_the_memory_that_is_stated(
    solver: str, kind: str, size: int, operations: int
) -> None:
    tally = BOOK.of("memory of large steps")
    tally.tried += 1
    command = [sys.executable, "-c", LARGE, solver, kind, str(size)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=300)
    tally.accept(ran.returncode == 0, ran.stderr)
    found, grown, scheduled, message = json.loads(ran.stdout)
    assert found == operations
    tally.accept(grown < stated_mib(solver, operations), f"{grown:.0f} MiB")
    if (solver, kind, size, operations) in REFUSED:
        tally.refused += 1
        assert message.startswith("UnsuitableProblemError: ")
        assert 'use "' in message
    else:
        assert not message
    if solver == "auto":
        tally.keep(scheduled, "what others refuse, auto takes")
