"""The entry points: public names, options, answers, and the message when there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from types import ModuleType

import pytest

import scheduler as sc
from scheduler import errors
from scheduler.errors import BudgetTooSmallError, InvalidBudgetError, InvalidOptionError
from scheduler.problem import Problem, floor, least_time, parse_budget
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import conv_net, uniform_chain


def test_all_lists_the_public_names_and_only_submodules_are_left_out() -> None:
    public = {name: value for name, value in vars(sc).items() if not name.startswith("_")}
    modules = {name for name, value in public.items() if isinstance(value, ModuleType)}
    assert sorted(public.keys() - modules | {"zoo"}) == sorted(sc.__all__)
    assert {vars(sc)[name].__name__ for name in modules} == {f"scheduler.{name}" for name in modules}


def interrupted_uses() -> sc.Graph:
    """`heavy` makes 8 bytes that are read three times; between the reads, 8 other bytes are live."""
    operations = [sc.Operation("heavy", [], ["x"], 100.0), sc.Operation("read0", ["x"], ["r0"], 1.0)]
    tensors = [sc.Tensor("x", 8), sc.Tensor("r0", 1)]
    for k in (1, 2):
        operations += [
            sc.Operation(f"big{k}", [f"r{k - 1}"], [f"b{k}"], 1.0),
            sc.Operation(f"reduce{k}", [f"b{k}"], [f"s{k}"], 1.0),
            sc.Operation(f"read{k}", ["x", f"s{k}"], [f"r{k}"], 1.0),
        ]
        tensors += [sc.Tensor(f"b{k}", 8), sc.Tensor(f"s{k}", 1), sc.Tensor(f"r{k}", 1)]
    return sc.Graph(operations, tensors, results=["r2"])


def test_a_plan_of_more_than_twice_the_plain_step_comes_with_a_warning_and_a_budget_that_is_faster() -> None:
    graph = interrupted_uses()
    # Three runs of `heavy` and seven others take 307, one and seven take 107; the second needs x, b and r at once.
    with pytest.warns(
        sc.SlowPlanWarning, match=r"2\.87 times .* proven optimal .* 17 B \(100.0%\), at most 1\.00 times"
    ):
        assert sc.make_plan(graph, 10).time == 307.0
    with warnings.catch_warnings(action="error"):
        assert sc.make_plan(graph, 17).time == 107.0


def test_the_warning_names_a_faster_plan_within_the_budget_where_one_is_known() -> None:
    # The save-everything schedule takes 107 and needs 17 B.
    with pytest.warns(sc.SlowPlanWarning, match=r'plan that takes 1\.00 times as long fits .*: use solver="auto"'):
        assert sc.make_plan(interrupted_uses(), 17, solver="recompute-all").time > 2 * 107


def test_a_solver_without_bounds_gets_them_in_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def prove(problem: sc.Problem, *, deadline: Deadline, seed: int) -> sc.Proposal:
        given.append(deadline.remaining)
        return sc.Proposal(None, "input order")

    monkeypatch.setattr("scheduler.solvers.ilp.propose", prove)
    with FakeClock(seconds_per_look=0.001):
        sc.solve(interrupted_uses(), 10, solver="recompute-all", time_limit=60)
    assert 5 < given[0] <= 6


def test_every_error_is_public() -> None:
    classes = {value for value in vars(errors).values() if isinstance(value, type)}
    assert {getattr(sc, error.__name__) for error in classes} == classes


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert sc.__version__ == version("checkpoint-scheduler")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = sc.no_such_name


def test_importing_the_package_needs_neither_torch_nor_solvers() -> None:
    code = "import sys, scheduler; print([m for m in ('torch', 'numba', 'pulp', 'matplotlib') if m in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_the_uniform_chain_of_three_is_solved_as_counted_by_hand() -> None:
    # Sizes 4, x0 resident. Save everything: at b2 live are x0 x1 x2 g3 g2 = 20; before it, the
    # loss runs with x1 x2 x3 g3 = 20. Time 3 x 1 + 3 x 2 = 9.
    graph = uniform_chain(3)
    full = sc.solve(graph, 20)
    assert (full.time, full.peak_bytes, full.status) == (9.0, 20, sc.Status.OPTIMAL)
    # 16: free x1 after f1, and recompute it for b1 from x0: one more forward.
    tight = sc.solve(graph, 16)
    assert (tight.time, tight.peak_bytes, tight.status) == (10.0, 16, sc.Status.OPTIMAL)
    assert tight.overhead == pytest.approx(1 / 9)
    # Below 16: the loss has x0, x3 and g3; b2 needs x0 x2 g3 g2 at once.
    assert floor(graph).bytes == 16
    assert sc.solve(graph, 15).status is sc.Status.INFEASIBLE


def test_percent_budgets_leave_the_resident_bytes_out() -> None:
    graph = uniform_chain(3)
    assert Problem(graph, 0).baseline.peak_bytes == 20
    assert parse_budget("100%", graph) == 20
    assert parse_budget("50%", graph) == 4 + 8
    assert parse_budget("0%", graph) == 4
    assert parse_budget("33.4 %", graph) == 4 + 5


@pytest.mark.parametrize("budget", ["8G", "lots", "-1", "%", "60%%", "1e3", "", -1, True, 1.5, None])
def test_budgets_that_cannot_be_understood_are_rejected(budget: object) -> None:
    with pytest.raises(InvalidBudgetError):
        sc.solve(uniform_chain(3), budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"time_limit": 0}, {"time_limit": float("nan")}, {"reorder": "best"}, {"seed": -1}, {"seed": 1.0}]
)
def test_options_out_of_range_are_rejected(options: dict[str, object]) -> None:
    with pytest.raises(InvalidOptionError):
        sc.solve(uniform_chain(3), 20, **options)  # type: ignore[arg-type]


def test_a_budget_below_the_floor_names_the_operation_the_floor_and_a_budget_that_suffices() -> None:
    # Resident are 4 bytes, and saving everything adds 16: 10 bytes are 6 of these, 16 are 12.
    with pytest.raises(BudgetTooSmallError) as caught:
        sc.make_plan(uniform_chain(3), 10)
    assert str(caught.value) == (
        'no schedule fits 10 B (37.5%): "b2" alone needs 16 B (75.0%). The smallest possible schedule needs 16 B'
        ' (75.0%). Set the budget to "min" or 16 bytes, use a smaller batch, or split that operation.'
    )
    assert caught.value.proven


def test_without_a_proof_the_message_leaves_open_whether_a_smaller_schedule_exists() -> None:
    graph = sc.zoo.heterogeneous_chain(8, seed=1).graph
    peak, bottom, _ = sc.minimum_budget(graph, time_limit=2.0)
    assert bottom < peak
    with pytest.raises(BudgetTooSmallError, match="whether a smaller one exists is open") as caught:
        sc.make_plan(graph, bottom, solver="greedy")
    assert not caught.value.proven


def test_a_solver_that_misses_a_known_schedule_is_named_and_another_is_suggested() -> None:
    with pytest.raises(BudgetTooSmallError, match=r'save-all found no schedule that fits .* use solver="auto"'):
        sc.make_plan(conv_net(6), "60%", solver="save-all")


def test_the_smallest_budget_of_the_uniform_chain_is_its_floor() -> None:
    peak, bottom, operation = sc.minimum_budget(uniform_chain(8))
    assert (peak, bottom, operation) == (16, 16, "b7")


def test_bounds_come_with_every_answer_even_a_heuristic_one() -> None:
    graph = conv_net(6)
    exact = sc.solve(graph, "70%", solver="ilp")
    assert exact.status is sc.Status.OPTIMAL
    quick = sc.solve(graph, "70%", solver="greedy", time_limit=600)
    assert quick.bound == exact.bound == exact.time
    assert quick.time >= exact.time
    assert quick.gap == pytest.approx((quick.time - exact.time) / quick.time)


def test_the_least_time_counts_each_necessary_task_by_its_fastest_alternative() -> None:
    graph = sc.Graph(
        [
            sc.Operation("slow", [], ["x"], 5.0),
            sc.Operation("fast", [], ["x"], 3.0),
            sc.Operation("y", ["x"], ["y"], 1.0),
        ],
        [sc.Tensor("x", 1), sc.Tensor("y", 1)],
        results=["y"],
    )
    assert least_time(graph) == 4.0
    assert Problem(graph, 10).baseline.time == 6.0


def test_a_run_that_reads_what_its_own_task_produces_is_no_first_run() -> None:
    graph = sc.Graph(
        [
            sc.Operation("plain", [], ["x"], 5.0),
            sc.Operation("keeping", [], ["x", "kept"], 5.0),
            sc.Operation("again", ["kept"], ["x"], 1.0, 7),
            sc.Operation("y", ["x"], ["y"], 1.0),
        ],
        [sc.Tensor("x", 10), sc.Tensor("kept", 10, "x"), sc.Tensor("y", 1)],
        results=["y"],
    )
    assert least_time(graph) == 6.0
    assert floor(graph).bytes == 11


def test_ctrl_c_returns_the_best_answer_and_a_second_one_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    def patient(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        os.kill(os.getpid(), signal.SIGINT)
        while not deadline.passed:
            time.sleep(0.01)
        return Proposal(problem.save_everything, "input order", global_bound=problem.least_time)

    def hasty(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
        raise AssertionError

    graph = uniform_chain(3)
    monkeypatch.setattr("scheduler.api.load_solver", lambda name: patient)
    with FakeClock():  # it stands still: only the interrupt ends the search
        assert sc.solve(graph, "100%", time_limit=60).status is sc.Status.OPTIMAL
    monkeypatch.setattr("scheduler.api.load_solver", lambda name: hasty)
    with pytest.raises(KeyboardInterrupt):
        sc.solve(graph, "100%", time_limit=60)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
