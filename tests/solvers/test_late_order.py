"""Check the late order: what it moves, and that it stays an order of the same step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem, save_everything
from scheduler.schedule import follows_input_order
from scheduler.solution import Proposal
from scheduler.solvers import auto
from scheduler.solvers import late_order as module
from scheduler.solvers.late_order import in_late_order, late_order
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import branches, uniform_chain


def names(graph: sc.Graph) -> list[str]:
    return [operation.name for operation in graph.operations]


def slices(steps: int) -> sc.Graph:
    """Steps that each make a slice of 10 bytes, and sums of all slices that run along with them, of 100 bytes."""
    operations, tensors = [], [sc.Tensor("state0", 1), sc.Tensor("sum0", 100)]
    for i in range(steps):
        tensors += [sc.Tensor(f"slice{i}", 10), sc.Tensor(f"state{i + 1}", 1), sc.Tensor(f"sum{i + 1}", 100)]
        operations += [
            sc.Operation(f"step{i}", [f"state{i}"], [f"state{i + 1}", f"slice{i}"], 1.0),
            sc.Operation(f"add{i}", [f"slice{i}", *([f"sum{i}"] if i else [])], [f"sum{i + 1}"], 1.0),
        ]
    return sc.Graph(
        operations, tensors[:1] + tensors[2:], resident=["state0"], results=[f"state{steps}", f"sum{steps}"]
    )


def test_sums_of_slices_run_once_all_slices_are_there() -> None:
    graph = slices(6)
    late = late_order(graph)
    assert names(late) == [f"step{i}" for i in range(6)] + [f"add{i}" for i in range(6)]


def test_each_branch_runs_to_its_end_before_the_next() -> None:
    assert names(late_order(branches(3))) == ["large0", "small0", "large1", "small1", "large2", "small2"]


@pytest.mark.parametrize("graph", [uniform_chain(5), late_order(branches(3))], ids=["chain", "late"])
def test_an_order_that_leaves_nothing_to_gain_is_kept(graph: sc.Graph) -> None:
    assert late_order(graph) is graph


def test_nothing_moves_from_the_forward_into_the_backward() -> None:
    tensors = [sc.Tensor(name, size) for name, size in (("early", 10), ("x", 10), ("loss", 0), ("end", 10))]
    operations = [
        sc.Operation("early", [], ["early"], 1.0),
        sc.Operation("loss", ["x"], ["loss"], 1.0),
        sc.Operation("end", ["loss", "early"], ["end"], 1.0, phase="backward"),
    ]
    late = late_order(sc.Graph(operations, tensors, resident=["x"], results=["end"]))
    assert names(late) == ["loss", "early", "end"]


@settings(max_examples=examples(300))
@given(graph=st.one_of(graphs(), joint_graphs()))
def test_the_late_order_is_an_order_of_the_same_step_that_takes_less_memory(graph: sc.Graph) -> None:
    late = late_order(graph)
    assert sorted(names(late)) == sorted(names(graph))
    assert (late.tensors, late.results, late.resident) == (graph.tensors, graph.results, graph.resident)
    if late is not graph:
        means = [sc.simulate(order, save_everything(order)).memory.mean() for order in (graph, late)]
        assert means[1] < means[0]
    # `Graph` checks that producers come before readers; a schedule for one order is one for the other.
    assert sc.simulate(graph, save_everything(late)).time == sc.simulate(late, save_everything(late)).time


def test_alternatives_and_large_graphs_stay_in_the_given_order(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = branches(2)
    twin = sc.Operation("twin", [], ["large0"], 3.0)
    alternatives = sc.Graph([*graph.operations, twin], graph.tensors, results=graph.results)
    assert late_order(alternatives) is alternatives
    monkeypatch.setattr(module, "LARGEST_GRAPH", 3)
    assert late_order(graph) is graph


def test_a_problem_stays_as_it_is_if_no_other_order_is_allowed_or_all_fits() -> None:
    graph = branches(6)
    short = Problem(graph, 106)
    assert in_late_order(short).graph.operations == late_order(graph).operations
    for problem in (Problem(graph, 106, reorder=False), Problem(graph, short.baseline.peak_bytes)):
        assert in_late_order(problem) is problem


def test_what_solvers_say_of_the_order_that_they_get_holds_for_the_late_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(problem: Problem, **_: object) -> Proposal:
        return Proposal(None, "input order", bound=9.0, global_bound=8.0)

    monkeypatch.setattr(auto.ilp, "propose", prove)
    monkeypatch.setattr(auto.anneal, "search", lambda *_, **options: Proposal(None, "any order"))
    graph = slices(4)
    # 211 bytes are two sums, a state and a slice: the other slices are made again.
    solution = sc.solve(graph, 211, time_limit=2)
    assert (solution.search_space, solution.bound, solution.global_bound) == ("late order", 9.0, 8.0)
    assert solution.time > 9.0
    assert follows_input_order(late_order(graph), solution.schedule)
