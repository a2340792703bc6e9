"""Check that of kernels of one computation those are left that may fit, and what solvers make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import InvalidGraphError
from scheduler.problem import Problem
from scheduler.schedule import Compute
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.kernels import with_fitting_kernels
from scheduler.solvers.smallest_peak import smallest_peak
from tests.support.contract import SMALL_STEPS
from tests.support.examples import examples
from tests.support.oracle import least_peak, optimum
from tests.support.training_graphs import conv_net, two_kernels

BOTH = pytest.mark.parametrize("is_fast_first", [True, False])


def names(problem: Problem) -> list[str]:
    return [operation.name for operation in problem.graph.operations]


@BOTH
def test_the_fastest_kernel_comes_first_and_what_never_fits_is_left_out(is_fast_first: bool) -> None:
    # With a workspace of 10, f0 takes 18 and the others 22.
    graph = two_kernels(2, is_fast_first=is_fast_first)
    tight, looser = (names(with_fitting_kernels(Problem(graph, budget))) for budget in (17, 18))
    assert tight == ["f0_slow", "f1_slow", "loss", "b1_slow", "b0_slow"]
    assert looser[:2] == ["f0_fast", "f0_slow"]


def test_a_kernel_takes_the_place_of_one_that_is_left_out() -> None:
    # The slow kernel of "f" comes last, after what reads its output.
    operations = [
        sc.Operation("f_fast", ["x0"], ["x1"], 1.0, 10),
        sc.Operation("loss", ["x1"], ["loss"], 1.0),
        sc.Operation("f_slow", ["x0"], ["x1"], 2.0),
    ]
    graph = sc.Graph(operations, [sc.Tensor(name, 4) for name in ("x0", "x1", "loss")], ["x0"], ["loss"])
    assert names(with_fitting_kernels(Problem(graph, 12))) == ["f_slow", "loss"]
    assert sc.solve(graph, 12).time == 3.0


@BOTH
def test_starts_run_the_smallest_kernel_instead_of_one_that_is_left_out(is_fast_first: bool) -> None:
    problem = Problem(two_kernels(2, is_fast_first=is_fast_first), 17)
    problem = problem.changed(starts=(problem.save_everything,))
    for start in with_fitting_kernels(problem).starts:
        runs = [action.operation for action in start if isinstance(action, Compute)]
        assert runs == ["f0_slow", "f1_slow", "loss", "b1_slow", "b0_slow"]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_the_optimum_stays_what_the_oracle_says(data: st.DataObject) -> None:
    graph = data.draw(SMALL_STEPS)
    operations = list(graph.operations)
    for operation in data.draw(st.lists(st.sampled_from(operations), min_size=1, max_size=3, unique=True)):
        if operation.repeatable and operation.name not in graph.required:
            other = replace(
                operation,
                name=f"{operation.name}_other",
                time=data.draw(st.sampled_from([0.0, 1.0, 2.0, 4.0]), label="time"),
                workspace_bytes=data.draw(st.integers(0, 4), label="workspace"),
            )
            place = operations.index(operation) + 1
            operations.insert(data.draw(st.integers(place, len(operations)), label="place"), other)
    try:
        graph = replace(graph, operations=operations)
    except InvalidGraphError:  # a kernel of the forward after the first backward
        reject()
    problem = Problem(graph, 0)
    budget = data.draw(st.integers(problem.floor.bytes, max(problem.floor.bytes, problem.baseline.peak_bytes)))
    problem = problem.changed(budget_bytes=budget, starts=(problem.save_everything,))
    fitting = with_fitting_kernels(problem)
    for space, reorder in (("any", True), ("input order", False)):
        best = optimum(graph.to_dict(), budget, space)
        assert optimum(fitting.graph.to_dict(), budget, space) == best
        if best is not None:
            assert sc.solve(graph, budget, time_limit=5, reorder=reorder).bound <= best * (1 + 1e-9)
    for start in fitting.starts:
        assert sc.simulate(graph, start).peak_bytes <= sc.simulate(graph, problem.save_everything).peak_bytes


def test_a_problem_without_kernels_to_choose_from_stays_as_it_is() -> None:
    for graph in (conv_net(2), two_kernels(2, is_fast_first=True)):
        problem = Problem(graph, 10**6)
        assert with_fitting_kernels(problem) is problem


@BOTH
@pytest.mark.parametrize("budget", range(16, 28, 2))
def test_the_answer_is_the_optimum_over_all_kernels(budget: int, is_fast_first: bool) -> None:
    graph = two_kernels(3, is_fast_first=is_fast_first)
    assert sc.solve(graph, budget, time_limit=20).time == optimum(graph.to_dict(), budget, "any")


@BOTH
def test_the_smallest_peak_is_that_of_the_smallest_kernels(is_fast_first: bool) -> None:
    # A backward and what it reads and makes, and the resident batch.
    assert least_peak(two_kernels(3, is_fast_first=is_fast_first).to_dict(), "any") == 16
    graph = two_kernels(12, is_fast_first=is_fast_first)
    found = sc.minimum_budget(graph, time_limit=10)
    assert (found.peak_bytes, found.floor_bytes) == (16, 16)
    assert sc.solve(graph, 16, time_limit=1).peak_bytes == 16


@BOTH
def test_a_smallest_peak_is_known_where_a_kernel_fits_only_by_itself(is_fast_first: bool) -> None:
    # The first fast kernel takes 18, and the last one 30; the last slow one takes 20.
    tensors, operations = [sc.Tensor("x", 4)], list[sc.Operation]()
    for i in range(4):
        tensors.append(sc.Tensor(f"y{i}", 4))
        fast = sc.Operation(f"fast{i}", ["x"], [f"y{i}"], 1.0, 10)
        slow = sc.Operation(f"slow{i}", ["x"], [f"y{i}"], 2.0)
        operations += [fast, slow] if is_fast_first else [slow, fast]
    graph = sc.Graph(operations, tensors, ["x"], [f"y{i}" for i in range(4)])
    assert sc.minimum_budget(graph).peak_bytes == 20
    assert smallest_peak(with_fitting_kernels(Problem(graph, 20)), Deadline(5)).peak_bytes == 20
    assert sc.solve(graph, 20, time_limit=2).peak_bytes == 20


def test_of_a_slow_default_that_fits_the_answer_is_never_slower() -> None:
    graph = two_kernels(40, is_fast_first=False)
    plain = sc.solve(graph, 4 * 42 + 4, solver="save-all")
    assert plain.schedule is not None
    assert sc.solve(graph, plain.peak_bytes, time_limit=1).time < plain.time == 160.0
