"""Solutions: proposals that are simulated, with a one-line repr and a summary."""

from __future__ import annotations

import math

import pytest

import scheduler as sc
from scheduler.problem import Problem
from scheduler.solution import grade, relative_gap, relative_overhead
from tests.support.plans import TWICE
from tests.support.training_graphs import uniform_chain

GRAPH = uniform_chain(2)
"""Two layers of 4 bytes: saving everything takes 6 s and 16 bytes, of which 4 are resident."""


def graded(schedule: sc.Schedule | None, budget_bytes: int = 17, **claims: object) -> sc.Solution:
    proposal = sc.Proposal(schedule, "by hand", **claims)  # type: ignore[arg-type]
    return grade(Problem(GRAPH, budget_bytes), proposal, solver="me", seconds=0.25)


def test_a_schedule_slower_than_its_bound_is_feasible_with_a_gap() -> None:
    # f0 runs twice: 7 s instead of 6.
    solution = graded(TWICE)
    assert (solution.status, solution.time, solution.bound) == (sc.Status.FEASIBLE, 7.0, 6.0)
    assert solution.overhead == pytest.approx(1 / 6)
    assert solution.gap == solution.global_gap == pytest.approx(1 / 7)


def test_a_bound_that_meets_the_time_makes_the_schedule_optimal_in_its_space() -> None:
    solution = graded(TWICE, bound=7.0)
    assert (solution.status, solution.search_space) == (sc.Status.OPTIMAL, "by hand")
    assert (solution.gap, solution.global_gap) == (0.0, pytest.approx(1 / 7))


def test_a_schedule_over_the_budget_counts_as_none() -> None:
    solution = graded(TWICE, 15)
    assert (solution.status, solution.schedule, solution.simulation) == (sc.Status.UNKNOWN, None, None)
    assert solution.messages == (
        "the best schedule found needs 16 B (100.0%), which exceeds the budget of 15 B (91.7%)",
    )


def test_a_solution_is_shown_in_one_line() -> None:
    assert repr(graded(TWICE)) == (
        "Solution(FEASIBLE in by hand, 16 B of 17 B, overhead 16.67%, gap 14.29%, solver='me')"
    )
    assert repr(graded(None)) == "Solution(UNKNOWN within 17 B, solver='me')"


def test_the_summary_of_a_solution_has_one_fact_per_line() -> None:
    # Saving everything adds 12 bytes to the 4 resident ones: 16 bytes are 100 %, 17 are 108.3 %.
    assert graded(TWICE, messages=("by hand",)).summary().splitlines() == [
        "status        FEASIBLE: fits, gap above 1e-6: use it, or allow more time to close the gap",
        "budget        17 B (108.3%)",
        "resident      4 B",
        "peak          16 B (100.0%) instead of 16 B",
        "time          7 s, overhead 16.6667%",
        "bound         6 s, gap 14.2857% in by hand",
        "global bound  6 s, gap 14.2857% over all schedules",
        "smallest      16 B (100.0%) is the smallest peak known",
        "solver        me, 0.25 s",
        "note          by hand",
    ]


def test_the_summary_without_a_schedule_says_why() -> None:
    assert graded(None, infeasible=True, messages=("because",)).summary().splitlines() == [
        "status    INFEASIBLE: proven: no schedule fits; raise the budget or shrink the step",
        "budget    17 B (108.3%)",
        "resident  4 B",
        "smallest  16 B (100.0%) is the smallest peak known",
        "solver    me, 0.25 s",
        "note      because",
    ]


def test_ratios_without_a_schedule_or_without_time_are_defined() -> None:
    assert (relative_gap(math.inf, 3.0), relative_gap(0.0, 0.0), relative_gap(4.0, 3.0)) == (1.0, 0.0, 0.25)
    assert (relative_overhead(math.inf, 3.0), relative_overhead(0.0, 0.0)) == (math.inf, 0.0)
    assert (relative_overhead(1.0, 0.0), relative_overhead(4.0, 2.0)) == (math.inf, 1.0)
