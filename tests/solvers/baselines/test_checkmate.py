"""The integer program of stages against every schedule of stages, simulated one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solvers.baselines.checkmate import propose
from scheduler.solvers.deadline import Deadline
from tests.support.examples import examples
from tests.support.fake_clock import FakeClock
from tests.support.oracle import optimum
from tests.support.stage_oracle import check_against_all_stages, plain_graphs
from tests.support.training_graphs import conv_net, uniform_chain


@settings(max_examples=examples(40))
@given(graph=plain_graphs(), tighter=st.integers(0, 4))
def test_it_is_the_best_of_all_schedules_of_stages(graph: sc.Graph, tighter: int) -> None:
    check_against_all_stages(propose, graph, tighter)


@pytest.mark.parametrize("budget", range(16, 33, 4))
def test_stages_contain_the_optimum_of_a_chain_of_six(budget: int) -> None:
    graph = uniform_chain(6)
    solution = sc.solve(graph, budget, solver="checkmate", reorder=False)
    assert solution.status is sc.Status.OPTIMAL
    assert solution.time == solution.bound == optimum(graph.to_dict(), budget, "input order")


def test_its_bound_says_nothing_about_other_schedules() -> None:
    graph = conv_net(2)
    solution = sc.solve(graph, "80%", solver="checkmate")
    assert solution.search_space == "stages"
    assert solution.bound == solution.time > solution.global_bound == Problem(graph, 0).least_time


def test_bytes_that_are_too_large_for_coefficients_are_rounded_and_simulated() -> None:
    # Sizes are odd and above 2^40: three tensors of x fit, and x0 (resident), x1, x2, x3, g3 do not.
    size = 2**40 + 1
    graph = uniform_chain(3, size=size)
    solution = sc.solve(graph, 4 * size, solver="checkmate")
    assert (solution.time, solution.peak_bytes, solution.status) == (10.0, 4 * size, sc.Status.OPTIMAL)
    assert sc.solve(graph, 4 * size - 1, solver="checkmate").status is sc.Status.INFEASIBLE


def test_out_of_time_it_claims_nothing() -> None:
    proposal = propose(Problem(uniform_chain(6), 24), deadline=Deadline(0), seed=0)
    assert proposal.schedule is None
    assert not proposal.infeasible
    assert proposal.bound <= 20.0


def test_the_time_limit_holds_while_the_program_is_built() -> None:
    graph = uniform_chain(38)
    problem = Problem(graph, Problem(graph, 0).baseline.peak_bytes // 2)
    with FakeClock(seconds_per_look=1e-4, seconds_per_call=1e-7) as fake:
        proposal = propose(problem, deadline=Deadline(0.1), seed=0)
        assert fake.seconds < 0.2
    assert (proposal.schedule, proposal.infeasible) == (None, False)
    assert proposal.bound == problem.baseline.time


def test_a_graph_that_it_cannot_express_is_rejected() -> None:
    with pytest.raises(UnsuitableProblemError, match="up to 80 operations"):
        sc.solve(uniform_chain(40), "50%", solver="checkmate")
    view = sc.Graph(
        [sc.Operation("a", [], ["x"], 1.0), sc.Operation("view", ["x"], ["y"], 0.0)],
        [sc.Tensor("x", 1), sc.Tensor("y", 1, "x")],
        results=["y"],
    )
    with pytest.raises(UnsuitableProblemError, match="share a storage"):
        sc.solve(view, 10, solver="checkmate")
    either = sc.Graph(
        [sc.Operation("a", [], ["x"], 1.0), sc.Operation("b", [], ["x"], 2.0)], [sc.Tensor("x", 1)], results=["x"]
    )
    with pytest.raises(UnsuitableProblemError, match="does not support alternatives"):
        sc.solve(either, 10, solver="checkmate")
