"""Check the bound over all orders by branches in which pairs of tasks run in a given order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp import candidates, cut_search, order_branches
from scheduler.solvers.ilp.cut_search import CutSearch
from scheduler.solvers.ilp.order_branches import OrderBranches
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutAnswer, CutRelaxation
from tests.support.cut_bounds import step_with_two_branches
from tests.support.oracle import optimum
from tests.support.training_graphs import conv_net


def branches_of(graph: sc.Graph, budget: int, starts: Sequence[sc.Schedule] = ()) -> OrderBranches:
    problem, reduction = Problem(graph, budget, starts=tuple(starts)), Reduction(graph, absorbs=True)
    given = CutSearch(problem, Precedence(graph, reorder=False), reduction)
    given.relax(Deadline(20))
    return OrderBranches(problem, reduction, given)


@pytest.fixture(autouse=True)
def _no_moments_of_several_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without branches, no program bounds `step_with_two_branches` then."""
    monkeypatch.setattr(candidates, "MOST_JOINED", 1)


def test_the_order_of_two_branches_of_a_step_raises_the_bound_to_the_optimum() -> None:
    graph, budget = step_with_two_branches(), 11
    search = branches_of(graph, budget)
    schedules = [search.raise_bound(Deadline(20)) for _ in range(2)]  # one program for each order of the two
    assert search.bound == optimum(graph.to_dict(), budget, "any") == 17.0
    assert [search.precedence.precedes(*pair) for pair in ((2, 3), (3, 2))] == [False, False]
    for schedule in schedules:
        assert schedule is not None
        simulation = sc.simulate(graph, schedule)
        assert (simulation.time, simulation.peak_bytes) == (17.0, 11)


def test_without_branches_no_cut_bounds_a_step_with_two_of_them() -> None:
    branches = branches_of(step_with_two_branches(), 11)
    search = CutSearch(branches.problem, branches.precedence, branches.reduction)
    while not search.is_exhausted:
        search.raise_bound(Deadline(20))
    assert search.bound == 12.0


def step_with_a_small_task_in_a_branch() -> sc.Graph:
    """`step_with_two_branches`, but "b" also reads a result that "small" makes of its input, and needs more memory."""
    graph = step_with_two_branches()
    *others, b = graph.operations
    small = sc.Operation("small", ["y"], ["r"], 1.0, phase="backward")
    operations = (*others, small, replace(b, inputs=("y", "r")))
    tensors = (*graph.tensors, sc.Tensor("r", 1))
    return replace(graph, operations=operations, tensors=tensors, results=(*graph.results, "r"))


def noted_pairs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the pairs of tasks whose branches are compared from now on."""
    pairs: list[tuple[int, int]] = []
    with_pair = OrderBranches._with_pair

    def noted(self: OrderBranches, branch: Any, pair: tuple[int, int], *rest: Any) -> object:
        pairs.append(pair)
        return with_pair(self, branch, pair, *rest)

    monkeypatch.setattr(OrderBranches, "_with_pair", noted)
    return pairs


@pytest.mark.parametrize(("few", "task", "bound"), [(100, "small", 13.0), (0, "b", 18.0)])
def test_where_many_tasks_may_run_on_either_side_of_a_cut_the_one_that_bounds_best_makes_branches(
    monkeypatch: pytest.MonkeyPatch, few: int, task: str, bound: float
) -> None:
    monkeypatch.setattr(order_branches, "FEW_UNORDERED", few)
    graph, budget = step_with_a_small_task_in_a_branch(), 12
    search = branches_of(graph, budget)
    compared = noted_pairs(monkeypatch)
    while not search.is_exhausted:
        search.raise_bound(Deadline(20))
    # The nearest task that may run before "a" is "small"; once it has, "b" may still run on either side.
    assert {graph.operations[i].name for i in compared[0]} == {"a", task}
    assert search.bound == bound
    assert optimum(graph.to_dict(), budget, "any") == 18.0


@pytest.mark.parametrize(("bound", "is_compared"), [(12.0, True), (17.0, False)])
def test_no_branches_are_made_where_the_moment_of_a_pair_bounds_no_better(
    monkeypatch: pytest.MonkeyPatch, bound: float, is_compared: bool
) -> None:
    monkeypatch.setattr(order_branches, "FEW_UNORDERED", 0)
    search = branches_of(step_with_two_branches(), 11)
    (branch,) = search._branches
    branch.search.bound = bound
    compared = noted_pairs(monkeypatch)
    assert bool(search._branches_of(branch, Deadline(20))) == bool(compared) == is_compared


@pytest.mark.parametrize(("least_part", "branches"), [(0.04, True), (10.0, False)])
def test_a_large_step_branches_only_where_that_adds_much_to_its_bound(
    monkeypatch: pytest.MonkeyPatch, least_part: float, branches: bool
) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    monkeypatch.setattr(order_branches, "LEAST_PART", least_part)
    search = branches_of(step_with_two_branches(), 10)  # nothing fits in so few bytes, so any bound holds
    while not search.is_exhausted:
        search.raise_bound(Deadline(20))
    # Programs for any order compute one input of 5 s again; those of branches know which one, and bound better.
    assert (search.bound > 12.0 + 5.0) == branches
    assert search.bound >= 12.0 + 5.0


@pytest.mark.parametrize("is_far", [False, True])
def test_operations_are_counted_in_large_steps_far_from_the_bound(
    monkeypatch: pytest.MonkeyPatch, is_far: bool
) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    monkeypatch.setattr(order_branches, "LEAST_GAP", 0.0 if is_far else 1.0)
    graph = conv_net(6)
    budget = parse_budget("60%", graph)
    search = branches_of(graph, budget, [sc.solve(graph, budget).schedule])
    assert search.comes_first == is_far
    counted: list[int] = []
    solve = CutRelaxation.solve

    def noted(self: CutRelaxation, deadline: Deadline, slack: float = 0.0) -> CutAnswer:
        counted.extend(self.counted)
        return solve(self, deadline, slack)

    monkeypatch.setattr(CutRelaxation, "solve", noted)
    search.raise_bound(Deadline(20))
    assert bool(counted) == is_far


def test_operations_are_counted_in_the_lower_branch_until_the_other_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    search = branches_of(step_with_two_branches(), 10)
    counts: list[tuple[float, float]] = []

    def noted(self: CutSearch, deadline: Deadline, slack: float = 0.0, enough: float = math.inf) -> None:
        counts.append((self.bound, enough))
        self.bound = enough + 1.0

    monkeypatch.setattr(CutSearch, "count", noted)
    for _ in range(4):
        search.raise_bound(Deadline(20))
    (first, second), *others = counts
    assert first <= second
    # Each is raised past the other one, in turn.
    assert others == [(second + turn, second + turn + 1.0) for turn in range(3)]


def test_no_pair_is_looked_for_while_a_known_schedule_is_near_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, budget = step_with_two_branches(), 11
    known = sc.solve(graph, budget).schedule
    monkeypatch.setattr(order_branches, "LEAST_GAP", 0.5)
    search = branches_of(graph, budget, [known])
    for _ in range(2):
        search.raise_bound(Deadline(20))
    assert search.bound == 12.0
