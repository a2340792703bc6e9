"""The default solver: the best of its parts, ended by the first proof."""

from __future__ import annotations

import contextlib
import time

import pytest

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.solvers.auto import PARTS
from tests.training_graphs import conv_net, uniform_chain


def branches(count: int) -> sc.Graph:
    """Branches of a large tensor and a small result each: one at a time needs no recomputation."""
    numbers = range(count)
    return sc.Graph(
        [
            *(sc.Operation(f"large{i}", [], [f"large{i}"], 1.0) for i in numbers),
            *(sc.Operation(f"small{i}", [f"large{i}"], [f"small{i}"], 1.0) for i in numbers),
        ],
        [*(sc.Tensor(f"large{i}", 100) for i in numbers), *(sc.Tensor(f"small{i}", 1) for i in numbers)],
        results=[f"small{i}" for i in numbers],
    )


def test_another_order_is_found_where_it_saves_recomputation() -> None:
    graph = branches(6)
    # One branch after another: 5 small results beside the last large tensor and its result.
    solution = sc.solve(graph, 106, time_limit=20)
    assert (solution.time, solution.search_space, solution.status) == (12.0, "any order", sc.Status.OPTIMAL)
    given = sc.solve(graph, 106, order="given", time_limit=20)
    # All large tensors come first, each dropped for the next: all six are made again.
    assert given.time == 18.0


@pytest.mark.parametrize("share", ["80%", "60%", "45%"])
def test_no_part_is_better(share: str) -> None:
    graph = conv_net(5)
    best = sc.solve(graph, share, time_limit=8).time
    for part in PARTS:
        with contextlib.suppress(UnsuitableProblemError):
            assert best <= sc.solve(graph, share, solver=part, time_limit=2).time


def test_a_proof_ends_the_search() -> None:
    started = time.monotonic()
    assert sc.solve(uniform_chain(6), 24, time_limit=60).status is sc.Status.OPTIMAL
    assert time.monotonic() - started < 20
