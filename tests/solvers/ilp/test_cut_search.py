"""Check how `ilp` chooses the moments at which its programs constrain memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.schedule import first_runs
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp import cut_search
from scheduler.solvers.ilp.candidates import Candidates
from scheduler.solvers.ilp.cut_search import CutSearch
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutRelaxation
from tests.support.cut_bounds import step_with_a_task_that_may_wait, step_with_two_branches
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import conv_net


def search(graph: sc.Graph, budget_bytes: int, *, reorder: bool) -> CutSearch:
    precedence = Precedence(graph, reorder=reorder)
    return CutSearch(Problem(graph, budget_bytes), precedence, Reduction(graph, absorbs=True))


def test_the_bound_over_all_orders_finds_the_cut_that_bounds_best() -> None:
    found = search(step_with_a_task_that_may_wait(), 9, reorder=True)
    assert found.precedence.unordered.tolist() == [0, 1, 1]
    found.raise_bound(Deadline(20))
    assert found.bound == 12.0
    assert 1 in found.cuts


def test_a_point_that_runs_one_branch_before_the_other_leads_to_the_first_one_of_them() -> None:
    found = search(step_with_two_branches(), 11, reorder=True)
    schedule = found.raise_bound(Deadline(20))
    assert [found.precedence.members(cut) for cut in found.cuts] == [(2, 3)]
    assert schedule is not None
    simulation = sc.simulate(found.problem.graph, schedule)
    assert (found.bound, simulation.time, simulation.peak_bytes) == (17.0, 17.0, 11)


@pytest.mark.parametrize("reorder", [False, True])
def test_relaxations_with_further_moments_raise_the_bound_until_none_is_left(
    monkeypatch: pytest.MonkeyPatch, reorder: bool
) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    monkeypatch.setattr(cut_search, "MOST_MOMENTS", 1)
    graph = conv_net(6)
    budget = parse_budget("60%", graph)
    found, bounds = search(graph, budget, reorder=reorder), []
    while not found.is_relaxed:
        found.refine(Deadline(20))
        bounds.append(found.relaxed)
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1] <= sc.solve(graph, budget, time_limit=20).time


def test_relaxations_that_add_nothing_to_the_plain_step_come_to_an_end() -> None:
    # The times of alternatives are the program's to minimize; what its tolerances may have added is subtracted.
    operations = [
        sc.Operation("f", ["x0"], ["x1"], 1.0),
        sc.Operation("f_saving", ["x0"], ["x1", "saved"], 1.0),
        sc.Operation("loss", ["x1"], ["loss"], 1.0),
        sc.Operation("loss_backward", ["x1"], ["g1"], 1.0, phase="backward"),
        sc.Operation("b", ["g1", "x1"], ["dw"], 2.0, phase="backward"),
        sc.Operation("b_of_saved", ["g1", "saved"], ["dw"], 2.0, phase="backward"),
    ]
    tensors = [sc.Tensor(name, 1) for name in ("x0", "x1", "saved", "loss", "g1", "dw")]
    found = search(sc.Graph(operations, tensors, resident=["x0"], results=["loss", "dw"]), 9, reorder=False)
    found.relax(Deadline(20))
    assert found.is_priced
    assert found.is_relaxed
    assert found.relaxed == found.problem.least_time == 5.0


def test_where_joined_moments_do_not_raise_the_bound_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    monkeypatch.setattr(cut_search, "MOST_MOMENTS", 1)
    monkeypatch.setattr(cut_search, "MOST_WORK", 0)
    first_tasks = list(range(cut_search.FEW_CUTS))
    monkeypatch.setattr(Candidates, "joined", lambda *_: first_tasks)
    graph = conv_net(6)
    found = search(graph, parse_budget("60%", graph), reorder=True)
    found.refine(Deadline(20))
    first = found.relaxed
    assert found.relax_at(first_tasks, Deadline(20)).cuts == first_tasks
    assert found.relaxed == first
    found.refine(Deadline(20))
    assert found.relaxed > first


def test_relaxations_that_would_not_be_solved_in_time_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    monkeypatch.setattr(cut_search, "MOST_MOMENTS", 1)
    monkeypatch.setattr(cut_search, "AFFORDED_SHARE", 0.0)
    graph = conv_net(6)
    found = search(graph, parse_budget("60%", graph), reorder=True)
    found.refine(Deadline(20))
    first = found.relaxed
    assert not found.is_relaxed
    found.refine(Deadline(20))  # the test above says that it could raise the bound
    assert found.is_relaxed
    assert found.relaxed == first
    monkeypatch.setattr(cut_search, "AFFORDED_SHARE", 1.0)
    found.relax(Deadline(20))  # with more time, it goes on
    assert found.relaxed > first


@pytest.mark.parametrize(("affordable", "growth"), [(6.25, 2.5), (16.0, 3.0), (64.0, 4.0)])
def test_the_moments_of_a_further_relaxation_are_as_large_as_its_time_allows(
    monkeypatch: pytest.MonkeyPatch, affordable: float, growth: float
) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    monkeypatch.setattr(cut_search, "MOST_MOMENTS", 1)
    graph = conv_net(6)
    found = search(graph, parse_budget("60%", graph), reorder=True)
    relaxed: list[list[int]] = []
    build = CutRelaxation.relaxed

    def recorded(program: CutRelaxation, *arguments: Any) -> tuple[float, list[float]] | None:
        relaxed.append(program.cuts)
        clock.advance(1.0)
        return build(program, *arguments)

    def size(cuts: list[int]) -> int:
        """Return how many tasks precede the moments, and four times how many come before as well as after them."""
        before = sum(found.precedence.before(cut).bit_count() for cut in cuts)
        after = sum(found.precedence.after(cut).bit_count() for cut in cuts)
        return before + 4 * (len(cuts) * len(graph.operations) - before - after)

    monkeypatch.setattr(CutRelaxation, "relaxed", recorded)
    with FakeClock() as clock:
        found.refine(Deadline(100))
        while not found.is_relaxed:
            found.refine(Deadline(affordable / cut_search.AFFORDED_SHARE))
    ratios = [size(more) / size(fewer) for fewer, more in pairwise(relaxed[1:])]
    assert 0.6 * growth < max(ratios) <= growth


@pytest.mark.parametrize("reorder", [False, True])
def test_programs_that_count_raise_the_bound_of_the_relaxation(monkeypatch: pytest.MonkeyPatch, reorder: bool) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    graph = conv_net(6)
    budget = parse_budget("60%", graph)
    found = search(graph, budget, reorder=reorder)
    found.relax(Deadline(20))
    assert found.may_count
    while found.may_count:
        found.count(Deadline(20))
    assert found.relaxed < found.bound <= sc.solve(graph, budget, time_limit=20).time


def test_it_counts_until_the_bound_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    graph = conv_net(6)
    found = search(graph, parse_budget("60%", graph), reorder=True)
    found.relax(Deadline(20))
    found.count(Deadline(20), enough=found.relaxed)
    assert found.relaxed < found.bound
    assert found.may_count
    found.count(Deadline(20))
    assert not found.may_count


def test_whole_tensors_at_the_dearest_moment_raise_the_bound_of_programs_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    graph = conv_net(4)
    budget, bounds = parse_budget("50%", graph), []
    for most_tasks in (0, len(graph.index.tasks)):
        monkeypatch.setattr(cut_search, "MOST_TASKS_COUNTED_WHOLE", most_tasks)
        found = search(graph, budget, reorder=True)
        found.relax(Deadline(20))
        while found.may_count:
            found.count(Deadline(20))
        bounds.append(found.bound)
    in_part, whole = bounds
    assert in_part < whole <= sc.solve(graph, budget, time_limit=20).time


@pytest.mark.parametrize("reorder", [False, True])
def test_programs_differ_until_nothing_is_left_to_try(reorder: bool) -> None:
    found = search(step_with_a_task_that_may_wait(), 9, reorder=reorder)
    chains: list[tuple[int, ...]] = []
    while not found.is_exhausted:
        found.raise_bound(Deadline(20))
        chains += [] if found.is_exhausted else [tuple(found.cuts)]
    assert len(set(chains)) == len(chains) <= 2**3


def test_the_first_cut_in_the_input_order_is_the_peak_of_the_whole_step() -> None:
    graph = conv_net(4)
    found = search(graph, parse_budget("60%", graph), reorder=False)
    found.raise_bound(Deadline(20))
    schedule = sc.solve(graph, 2**40, solver="save-all").schedule
    memory = sc.simulate(graph, schedule).memory
    assert memory[first_runs(graph, schedule)[found.cuts[0]]] == max(memory)
    assert len(found.cuts) == 1


def test_further_cuts_raise_the_bound_until_a_point_fits() -> None:
    graph = conv_net(6)
    found = search(graph, parse_budget("70%", graph), reorder=False)
    points = []
    while not found.is_exhausted and len(points) < 6:
        schedule = found.raise_bound(Deadline(20))
        assert schedule is not None
        simulation = sc.simulate(graph, schedule)
        points.append((found.bound, simulation.peak_bytes <= found.problem.budget_bytes, simulation.time))
    bounds, fits, times = zip(*points, strict=True)
    assert list(bounds) == sorted(bounds)
    assert not fits[0]
    assert any(fits)
    assert bounds[-1] <= min(time for time, fit in zip(times, fits, strict=True) if fit)


def test_a_search_whose_time_is_up_claims_nothing() -> None:
    graph = conv_net(6)
    found = search(graph, parse_budget("60%", graph), reorder=True)
    assert found.raise_bound(Deadline(0)) is None
    assert found.bound <= sc.solve(graph, 2**40, solver="save-all").time
