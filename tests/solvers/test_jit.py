"""Compiled kernels: they take no time of a search, and cached code is used only while nothing changed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.solvers import jit  # pauses the clock while numba compiles
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import MODULES, load_solver
from tests.support.fake_clock import FakeClock
from tests.support.paths import ROOT
from tests.support.training_graphs import conv_net

PARTS = """
from scheduler.solvers.jit import compiled
STEP = {step}
@compiled()
def advance(x):
    return x + {amount}
"""
WHOLE = """
from parts import STEP, advance
from scheduler.solvers.jit import compiled
@compiled()
def leap(x):
    return later(advance(x))
@compiled()
def later(x):
    return STEP * x
"""
QUESTION = "import whole; print(whole.leap(1), sum(whole.leap.stats.cache_hits.values()))"
PAIR = """
from typing import NamedTuple
class Pair(NamedTuple):
    {fields[0]}: int
    {fields[1]}: int
"""
TAKES_PAIR = """
from pair import Pair
from scheduler.solvers.jit import compiled
@compiled()
def advance(pair):
    return pair.first - pair.second
@compiled()
def leap(x):
    return advance(Pair(x, 10 * x))
"""


@pytest.mark.long(70)
def test_every_solver_finds_a_schedule_for_some_step() -> None:
    """It compiles all kernels, and starts first: all other tests find them in the cache."""
    steps = (conv_net(3), sc.zoo.uniform_chain(6), sc.zoo.heterogeneous_chain(6), sc.zoo.resnet())

    def serves(solver: str, step: sc.Graph | sc.Chain) -> bool:
        with FakeClock(seconds_per_look=0.1), contextlib.suppress(UnsuitableProblemError):
            return sc.solve(step, "75%", solver=solver, time_limit=30.0).schedule is not None
        return False

    serving = {solver for solver in sc.solver_names() if any(serves(solver, step) for step in steps)}
    assert serving == set(sc.solver_names()) - {"save-all"}  # which takes 100 %


def test_compiling_takes_no_time_from_a_search() -> None:
    @numba.njit
    def one() -> int:
        return 1

    assert one() == 1  # numba itself is loaded

    @numba.njit
    def fibonacci(number: int) -> int:
        before, after = 0, 1
        for _ in range(number):
            before, after = after, before + after
        return before

    with FakeClock(seconds_per_call=1e-6) as fake:
        deadline = Deadline(60.0)
        assert fibonacci(10) == 55
        compiling = fake.seconds
        assert 60.0 - deadline.remaining < compiling / 2
        while fake.seconds < 2 * compiling:
            abs(1)  # a call
        assert 60.0 - deadline.remaining >= compiling


def test_importing_a_solver_and_loading_its_kernels_take_no_time_from_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeClock() as fake:
        monkeypatch.setattr(numba, "slow", fake, raising=False)
        (tmp_path / "slow_solver.py").write_text("import numba\nnumba.slow.advance(5.0)\npropose = None\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(MODULES, "slow", "slow_solver")
        deadline = Deadline(1.0)
        load_solver("slow")
        assert fake.seconds == 5.0
        kernels = SimpleNamespace(load_overload=lambda: fake.advance(5.0), save_overload=None)
        jit._fault_tolerant(kernels).load_overload()
        assert fake.seconds == 10.0
        assert deadline.remaining == pytest.approx(1.0)


def ask(folder: Path, question: str) -> list[int]:
    """Run a question in a process of its own; return the numbers that it prints."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    asked = subprocess.run(
        [sys.executable, "-c", question], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [int(word) for word in asked.stdout.split()]


def answer(folder: Path, *, step: int, amount: int) -> list[int]:
    """What the kernel returns, and how many compiled kernels it took from the cache."""
    (folder / "parts.py").write_text(PARTS.format(step=step, amount=amount))
    return ask(folder, QUESTION)


@pytest.mark.parametrize(("step", "amount", "expected"), [(2, 5, [12, 0]), (3, 1, [6, 0]), (2, 1, [4, 1])])
def test_a_kernel_is_compiled_again_where_what_it_calls_in_another_file_has_changed(
    tmp_path: Path, step: int, amount: int, expected: list[int]
) -> None:
    (tmp_path / "whole.py").write_text(WHOLE)
    assert answer(tmp_path, step=2, amount=1) == [4, 0]
    assert answer(tmp_path, step=step, amount=amount) == expected


@pytest.mark.parametrize("question", [QUESTION, "import pair, whole; print(whole.advance(pair.Pair(1, 10)), 0)"])
def test_a_kernel_is_compiled_again_where_the_fields_of_a_named_tuple_have_another_order(
    tmp_path: Path, question: str
) -> None:
    (tmp_path / "whole.py").write_text(TAKES_PAIR)
    (tmp_path / "pair.py").write_text(PAIR.format(fields=("first", "second")))
    assert ask(tmp_path, question) == [-9, 0]
    (tmp_path / "pair.py").write_text(PAIR.format(fields=("second", "first")))
    assert ask(tmp_path, question) == [9, 0]


@pytest.mark.parametrize("missing", ["_index_key", "load_overload", "save_overload"])
def test_without_the_private_names_of_numba_a_kernel_is_compiled_and_not_cached(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OtherCache:
        """The cache of a version of numba that lacks one name."""

        def __init__(self, function: object) -> None:
            for name in {"_index_key", "load_overload", "save_overload"} - {missing}:
                setattr(self, name, None)

    monkeypatch.setattr(jit, "FunctionCache", OtherCache)
    kernel = jit.compiled()(lambda x: x + 1)
    assert kernel(1) == 2
    assert not kernel.stats.cache_hits
    assert not isinstance(kernel._cache, OtherCache)


def test_the_version_of_numba_is_bounded() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (needed,) = [line for line in pyproject["project"]["dependencies"] if line.startswith("numba")]
    assert ">=0.61,<0.69" in needed
    assert (0, 61) <= tuple(map(int, numba.__version__.split(".")[:2])) < (0, 69)
