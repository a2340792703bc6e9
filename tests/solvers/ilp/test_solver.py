"""Check the proofs of `ilp` on graphs whose optimum is known or found by the oracle."""

from __future__ import annotations

import pytest

import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp import cut_search, order_branches, solver
from scheduler.solvers.ilp.cut_search import CutSearch
from scheduler.solvers.ilp.order_branches import OrderBranches
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation
from scheduler.solvers.ilp.solver import ProgramSearch, propose
from tests.support.fake_clock import FakeClock
from tests.support.oracle import optimum
from tests.support.training_graphs import conv_net, two_kernels, uniform_chain


def test_cheap_operations_are_recomputed() -> None:
    graph = conv_net(6)
    solution = sc.solve(graph, "70%", solver="ilp")
    assert solution.status is sc.Status.OPTIMAL
    assert solution.search_space == "any order"
    recomputed = {name for name, runs in solution.simulation.recomputed.items() if runs}
    assert recomputed
    assert all(name.startswith(("norm", "relu", "add")) for name in recomputed)


@pytest.mark.parametrize("budget", range(16, 33, 4))
def test_a_chain_of_six_is_optimal_where_the_status_says_so(budget: int) -> None:
    graph = uniform_chain(6)
    solution = sc.solve(graph, budget, solver="ilp", reorder=False)
    best = optimum(graph.to_dict(), budget, "input order")
    assert solution.bound <= best <= solution.time
    if solution.status is sc.Status.OPTIMAL:
        assert solution.time == best


def test_the_bound_holds_where_the_presolve_of_highs_1_14_lost_the_optimum() -> None:
    # The loss is dropped for b1 and recomputed after it: 8 + 1. HiGHS 1.14.0 claimed 11.
    operations = [
        sc.Operation("f0", ["x0"], ["x1"], 3.0, 3),
        sc.Operation("f1", ["x1", "x0"], ["x2"], 2.0, 3),
        sc.Operation("loss", ["x2"], ["loss"], 1.0, 3),
        sc.Operation("loss_backward", ["x2"], ["g2"], 0.0, 3, phase="backward"),
        sc.Operation("b1", ["g2", "x2", "x0"], ["g1"], 1.0, 2, phase="backward"),
        sc.Operation("b0", ["g1", "x1"], ["dw0"], 1.0, 3, phase="backward"),
    ]
    sizes = {"x0": 5, "x1": 1, "x2": 2, "loss": 1, "g2": 2, "g1": 4, "dw0": 2}
    tensors = [sc.Tensor(name, size) for name, size in sizes.items()]
    graph = sc.Graph(operations, tensors, resident=["x0"], results=["loss", "dw0"])
    assert optimum(graph.to_dict(), 16, "any") == 9.0
    program = CutRelaxation(graph, Precedence(graph, reorder=False), [4, 5], [16, 16])
    assert program.solve(Deadline(20)).bound == 9.0
    assert sc.solve(graph, 16, solver="ilp").time == 9.0


def test_a_task_may_run_twice_between_two_cuts_if_no_alternative_that_fits_produces_all_that_is_read() -> None:
    # f0 produces both tensors, but its workspace does not fit: f1 and f2 run, and then the reader: 4 + 0 + 1.
    operations = [
        sc.Operation("f0", [], ["x", "y"], 4.0, 2),
        sc.Operation("f1", [], ["y"], 4.0),
        sc.Operation("f2", [], ["x"], 0.0),
        sc.Operation("reader", ["x", "y"], ["z"], 1.0, repeatable=False),
    ]
    graph = sc.Graph(operations, [sc.Tensor(name, 0) for name in "xyz"], results=["z"])
    assert optimum(graph.to_dict(), 0, "any") == 5.0
    reader = graph.index.task_of[3]
    program = CutRelaxation(graph, Precedence(graph, reorder=False), [graph.index.task_of[0], reader], [0, 0])
    assert program.solve(Deadline(20)).bound == 5.0
    assert sc.solve(graph, 0, solver="ilp").status is not sc.Status.INFEASIBLE


def test_an_alternative_may_run_between_two_cuts_though_another_has_run_between_earlier_ones() -> None:
    # f1 runs first, and f1s after bl, for b1s: 1 + 3 + 1 + 4. Had f1s run first, "s1" would not fit during bl.
    operations = [
        sc.Operation("f0", ["x0"], ["x1"], 0.0),
        sc.Operation("f1", ["x1", "w1"], ["x2"], 0.0),
        sc.Operation("f1s", ["x1", "w1"], ["x2", "s1"], 3.0),
        sc.Operation("l", ["x2"], ["loss"], 1.0),
        sc.Operation("bl", ["x2"], ["g2"], 0.0, 3, phase="backward"),
        sc.Operation("b1", ["g2", "x1", "w1"], ["g1", "dw1"], 0.0, 3, phase="backward"),
        sc.Operation("b1s", ["g2", "s1"], ["g1", "dw1"], 1.0, phase="backward"),
        sc.Operation("b0", ["g1"], ["dw0"], 4.0, phase="backward"),
    ]
    sizes = {"x0": 4, "x1": 1, "dw0": 1, "w1": 0, "x2": 2, "g1": 0, "dw1": 4, "s1": 2, "loss": 0, "g2": 3}
    tensors = [sc.Tensor(name, size) for name, size in sizes.items()]
    graph = sc.Graph(operations, tensors, resident=["x0", "w1"], results=["loss", "dw0", "dw1"])
    assert optimum(graph.to_dict(), 13, "input order") == 9.0
    program = CutRelaxation(graph, Precedence(graph, reorder=False), [0, 3, 4], [13, 13, 13])
    assert program.solve(Deadline(20)).bound == 9.0


@pytest.mark.parametrize("is_fast_first", [True, False])
@pytest.mark.parametrize("budget", [16, 18, 22, 26])
def test_of_two_kernels_the_one_runs_that_is_fastest_for_the_budget(budget: int, is_fast_first: bool) -> None:
    # At 26 all fast ones fit; at 16 none does.
    graph = two_kernels(3, is_fast_first=is_fast_first)
    solution = sc.solve(graph, budget, solver="ilp", time_limit=20)
    assert solution.status is sc.Status.OPTIMAL
    assert solution.time == optimum(graph.to_dict(), budget, "any")


def test_the_alternative_runs_first_that_saves_what_a_faster_backward_reads() -> None:
    operations = [
        sc.Operation("f", ["x0"], ["x1"], 1.0),
        sc.Operation("f_saving", ["x0"], ["x1", "saved"], 2.0),
        sc.Operation("loss", ["x1"], ["loss"], 1.0),
        sc.Operation("loss_backward", ["x1"], ["g1"], 1.0, phase="backward"),
        sc.Operation("b", ["g1", "x1"], ["dw"], 4.0, phase="backward"),
        sc.Operation("b_of_saved", ["g1", "saved"], ["dw"], 1.0, phase="backward"),
    ]
    sizes = {"x0": 2, "x1": 2, "saved": 4, "loss": 2, "g1": 2, "dw": 2}
    tensors = [sc.Tensor(name, size) for name, size in sizes.items()]
    graph = sc.Graph(operations, tensors, resident=["x0"], results=["loss", "dw"])
    # While a backward runs, all but x1 is in memory with "saved", and without it all others.
    assert [sc.solve(graph, budget, solver="ilp").time for budget in (12, 10)] == [5.0, 7.0]


def test_bounds_grow_as_the_budget_shrinks() -> None:
    graph = conv_net(6)
    bounds = [sc.solve(graph, f"{share}%", solver="ilp").bound for share in (95, 90, 85, 80, 70)]
    assert bounds == sorted(bounds)


def test_a_budget_under_the_floor_is_proven_impossible() -> None:
    proposal = propose(Problem(uniform_chain(5), 15), deadline=Deadline(10), seed=0)
    assert proposal.infeasible
    assert proposal.schedule is None


def test_the_bound_over_all_orders_never_exceeds_that_of_the_input_order() -> None:
    for share in (90, 80, 70):
        solution = sc.solve(conv_net(6), f"{share}%", solver="ilp")
        assert solution.global_bound <= solution.bound <= solution.time


def test_the_first_program_leaves_half_of_the_time_for_the_bound_over_all_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, end = list[float](), Deadline(100)

    def recorded(search: CutSearch, deadline: Deadline, slack: float = 0.0) -> sc.Schedule | None:
        limits.append(deadline.remaining)
        end.stop()
        return None

    monkeypatch.setattr(CutSearch, "raise_bound", recorded)
    graph = conv_net(6)
    propose(Problem(graph, parse_budget("50%", graph)), deadline=end, seed=0)
    assert 40 < limits[0] <= 50


@pytest.mark.parametrize("is_far", [False, True])
def test_a_program_that_holds_for_both_orders_delays_those_for_any_order_only_near_the_bound(
    monkeypatch: pytest.MonkeyPatch, is_far: bool
) -> None:
    monkeypatch.setattr(cut_search, "SMALL_TASKS", 0)
    monkeypatch.setattr(order_branches, "LEAST_GAP", 0.0 if is_far else 1.0)
    graph = uniform_chain(8)
    known = sc.solve(graph, 20, solver="recompute-all", time_limit=2).schedule
    assert known is not None
    orders: list[str] = []
    raise_bound = CutSearch.raise_bound

    def raise_given(search: CutSearch, deadline: Deadline, slack: float = 0.0) -> sc.Schedule | None:
        orders.append("input")
        return raise_bound(search, deadline, slack)

    def raise_any(branches: OrderBranches, deadline: Deadline, slack: float = 0.0) -> None:
        orders.append("any")

    monkeypatch.setattr(CutSearch, "raise_bound", raise_given)
    monkeypatch.setattr(OrderBranches, "raise_bound", raise_any)
    ProgramSearch(Problem(graph, 20, starts=(known,)), 2).run(Deadline(20))
    # A chain has one order, so every program holds for both.
    assert orders[:2] == ["input", "any" if is_far else "input"]


@pytest.mark.parametrize("is_far", [False, True])
def test_the_bound_over_all_orders_has_more_time_while_it_is_far_below(
    monkeypatch: pytest.MonkeyPatch, is_far: bool
) -> None:
    graph = conv_net(6)
    problem = Problem(graph, parse_budget("70%", graph))
    known = sc.solve(graph, "70%", solver="ilp").time
    spent: list[float] = []

    def raise_any(branches: OrderBranches, deadline: Deadline, slack: float = 0.0) -> None:
        for branch in branches._branches:
            branch.search.bound = (0.5 if is_far else 0.995) * known
        spent.append(deadline.remaining)
        clock.advance(deadline.remaining)

    monkeypatch.setattr(OrderBranches, "raise_bound", raise_any)
    monkeypatch.setattr(OrderBranches, "comes_first", False)
    monkeypatch.setattr(solver.ProgramSearch, "_do_orders_agree", lambda search: False)
    monkeypatch.setattr(solver, "INPUT_FACTOR", -1.0)  # programs for any order come last
    with FakeClock(seconds_per_look=1e-6) as clock:
        proposal = propose(problem, deadline=Deadline(100), seed=0)
    assert (proposal.search_space, proposal.bound) == ("input order", known)
    assert sum(spent) == pytest.approx((2 if is_far else 1) * solver.LEAST_GLOBAL_SECONDS, rel=0.01)


@pytest.mark.parametrize("is_long", [False, True])
def test_a_long_graph_has_a_bound_over_all_orders_before_its_first_program(
    monkeypatch: pytest.MonkeyPatch, is_long: bool
) -> None:
    graph = conv_net(6)
    problem = Problem(graph, parse_budget("50%", graph))

    def find_nothing(search: CutSearch | OrderBranches, deadline: Deadline, slack: float = 0.0) -> None:
        deadline.stop()

    monkeypatch.setattr(CutSearch, "raise_bound", find_nothing)
    monkeypatch.setattr(OrderBranches, "raise_bound", find_nothing)
    monkeypatch.setattr(solver, "RELAXED_FIRST", len(graph.operations) + (not is_long))
    proposal = propose(problem, deadline=Deadline(20), seed=0)
    assert (proposal.global_bound > problem.least_time) == is_long
    assert proposal.global_bound <= sc.solve(graph, "50%", solver="ilp").time


@pytest.mark.parametrize("is_near", [False, True])
def test_points_of_a_relaxation_are_passed_on_where_known_schedules_are_far_from_the_bound(is_near: bool) -> None:
    graph = conv_net(6)
    budget = parse_budget("40%", graph)
    known = sc.solve(graph, budget, solver="greedy" if is_near else "recompute-all", time_limit=2).schedule
    assert known is not None
    found = ProgramSearch(Problem(graph, budget, starts=(known,)), 1).run(Deadline(20))
    assert len(found.exceeding) == (1 if is_near else 3)  # that of the program, and two of the relaxation
    assert all(sc.simulate(graph, schedule).peak_bytes > budget for schedule in found.exceeding)


def test_where_no_schedule_fits_in_the_input_order_nothing_is_relaxed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [
        sc.Operation("a", ["x"], ["r"], 1.0, repeatable=False),
        sc.Operation("b", ["x"], ["t"], 1.0),
        sc.Operation("c", ["t"], ["s"], 1.0),
    ]
    sizes = {"x": 1, "r": 10, "t": 10, "s": 1}
    graph = sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], ["x"], ["r", "s"])
    budget = 13  # b beside r needs 21; the other order needs 12
    relaxed: list[bool] = []  # whether the order was free
    relax = CutSearch.relax

    def recorded(search: CutSearch, deadline: Deadline) -> CutRelaxation | None:
        relaxed.append(search.precedence.reorder)
        return relax(search, deadline)

    monkeypatch.setattr(CutSearch, "relax", recorded)
    found = ProgramSearch(Problem(graph, budget), 1).run(Deadline(20))
    assert "no schedule fits in the given order" in found.messages[1]
    assert found.global_bound == 3.0
    assert False not in relaxed


def test_a_program_without_time_claims_no_more_than_that_all_operations_run() -> None:
    graph = conv_net(6)
    precedence = Precedence(graph, reorder=False)
    answer = CutRelaxation(graph, precedence, [30], [graph.resident_bytes + 600]).solve(Deadline(0))
    assert answer.live is None
    assert not answer.exact
    assert answer.bound == sc.solve(graph, 2**30, solver="save-all").time


def test_a_program_whose_deadline_passed_during_its_construction_is_not_solved() -> None:
    graph = conv_net(6)
    budgets = [graph.resident_bytes + 600]
    late = CutRelaxation(graph, Precedence(graph, reorder=False), [30], budgets, Deadline(0)).solve(Deadline(20))
    assert (late.live, late.exact, late.infeasible) == (None, False, False)
    assert 0 <= late.bound <= sc.solve(graph, 2**30, solver="save-all").time


def test_the_time_limit_holds_while_a_large_program_is_built() -> None:
    graph = sc.zoo.random_layered(10_000, seed=1)
    problem = Problem(graph, parse_budget("80%", graph))
    assert problem.floor.bytes < problem.budget_bytes < problem.baseline.peak_bytes
    with FakeClock(seconds_per_call=1e-6) as fake:
        propose(problem, deadline=Deadline(1.0), seed=0)
        assert fake.seconds < 2.0
