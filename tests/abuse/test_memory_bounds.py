"""Large steps: each solver keeps to its bound on memory, and what one refuses another takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import scheduler as sc
from tests.abuse.tally import BOOK

pytestmark = pytest.mark.abuse
ROOT = Path(__file__).parents[2]
MOST_MIB = 1024
"""What a solver may take beyond the step itself; with kernels and libraries, some 150 of it are taken anyway."""

LARGE = """
import json, resource, sys
import scheduler as sc
from tests.training_graphs import conv_net
solver, kind = sys.argv[1:]
step = sc.zoo.heterogeneous_chain(1000) if kind == "chain" else conv_net(2600)
graph = step.graph if kind == "chain" else step
operations = len(graph.operations)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    found = sc.solve(step, "90%", solver=solver, time_limit=2.0)
    answer = [found.status.name, found.schedule is not None, ""]
except sc.SchedulerError as error:
    answer = [type(error).__name__, False, str(error)]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([operations, grown / 1024, *answer]))
"""


GENERAL = ("save-all", "recompute-all", "greedy", "cuts", "anneal", "blocks", "milp", "intervals", "auto")


@pytest.mark.parametrize(
    ("solver", "kind"),
    [(solver, "chain") for solver in sc.solver_names()] + [(solver, "net") for solver in GENERAL],
)
def test_a_large_step_is_solved_or_refused_within_the_memory_that_is_promised(solver: str, kind: str) -> None:
    """A chain of 1000 layers, 3002 operations; a net of 20802, which is too large for some."""
    tally = BOOK.of("memory of large steps")
    tally.tried += 1
    ran = subprocess.run(
        [sys.executable, "-c", LARGE, solver, kind], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )
    tally.accept(ran.returncode == 0, ran.stderr)
    operations, grown, status, scheduled, message = json.loads(ran.stdout)
    assert operations == (20_802 if kind == "net" else 3002)
    tally.accept(grown < MOST_MIB, f"{grown:.0f} MiB")
    tally.accept(status in ("OPTIMAL", "FEASIBLE", "UNKNOWN", "UnsuitableProblemError"), status)
    if status == "UnsuitableProblemError":
        tally.refused += 1
        assert 'use "' in message
        assert solver != "auto"
    if solver == "auto":
        tally.keep(scheduled, "what others refuse, auto takes")
