"""Compiled kernels: compiling takes none of a search's time, and what is kept serves while its parts are the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

import scheduler.solvers.jit  # noqa: F401  # where the clock hears of compiling
from scheduler.solvers.deadline import Deadline
from tests.support.fake_clock import FakeClock
from tests.support.paths import ROOT

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
ASKS = "import whole; print(whole.leap(1), sum(whole.leap.stats.cache_hits.values()))"


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


def answer(folder: Path, *, step: int, amount: int) -> list[int]:
    """What the kernel says in a process of its own, and how many compiled kernels it took from the cache."""
    (folder / "parts.py").write_text(PARTS.format(step=step, amount=amount))
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    asked = subprocess.run(
        [sys.executable, "-c", ASKS], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return [int(word) for word in asked.stdout.split()]


@pytest.mark.parametrize(("step", "amount", "expected"), [(2, 5, [12, 0]), (3, 1, [6, 0]), (2, 1, [4, 1])])
def test_a_kernel_is_compiled_again_where_what_it_calls_in_another_file_has_changed(
    tmp_path: Path, step: int, amount: int, expected: list[int]
) -> None:
    (tmp_path / "whole.py").write_text(WHOLE)
    assert answer(tmp_path, step=2, amount=1) == [4, 0]
    assert answer(tmp_path, step=step, amount=amount) == expected
