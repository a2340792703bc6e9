"""Check the floor from moments against counts by hand and the exhaustive oracle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem, floor
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.moments import FirstRuns, MomentProgram, proven_floor
from tests.support import oracle
from tests.support.strategies import graphs, joint_graphs


def graph(*operations: sc.Operation, results: list[str], **sizes: int) -> sc.Graph:
    return sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], ["x"], results)


# While "big" runs, its output (10), its input (1) and the draw (3), which cannot be repeated, are live.
KEPT_DRAW = graph(
    sc.Operation("draw", ["x"], ["r"], 1.0, repeatable=False),
    sc.Operation("small", ["r"], ["h"], 1.0),
    sc.Operation("big", ["h"], ["y"], 1.0),
    sc.Operation("reduce", ["y"], ["w"], 1.0),
    sc.Operation("last", ["w", "r"], ["z"], 1.0),
    results=["z"],
    x=0, r=3, h=1, y=10, w=0, z=1,
)  # fmt: skip
# In the input order "big" (10) runs while g (4) and dw (6) are live. In any order dw can wait: y, e and g are 15.
WAITING_GRADIENT = graph(
    sc.Operation("backward", ["x"], ["g"], 1.0, repeatable=False),
    sc.Operation("weight", ["g"], ["dw"], 1.0, repeatable=False),
    sc.Operation("big", ["g"], ["y"], 1.0),
    sc.Operation("end", ["y"], ["e"], 1.0),
    results=["dw", "e"],
    x=0, g=4, dw=6, y=10, e=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("graph", "reorder", "alone", "least"),
    [(KEPT_DRAW, True, 11, 14), (WAITING_GRADIENT, True, 14, 15), (WAITING_GRADIENT, False, 14, 20)],
)
def test_what_cannot_be_recomputed_counts_at_the_moments_before_its_use(
    graph: sc.Graph, reorder: bool, alone: int, least: int
) -> None:
    problem = Problem(graph, 0, reorder)
    assert oracle.least_peak(graph.to_dict(), "any" if reorder else "input order") == least
    assert problem.floor.bytes == alone
    assert proven_floor(problem, Deadline(60.0), enough_bytes=10**9).bytes == least


def test_the_search_for_a_floor_ends_when_it_is_enough() -> None:
    assert proven_floor(Problem(KEPT_DRAW, 0), Deadline(60.0), enough_bytes=11) == floor(KEPT_DRAW)
    assert proven_floor(Problem(KEPT_DRAW, 0), Deadline(0.0), enough_bytes=14) == floor(KEPT_DRAW)


def test_the_smallest_budget_comes_with_the_floor_of_its_moment() -> None:
    assert sc.minimum_budget(KEPT_DRAW, time_limit=60.0) == (14, 14, "big")


@pytest.mark.parametrize("solver", ["auto", "greedy"])
def test_a_budget_below_the_floor_is_infeasible_whatever_the_solver_knows(solver: str) -> None:
    solution = sc.solve(KEPT_DRAW, 12, solver=solver, time_limit=20.0)
    assert solution.status is sc.Status.INFEASIBLE
    assert solution.messages[0].startswith(
        'no schedule fits 12 B (85.7%): "big" and what must stay in memory while it runs need 14 B (100.0%).'
        " The smallest possible schedule needs 14 B"
    )


@st.composite
def graphs_with_single_runs(draw: st.DrawFn) -> sc.Graph:
    """Draw a graph some of whose operations run once."""
    drawn = draw(st.one_of(graphs(max_operations=7), joint_graphs()))
    operations = list(drawn.operations)
    for task in drawn.index.tasks:
        if len(task) == 1 and draw(st.integers(0, 2)) == 0:
            operations[task[0]] = replace(operations[task[0]], repeatable=False)
    return sc.Graph(operations, drawn.tensors, drawn.resident, drawn.results, drawn.required)


@settings(max_examples=60, deadline=None)
@given(graphs_with_single_runs(), st.booleans())
def test_no_moment_needs_more_than_the_least_peak(graph: sc.Graph, reorder: bool) -> None:
    least = oracle.least_peak(graph.to_dict(), "any" if reorder else "input order")
    known = FirstRuns.of(graph, reorder=reorder)
    for moment in known.moments():
        assert MomentProgram(known, moment, Deadline(60.0)).least_bytes(Deadline(60.0)) <= least
