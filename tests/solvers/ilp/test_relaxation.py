"""Check the integer programs of `ilp`: that their optima are bounds, and what makes them strong."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.any_order import AnyOrderBound
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation
from tests.support.contract import SMALL_STEPS
from tests.support.cut_bounds import check_cut_bounds
from tests.support.examples import examples
from tests.support.oracle import optimum


@settings(max_examples=examples(100))
@given(data=st.data(), graph=SMALL_STEPS)
def test_no_program_claims_more_than_the_oracle_finds(data: st.DataObject, graph: sc.Graph) -> None:
    check_cut_bounds(data, graph)


@settings(max_examples=examples(30))
@given(data=st.data(), graph=SMALL_STEPS)
def test_further_cuts_never_weaken_the_relaxed_program(data: st.DataObject, graph: sc.Graph) -> None:
    problem = Problem(graph, 0)
    budget = data.draw(st.integers(problem.floor.bytes, max(problem.floor.bytes, problem.baseline.peak_bytes)))
    precedence = Precedence(graph, reorder=data.draw(st.booleans(), label="reorder"))
    tasks = st.lists(st.sampled_from(range(len(graph.index.tasks))), min_size=1, max_size=4, unique=True)
    chain = precedence.chain(data.draw(tasks, label="cuts"))
    fewer = data.draw(st.sets(st.sampled_from(chain), min_size=1), label="fewer")
    some = [cut for cut in chain if cut in fewer]
    more, less = (
        CutRelaxation(graph, precedence, cuts, [budget] * len(cuts)).relaxed(Deadline(20)) for cuts in (chain, some)
    )
    # No line means that the program has no point, or no variable.
    assert more is None or less is None or more[0] >= less[0] * (1 - 1e-6)


def step_with_a_task_that_may_wait() -> sc.Graph:
    """The task "wide" needs all but two of the budget's 9 bytes; "free" may run before it or after it.

    Before it, its result takes 4 bytes; after it, so does its input, unless it is computed again, in 5.
    """
    operations = [
        sc.Operation("first", [], ["x", "y"], 5.0),
        sc.Operation("wide", ["y"], ["z"], 1.0, workspace_bytes=5),
        sc.Operation("free", ["x"], ["r"], 1.0),
    ]
    sizes = {"x": 4, "y": 1, "z": 1, "r": 4}
    return sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=["z", "r"])


def test_a_task_that_may_run_before_or_after_the_cut_needs_memory_there_either_way() -> None:
    graph = step_with_a_task_that_may_wait()
    assert optimum(graph.to_dict(), 9, "any") == 5 + 1 + 1 + 5
    program = CutRelaxation(graph, Precedence(graph, reorder=True), [1], [9])
    assert program.solve(Deadline(20)).bound == 12.0


def test_the_relaxed_program_recomputes_the_base_of_a_view_with_the_view() -> None:
    # At the cut, half of x fits. Its other half costs half of what both x and its view take: (8 + 1) / 2.
    operations = [
        sc.Operation("base", [], ["x"], 8.0),
        sc.Operation("view", ["x"], ["v"], 1.0),
        sc.Operation("cut", ["v"], ["y"], 1.0),
        sc.Operation("second", ["y"], ["w"], 1.0, workspace_bytes=3),
        sc.Operation("reader", ["v", "w"], ["z"], 1.0),
    ]
    tensors = [sc.Tensor("x", 4), sc.Tensor("v", 4, "x"), *(sc.Tensor(name, 1) for name in "ywz")]
    graph = sc.Graph(operations, tensors, results=["z"])
    program = CutRelaxation(graph, Precedence(graph, reorder=False), [3], [7])
    time, price = program.relaxed(Deadline(20))
    assert time == pytest.approx(12 + 4.5)
    assert price == pytest.approx(9 / 4)
    assert program.solve(Deadline(20)).bound == 12 + 9


def test_the_bound_over_all_orders_chooses_the_cut_that_bounds_best() -> None:
    graph = step_with_a_task_that_may_wait()
    bound = AnyOrderBound(Problem(graph, 9), Precedence(graph, reorder=True))
    bound.raise_bound([0, 1, 2], Deadline(20))
    assert bound.cuts == [1]
    assert bound.bound == 12.0


def test_where_few_tasks_are_ordered_the_others_are_candidates_too() -> None:
    graph = step_with_a_task_that_may_wait()
    precedence = Precedence(graph, reorder=True)
    assert precedence.unordered.tolist() == [0, 1, 1]
    bound = AnyOrderBound(Problem(graph, 9), precedence)
    bound.raise_bound([], Deadline(20))
    assert bound.bound == 12.0


def test_further_cuts_are_added_only_while_they_raise_the_bound() -> None:
    graph = step_with_a_task_that_may_wait()
    bound = AnyOrderBound(Problem(graph, 9), Precedence(graph, reorder=True))
    for _ in range(3):
        bound.raise_bound([0, 1, 2], Deadline(20))
    assert bound.is_exhausted
    assert bound.cuts == [1]
