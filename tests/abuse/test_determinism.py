"""The same seed gives the same answer: on one core and two, whatever the hash seed and the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import scheduler as sc
from tests.abuse.tally import BOOK

pytestmark = pytest.mark.abuse
ROOT = Path(__file__).parents[2]

ANSWERS = """
import json, sys
import scheduler as sc
from tests.training_graphs import conv_net
steps = {
    "net": conv_net(4),
    "forked": sc.zoo.random_layered(16, seed=5),
    "chain": sc.zoo.heterogeneous_chain(10, seed=2),
    "equal": sc.zoo.uniform_chain(9),
}
answers = {}
for solver in sys.argv[1].split(","):
    for name, step in steps.items():
        for budget in ("100%", "75%", "50%"):
            try:
                found = sc.solve(step, budget, solver=solver, time_limit=600.0, seed=7)
            except sc.SchedulerError as error:
                answers[f"{solver} {name} {budget}"] = [type(error).__name__, str(error)]
                continue
            claims = [found.status.name, found.time, found.peak_bytes, str(found.schedule), list(found.messages)]
            answers[f"{solver} {name} {budget}"] = [*claims, found.bound, found.bound_any, found.search_space]
print(json.dumps(answers))
"""

ENDING = [name for name in sc.solver_names() if name not in ("auto", "anneal", "intervals", "blocks", "milp")]
"""Solvers that end on such steps by themselves: where the clock ends a search, it has a say in the answer."""

SETTINGS = {
    "hash seed 0": {"PYTHONHASHSEED": "0"},
    "hash seed 1, other locale and zone": {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Asia/Kathmandu"},
    "one core": {"PYTHONHASHSEED": "2", "CORES": "1", "OMP_NUM_THREADS": "1"},
    "threads of libraries": {"PYTHONHASHSEED": "3", "OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "1"},
    "optimised, another folder": {"PYTHONHASHSEED": "4", "PYTHONOPTIMIZE": "1", "FOLDER": "/"},
}


def answers(settings: dict[str, str]) -> dict[str, list[object]]:
    """What a process of its own answers under settings."""
    own = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    cores = sorted(os.sched_getaffinity(0))[: int(own.pop("CORES", "0")) or None]
    ran = subprocess.run(
        [sys.executable, "-c", ANSWERS, ",".join(ENDING)],
        capture_output=True,
        text=True,
        cwd=own.pop("FOLDER", ROOT),
        env=own,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_an_answer_depends_on_nothing_but_what_was_asked() -> None:
    tally = BOOK.of("determinism")
    expected: dict[str, list[object]] = {}
    for name, settings in SETTINGS.items():
        found = answers(settings)
        expected = expected or found
        assert len(found) == 12 * len(ENDING)
        tally.tried += len(found)
        for case, answer in found.items():
            tally.accept(answer == expected[case], (name, case, answer, expected[case]))
    assert sum(len(answer) > 2 for answer in expected.values()) > 60, "most cases are served"
