"""Compiling takes none of the time that a search has."""

from __future__ import annotations

import time

import numba

import scheduler.solvers.compilation  # noqa: F401  # where the clock hears of compiling
from scheduler.solvers.registry import Deadline


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

    deadline, started = Deadline(60.0), time.monotonic()
    assert fibonacci(10) == 55
    compiling = time.monotonic() - started
    assert 60.0 - deadline.remaining < compiling / 2
    time.sleep(compiling)
    assert 60.0 - deadline.remaining >= compiling
