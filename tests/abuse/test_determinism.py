"""The same seed gives the same answer: on one core and two, whatever the hash seed and the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import scheduler as sc
from tests.abuse.tally import BOOK
from tests.support.paths import ROOT

pytestmark = pytest.mark.abuse

ANSWERS = """
import json, os, sys
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, cores[: int(os.environ.get("CORES", len(cores)))])
import scheduler as sc
from tests.support.deep_graphs import deep_graph
from tests.support.training_graphs import conv_net
steps = {
    "net": conv_net(4),
    "forked": sc.zoo.random_layered(16, seed=5),
    "chain": sc.zoo.heterogeneous_chain(10, seed=2),
    "equal": sc.zoo.uniform_chain(9),
    "small net": conv_net(2),
    "small fork": sc.zoo.random_layered(9, seed=5),
    "small chain": sc.zoo.heterogeneous_chain(3, seed=2),
    "small equal": sc.zoo.uniform_chain(4),
    "deep": deep_graph(2),
}
answers = {}
for solver, names in json.loads(sys.argv[1]).items():
    for name in names:
        for budget in ("100%", "75%", "50%"):
            try:
                found = sc.solve(steps[name], budget, solver=solver, time_limit=600.0, seed=7)
            except sc.SchedulerError as error:
                answers[f"{solver} {name} {budget}"] = [type(error).__name__, str(error)]
                continue
            claims = [found.status.name, found.time, found.peak_bytes, str(found.schedule), found.bound]
            claims.append(found.search_space)
            # What `hierarchical` proves of other orders, it proves in a share of its time.
            claims += [found.global_bound] if solver != "hierarchical" else []
            # When `auto` lets others search beside `ilp` is a matter of seconds: it says who searched.
            claims += found.messages if solver != "auto" else []
            answers[f"{solver} {name} {budget}"] = claims
print(json.dumps(answers))
"""

STEPS = ("net", "forked", "chain", "equal")
SMALL = ("small net", "small fork", "small chain", "small equal")
ENDING_ON = {"auto": SMALL, "anneal": SMALL, "checkmate": SMALL, "moccasin": SMALL, "hierarchical": ("deep",)}
"""Steps on which solvers that mostly go on until the time is up end by themselves: otherwise the clock has a say."""
ASKED = {solver: ENDING_ON.get(solver, STEPS) for solver in sc.solver_names()}

SETTINGS = {
    "hash seed 0": {"PYTHONHASHSEED": "0"},
    "hash seed 1, other locale and zone": {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Asia/Kathmandu"},
    "one core": {"PYTHONHASHSEED": "2", "CORES": "1", "OMP_NUM_THREADS": "1"},
    "threads of libraries": {"PYTHONHASHSEED": "3", "OMP_NUM_THREADS": "4", "NUMBA_NUM_THREADS": "1"},
    "optimized, another folder": {"PYTHONHASHSEED": "4", "PYTHONOPTIMIZE": "1", "FOLDER": "/"},
}


def answers(settings: dict[str, str]) -> dict[str, list[object]]:
    """What a process of its own answers under settings."""
    own = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", ANSWERS, json.dumps(ASKED)],
        capture_output=True,
        text=True,
        cwd=own.pop("FOLDER", ROOT),
        env=own,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
def test_an_answer_depends_on_nothing_but_what_was_asked() -> None:
    tally = BOOK.of("determinism")
    expected: dict[str, list[object]] = {}
    with ThreadPoolExecutor(2) as pool:
        answered = list(pool.map(answers, SETTINGS.values()))
    for name, found in zip(SETTINGS, answered, strict=True):
        expected = expected or found
        assert len(found) == 3 * sum(map(len, ASKED.values()))
        tally.tried += len(found)
        for case, answer in found.items():
            tally.accept(answer == expected[case], (name, case, answer, expected[case]))
    for solver in ASKED:
        served = sum(len(answer) > 2 for case, answer in expected.items() if case.startswith(f"{solver} "))
        assert served >= 3, solver
