"""The constraint program of intervals against every schedule of stages with at most two runs per operation."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from functools import partial
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

import scheduler as sc
from scheduler.errors import MissingExtraError, UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solvers.baselines.moccasin import propose
from scheduler.solvers.deadline import Deadline, stopped_by_interrupt
from tests.support.examples import examples
from tests.support.fake_clock import FakeClock
from tests.support.oracle import optimum
from tests.support.stage_oracle import check_against_all_stages, plain_graphs
from tests.support.training_graphs import conv_net, uniform_chain


@settings(max_examples=examples(40))
@given(graph=plain_graphs(), tighter=st.integers(0, 4))
def test_it_is_the_best_of_all_schedules_of_two_intervals(graph: sc.Graph, tighter: int) -> None:
    check_against_all_stages(propose, graph, tighter, most_runs=2)


@pytest.mark.parametrize("budget", range(20, 33, 4))
def test_on_a_chain_of_six_two_runs_per_operation_are_enough(budget: int) -> None:
    graph = uniform_chain(6)
    solution = sc.solve(graph, budget, solver="moccasin", reorder=False)
    assert solution.status is sc.Status.OPTIMAL
    assert solution.time == solution.bound == optimum(graph.to_dict(), budget, "input order")


def test_without_a_schedule_of_two_intervals_nothing_is_claimed_about_others() -> None:
    # x', g and g' of 4 bytes are live with the batch: nothing can be kept, and f0 runs for each backward.
    graph = uniform_chain(5)
    solution = sc.solve(graph, 16, solver="moccasin")
    assert solution.status is sc.Status.UNKNOWN
    assert any("no schedule of two intervals per tensor fits; another one may" in m for m in solution.messages)
    assert optimum(graph.to_dict(), 16, "input order") is not None


def test_an_interval_may_end_after_the_last_first_run_of_a_reader() -> None:
    # a and b read x; a is freed and recomputed at the end, from x, whose readers have all run by then.
    graph = sc.Graph(
        [
            sc.Operation("x", [], ["x"], 8.0),
            sc.Operation("a", ["x"], ["a"], 1.0),
            sc.Operation("b", ["x"], ["b"], 1.0),
            sc.Operation("big", ["b"], ["c"], 1.0),
            sc.Operation("end", ["a", "c"], ["y"], 1.0),
        ],
        [sc.Tensor("x", 1), sc.Tensor("a", 6), sc.Tensor("b", 4), sc.Tensor("c", 4), sc.Tensor("y", 1)],
        results=["y"],
    )
    # During big: b, c and x are 9, with a they are 14; a again beside x and c is 11.
    solution = sc.solve(graph, 11, solver="moccasin", reorder=False)
    assert (solution.status, solution.time) == (sc.Status.OPTIMAL, 13.0)
    assert optimum(graph.to_dict(), 11, "input order") == 13.0


def test_its_bound_says_nothing_about_other_schedules() -> None:
    graph = conv_net(3)
    solution = sc.solve(graph, "70%", solver="moccasin")
    assert solution.search_space == "two intervals"
    assert solution.bound == solution.time > solution.global_bound == Problem(graph, 0).least_time


def test_bytes_are_counted_exactly_however_large() -> None:
    size = 2**53 + 1
    graph = uniform_chain(3, size=size)
    solution = sc.solve(graph, 4 * size, solver="moccasin")
    assert (solution.time, solution.peak_bytes, solution.status) == (10.0, 4 * size, sc.Status.OPTIMAL)
    assert sc.solve(graph, 4 * size - 1, solver="moccasin").status is sc.Status.INFEASIBLE


def test_times_that_are_not_integers_give_a_lower_bound() -> None:
    graph = uniform_chain(3, forward=math.pi, backward=math.e)
    solution = sc.solve(graph, 16, solver="moccasin")
    assert solution.time == pytest.approx(4 * math.pi + 3 * math.e, rel=1e-12)
    assert solution.bound <= solution.time
    assert solution.status is sc.Status.OPTIMAL


def test_the_same_seed_gives_the_same_schedule() -> None:
    graph = conv_net(3)
    first, second = (sc.solve(graph, "70%", solver="moccasin", seed=7) for _ in range(2))
    assert first.schedule == second.schedule


def test_the_time_limit_is_that_of_cp_sat_and_leaves_a_true_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = conv_net(12)
    limits: list[float] = []
    solve = cp_model.CpSolver.solve

    def limited(self: cp_model.CpSolver, model: cp_model.CpModel) -> object:
        limits.append(self.parameters.max_time_in_seconds)
        return solve(self, model)

    monkeypatch.setattr(cp_model.CpSolver, "solve", limited)
    with FakeClock(seconds_per_look=0.25):
        proposal = propose(Problem(graph, Problem(graph, 0).floor.bytes * 2), deadline=Deadline(1.0), seed=0)
    assert limits == [pytest.approx(0.75)]
    # No schedule is faster than one without recomputation.
    assert Problem(graph, 0).baseline.time <= proposal.bound
    assert proposal.bound == math.inf or proposal.bound <= 2 * Problem(graph, 0).baseline.time


def test_out_of_time_it_claims_nothing() -> None:
    proposal = propose(Problem(uniform_chain(6), 24), deadline=Deadline(0), seed=0)
    assert proposal.schedule is None
    assert not proposal.infeasible
    assert proposal.bound <= 20.0


@pytest.mark.parametrize("ends", ["Ctrl-C", "another thread"])
def test_a_search_that_is_stopped_returns_its_answer_with_a_true_bound(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = conv_net(12)
    problem = Problem(graph, Problem(graph, 0).baseline.peak_bytes // 2)
    deadline = Deadline(60)
    stop = partial(os.kill, os.getpid(), signal.SIGINT) if ends == "Ctrl-C" else deadline.stop
    solve = cp_model.CpSolver.solve

    def stopped(self: cp_model.CpSolver, model: cp_model.CpModel) -> object:
        threading.Timer(0.3, stop).start()
        return solve(self, model)

    monkeypatch.setattr(cp_model.CpSolver, "solve", stopped)
    with stopped_by_interrupt(deadline):
        proposal = propose(problem, deadline=deadline, seed=0)
    assert deadline.stopped
    assert problem.baseline.time <= proposal.bound


def test_ctrl_c_works_as_usual_after_a_search() -> None:
    propose(Problem(uniform_chain(3), 16), deadline=Deadline(20), seed=0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_without_or_tools_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(MissingExtraError, match=r"checkpoint-scheduler\[cpsat\]"):
        sc.solve(uniform_chain(3), "80%", solver="moccasin")


def test_if_or_tools_cannot_be_loaded_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", ModuleType("ortools.sat.python"))
    monkeypatch.delitem(sys.modules, "ortools.sat.python.cp_model", raising=False)
    with pytest.raises(MissingExtraError, match=r"highspy<1\.14"):
        sc.solve(uniform_chain(3), "80%", solver="moccasin")


def test_a_graph_that_it_cannot_express_is_rejected() -> None:
    with pytest.raises(UnsuitableProblemError, match='"moccasin" takes up to 160 operations'):
        sc.solve(uniform_chain(80), "50%", solver="moccasin")
    view = sc.Graph(
        [sc.Operation("a", [], ["x"], 1.0), sc.Operation("view", ["x"], ["y"], 0.0)],
        [sc.Tensor("x", 1), sc.Tensor("y", 1, "x")],
        results=["y"],
    )
    with pytest.raises(UnsuitableProblemError, match="share a storage"):
        sc.solve(view, 10, solver="moccasin")
