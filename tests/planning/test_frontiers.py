"""Frontiers: one solution per budget, each as good as any schedule or bound of the others."""

from __future__ import annotations

import os
from itertools import pairwise
from threading import Barrier

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import InvalidBudgetError, InvalidOptionError, UnknownSolverError
from scheduler.planning import frontiers
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from tests.support.examples import examples
from tests.support.fake_clock import FakeClock
from tests.support.oracle import optimum
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import conv_net, uniform_chain


@settings(max_examples=examples(40))
@given(graph=st.one_of(graphs(max_operations=7), joint_graphs(max_layers=2)), data=st.data())
def test_every_row_agrees_with_the_oracle_and_no_larger_budget_is_slower(graph: sc.Graph, data: st.DataObject) -> None:
    peak = sc.solve(graph, 2**40, solver="save-all").peak_bytes
    budgets = data.draw(st.lists(st.integers(0, peak + 1), min_size=1, max_size=4))
    solver = data.draw(st.sampled_from(["auto", "ilp", "greedy"]))
    rows = sc.frontier(graph, budgets, solver=solver, time_limit=20.0).rows
    assert [row.budget_bytes for row in rows] == sorted(set(budgets))
    for row in rows:
        best = optimum(graph.to_dict(), row.budget_bytes, "any")
        if row.schedule is None:
            assert row.status is not sc.Status.INFEASIBLE or best is None
            continue
        assert sc.simulate(graph, row.schedule).peak_bytes <= row.budget_bytes
        assert row.global_bound * (1 - 1e-9) <= best <= row.time * (1 + 1e-9)
    for smaller, larger in pairwise(rows):
        assert larger.time <= smaller.time
        assert larger.global_bound <= smaller.global_bound or smaller.schedule is None


def test_schedules_and_bounds_of_one_budget_are_used_at_the_others() -> None:
    # The oracle knows each budget on its own; rows share what they find.
    graph = uniform_chain(6)
    rows = sc.frontier(graph, [24, 25, 26, 27, 28], solver="ilp").rows
    times = [row.time for row in rows]
    assert times == sorted(times, reverse=True)
    assert times == [optimum(graph.to_dict(), budget, "any") for budget in range(24, 29)]


def test_the_default_budgets_run_from_the_smallest_peak_to_that_of_saving_everything() -> None:
    graph = conv_net(4)
    with FakeClock(seconds_per_look=0.01):
        rows = sc.frontier(graph, time_limit=6).rows
    assert len(rows) == 10
    assert rows[0].budget_bytes < 0.5 * rows[-1].budget_bytes
    assert rows[0].budget_bytes >= sc.minimum_budget(graph, time_limit=1).floor_bytes
    assert rows[-1].budget_bytes == rows[-1].baseline_peak_bytes
    assert rows[-1].overhead == 0
    assert all(row.schedule is not None for row in rows)


def test_the_time_limit_is_for_all_budgets_together() -> None:
    with FakeClock(seconds_per_look=0.01, seconds_per_call=1e-7) as fake:
        rows = sc.frontier(conv_net(30), [f"{share}%" for share in range(30, 60, 5)], time_limit=3).rows
        assert fake.seconds < 3 + 2
    assert len(rows) == 6


def test_every_budget_has_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    fake = FakeClock()
    both = Barrier(2, action=lambda: fake.advance(0.25), timeout=60)

    def search(problem: Problem, solver: str, deadline: Deadline, seed: int) -> Proposal:
        limits.append(deadline.remaining)
        while not deadline.passed:
            both.wait()  # time passes only while two searches run; one that has outlasted all others fails here
        return Proposal(None, "input order")

    monkeypatch.setattr(frontiers, "propose_with_bounds", search)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with fake:
        sc.frontier(uniform_chain(6), range(20, 28), time_limit=8.0)
    assert limits == pytest.approx([2.0] * 8)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"budgets": []}, InvalidOptionError, "at least one"),
        ({"budgets": "60%"}, InvalidOptionError, "sequence"),
        ({"budgets": ["8G"]}, InvalidBudgetError, "8G"),
        ({"solver": "magic"}, UnknownSolverError, "auto"),
        ({"time_limit": 0}, InvalidOptionError, "above 0"),
        ({"seed": -1}, InvalidOptionError, "seed"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        sc.frontier(uniform_chain(3), **{"budgets": [20], **options})


def test_a_frontier_is_shown_in_one_line_and_as_a_table() -> None:
    # Resident are 4 bytes and saving everything takes 20; 16 cost one more forward, and less is impossible.
    frontier = sc.frontier(uniform_chain(3), [20, 16, 15], solver="ilp")
    assert repr(frontier) == "Frontier(3 budgets from 15 B to 20 B)"
    assert frontier.summary().splitlines() == [
        "budget         peak           overhead  gap    global gap  status      search space",
        "15 B (68.8%)   -              -         -      -           INFEASIBLE  -",
        "16 B (75.0%)   16 B (75.0%)   11.11%    0.00%  0.00%       OPTIMAL     any order",
        "20 B (100.0%)  20 B (100.0%)  0.00%     0.00%  0.00%       OPTIMAL     any order",
    ]
    assert "<td>16 B (75.0%)</td><td>11.11%</td>" in frontier._repr_html_()
    assert repr(sc.Frontier(())) == "Frontier(0 budgets)"
