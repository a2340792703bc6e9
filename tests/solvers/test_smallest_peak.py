"""The smallest peak: of what is known, and no further than the budget asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import scheduler as sc
from scheduler.problem import Problem, save_everything
from scheduler.schedule import Schedule
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.smallest_peak import smallest_peak, squeeze
from tests.support import oracle
from tests.support.training_graphs import uniform_chain

GRAPH = uniform_chain(5, size=1)
LEAST = oracle.least_peak(GRAPH.to_dict())
EITHER = pytest.mark.parametrize("search", [smallest_peak, squeeze])

Search = Callable[[Problem, Deadline], tuple[int, Schedule]]


@EITHER
def test_without_a_budget_the_least_peak_is_found(search: Search) -> None:
    peak, schedule = search(Problem(GRAPH, 0), Deadline(2.0))
    assert peak == sc.simulate(GRAPH, schedule).peak_bytes == LEAST


@EITHER
def test_a_schedule_within_the_budget_is_small_enough(search: Search) -> None:
    whole = Problem(GRAPH, 0).baseline.peak_bytes
    assert search(Problem(GRAPH, whole), Deadline(2.0)) == (whole, save_everything(GRAPH))
    assert search(Problem(GRAPH, whole - 1), Deadline(2.0))[0] < whole


@EITHER
def test_a_start_within_the_budget_ends_the_search(search: Search) -> None:
    _, start = smallest_peak(Problem(GRAPH, 0), Deadline(2.0))
    assert search(Problem(GRAPH, LEAST, starts=(start,)), Deadline(1e-9)) == (LEAST, start)
