"""What the package builds on is missing, fails or dies: the best answer without it, or an error that mends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import highspy
import pulp
import pytest

import scheduler as sc
from tests.abuse.tally import BOOK
from tests.support.oracle import optimum
from tests.support.paths import ROOT
from tests.support.plans import layered_plan
from tests.support.training_graphs import conv_net, uniform_chain

pytestmark = pytest.mark.abuse
SOLVERS = [name for name in sc.solver_names() if name not in ("moccasin", "revolve", "mixed")]


def no_highs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)


def failing_highs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("HiGHS: internal error")

    monkeypatch.setattr(highspy.Highs, "run", fail)


def highs_that_solves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)


def no_cbc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_highs(monkeypatch, tmp_path)
    monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(tmp_path / "nothing"))


def cbc_of(script: str) -> Callable[[pytest.MonkeyPatch, Path], None]:
    """What stands in for CBC: a script, which is started as CBC would be."""

    def put(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        no_highs(monkeypatch, tmp_path)
        path = tmp_path / "cbc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", str(path))

    return put


FAULTS = {
    "HiGHS is missing": no_highs,
    "HiGHS fails": failing_highs,
    "HiGHS solves nothing": highs_that_solves_nothing,
    "both are missing": no_cbc,
    "CBC is killed": cbc_of("kill -9 $$"),
    "CBC fails": cbc_of("exit 1"),
    "CBC writes nonsense": cbc_of('for last; do :; done; echo nonsense | tee solution cbc.sol > "$last"'),
}


@pytest.mark.filterwarnings("ignore")  # of PuLP, about what it was made to run
@pytest.mark.parametrize("fault", FAULTS)
def test_without_an_integer_program_every_answer_is_still_true(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tally = BOOK.of("HiGHS, CBC missing or ill")
    graph = uniform_chain(3)
    data = graph.to_dict()
    FAULTS[fault](monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    for solver in SOLVERS:
        for budget in (9, 12, 15, 16, 20, 40):
            solution = tally.attempt(sc.solve, graph, budget, solver=solver, time_limit=2.0)
            if not isinstance(solution, sc.Solution):
                continue
            best = optimum(data, budget, "any")
            tally.accept(solution.status is not sc.Status.INFEASIBLE or best is None, (solver, budget))
            tally.accept(best is None or solution.global_bound <= best * (1 + 1e-9), (solver, budget))
            if solution.schedule is not None:
                tally.accept(best is not None and best <= solution.time * (1 + 1e-9), (solver, budget))
            if solver == "auto" and best is not None:
                tally.keep(solution.schedule is not None, "auto has the greedy answer at least")


BLOCKED = """
import runpy, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.argv = ["scheduler", *sys.argv[2:]]
runpy.run_module("scheduler", run_name="__main__")
"""
NODE_LINK = """{"directed": true, "multigraph": false, "graph": {}, "nodes": [
    {"id": "a", "cost": 1, "size": 4}, {"id": "b", "cost": 1, "size": 4}], "links": [{"source": "a", "target": "b"}]}"""


@pytest.mark.parametrize(
    ("missing", "command", "code", "said"),
    [
        ("torch", ["models"], 2, 'pip install "checkpoint-scheduler[torch]"'),
        ("torch", ["trace", "gpt2", "-o", "graph.json"], 2, 'pip install "checkpoint-scheduler[torch]"'),
        ("torch", ["train", "gpt2", "--budget", "60%"], 2, 'pip install "checkpoint-scheduler[torch]"'),
        ("torch", ["max-batch", "gpt2", "--budget", "1GiB"], 2, 'pip install "checkpoint-scheduler[torch]"'),
        ("transformers", ["trace", "hf-bert", "-o", "graph.json"], 2, 'pip install "checkpoint-scheduler[models]"'),
        ("matplotlib", ["report", "plan.json", "-o", "page.html"], 2, 'pip install "checkpoint-scheduler[plot]"'),
        ("matplotlib", ["frontier", "net.json", "--plot", "a.svg"], 2, 'pip install "checkpoint-scheduler[plot]"'),
        ("matplotlib", ["compare", "net.json", "--plot", "a/"], 2, 'pip install "checkpoint-scheduler[plot]"'),
        (
            "ortools",
            ["plan", "net.json", "--budget", "80%", "--solver", "moccasin"],
            2,
            '"checkpoint-scheduler[cpsat]"',
        ),
        ("torch,matplotlib,pandas,ortools,transformers", ["plan", "net.json", "--budget", "80%"], 0, "planning"),
        ("torch,matplotlib,pandas,ortools,transformers", ["verify", "plan.json"], 0, ""),
        ("torch,matplotlib,pandas,ortools,transformers", ["export", "plan.json", "-o", "trace.json"], 0, ""),
        ("highspy", ["plan", "net.json", "--budget", "80%", "--time-limit", "5"], 0, "planning"),
        ("numpy", ["plan", "net.json", "--budget", "80%"], 2, "numpy is not installed"),
        ("numpy", ["doctor"], 2, "numpy is not installed"),
        ("numpy,numba,networkx,pulp,highspy", ["verify", "plan.json"], 2, "pip install --force-reinstall"),
        ("networkx", ["plan", "link.json", "--budget", "80%"], 2, "networkx is not installed"),
        ("networkx", ["plan", "net.json", "--budget", "80%"], 0, "planning"),
        ("numba", ["plan", "net.json", "--budget", "80%"], 2, "numba"),
        ("pulp", ["plan", "net.json", "--budget", "80%"], 2, "pulp"),
    ],
)
def test_a_command_without_a_part_answers_or_says_what_to_install(
    missing: str, command: list[str], code: int, said: str, tmp_path: Path
) -> None:
    sc.write_graph(conv_net(2), tmp_path / "net.json")
    (tmp_path / "link.json").write_text(NODE_LINK)
    layered_plan().save(tmp_path / "plan.json")
    tally = BOOK.of("parts that are not installed")
    tally.tried += 1
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED, missing, *command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        check=False,
    )
    tally.accept(ran.returncode == code, ran)
    assert "Traceback" not in ran.stderr, ran.stderr
    assert said in ran.stderr


CACHES = """
import json, sys
import numba.core.caching as caching
import errno, os, pickle
def fail(number):
    def act(*arguments):
        raise OSError(number, os.strerror(number))
    return act
fault = sys.argv[1]
if fault == "unwritable":
    caching._CacheLocator.ensure_cache_path = fail(errno.EROFS)
elif fault == "full":
    caching.IndexDataCacheFile._save_index = caching.IndexDataCacheFile._save_data = fail(errno.ENOSPC)
    caching.IndexDataCacheFile.load = lambda self, key: None
elif fault == "damaged":
    caching.IndexDataCacheFile._load_index = lambda self: pickle.loads(b"damaged")
import scheduler as sc
from tests.support.training_graphs import conv_net
solution = sc.solve(conv_net(4), "70%", solver="greedy")
print(json.dumps([solution.status.name, solution.time, solution.peak_bytes, str(solution.schedule)]))
"""


def test_kernels_run_whatever_becomes_of_their_cache() -> None:
    tally = BOOK.of("numba's cache")
    answers = {}
    for fault in ("none", "unwritable", "full", "damaged"):
        tally.tried += 1
        ran = subprocess.run(
            [sys.executable, "-c", CACHES, fault], capture_output=True, text=True, cwd=ROOT, check=False
        )
        assert ran.returncode == 0, ran.stderr
        answers[fault] = json.loads(ran.stdout)
    for fault, answer in answers.items():
        tally.accept(answer == answers["none"], fault)
