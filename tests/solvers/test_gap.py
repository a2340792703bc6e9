"""A search ends as soon as its answer is proven within the gap that was asked for, and says how far it has come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import InvalidOptionError
from scheduler.problem import Problem
from scheduler.schedule import schedule_from_runs
from scheduler.solution import Progress, Proposal
from scheduler.solvers import greedy
from scheduler.solvers.dp import solver as dp
from scheduler.solvers.incumbent import Incumbent
from scheduler.solvers.integer_program import IntegerProgram, MilpResult
from tests.support.contract import SMALL_CHAINS, SMALL_STEPS, check_answer, draw_case
from tests.support.examples import examples
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import branches, conv_net, uniform_chain

EXACT_SOLVERS = ("auto", "ilp", "dp", "hierarchical", "checkmate", "moccasin")
"""Solvers that search until their gap is closed."""


@pytest.mark.parametrize("gap", [-0.01, 1.0, 1, math.nan, math.inf, True, "0.5%", None])
def test_a_gap_is_a_number_of_at_least_0_and_below_1(gap: object) -> None:
    for ask in (sc.solve, lambda graph, budget, gap: sc.frontier(graph, [budget], gap=gap)):
        with pytest.raises(InvalidOptionError, match="gap must be a number >= 0 and < 1"):
            ask(uniform_chain(3), 16, gap=gap)  # type: ignore[operator]


@pytest.mark.parametrize("solver", EXACT_SOLVERS)
@settings(max_examples=examples(25))
@given(data=st.data(), gap=st.sampled_from([0.01, 0.05, 0.2]))
def test_an_answer_within_a_gap_is_true_against_the_oracle(solver: str, gap: float, data: st.DataObject) -> None:
    case = draw_case(data, data.draw(st.one_of(SMALL_STEPS, SMALL_CHAINS)))
    for reorder in (True, False):
        solution = check_answer(case, solver, reorder=reorder, gap=gap)
        optima = {"any order": case.any_order, "input order": case.input_order, "late order": case.late_order}
        if solution is not None and solution.search_space in optima and solution.schedule:
            best = optima[solution.search_space]
            assert best is not None
            # Where nothing is proven, the gap says so.
            assert solution.time * (1 - max(gap, solution.gap)) <= best * (1 + 1e-9)


def test_an_answer_within_the_gap_is_feasible_and_states_its_gap() -> None:
    # Counted by hand in `tests/test_api.py`: save everything takes 9; at 16 bytes, 10 is the optimum.
    solution = sc.solve(uniform_chain(3), 16, gap=0.5)
    assert solution.time * (1 - 0.5) <= 10
    assert solution.gap <= 0.5
    assert (solution.status is sc.Status.OPTIMAL) == (solution.gap <= 1e-6)


def test_ilp_solves_fewer_programs_if_a_gap_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    minimize, solved = IntegerProgram.minimize, []

    def count(self: IntegerProgram, *args: object, **options: object) -> MilpResult:
        solved.append(options)
        return minimize(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(IntegerProgram, "minimize", count)
    graph = conv_net(6)
    exact = sc.solve(graph, "60%", solver="ilp", reorder=False)
    programs = len(solved)
    solved.clear()
    close = sc.solve(graph, "60%", solver="ilp", reorder=False, gap=0.02)
    assert len(solved) < programs
    assert close.gap <= 0.02
    assert exact.time <= close.time <= exact.time / (1 - 0.02)


@pytest.mark.parametrize("graph", [conv_net(6), sc.zoo.unet()], ids=["in one program", "in several programs"])
def test_no_kernel_is_needed_where_the_first_integer_programs_prove_their_answer(
    graph: sc.Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget = "90%" if len(graph.operations) < 60 else "70%"
    known = sc.solve(graph, budget, solver="ilp", gap=0.05)

    def compile_first(*_: object) -> None:
        raise AssertionError("a kernel was called")

    for name in ("decode_decisions", "profile_runs"):
        monkeypatch.setattr(greedy, name, compile_first)
    solution = sc.solve(graph, budget, gap=0.05)
    assert known.time * (1 - 0.05) <= solution.time <= known.time / (1 - 0.05)
    assert solution.gap <= 0.05


def test_a_chain_that_a_quick_method_solves_within_the_gap_needs_no_dynamic_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [sc.Layer(f"l{i}", 1.0, 2.0, 10, 10) for i in range(40)]
    chain = sc.Chain(layers, input_bytes=10)

    def refuse(*_: object) -> None:
        raise AssertionError("the dynamic program ran")

    monkeypatch.setattr(dp, "whole_frontier", refuse)
    monkeypatch.setattr(dp, "PrunedSearch", refuse)
    solution = sc.solve(chain, "70%", gap=0.05)
    assert solution.gap <= 0.05
    # One more forward of every layer is never needed at this budget: 40 of 120.
    assert solution.overhead <= 1 / 3


def test_a_long_chain_is_solved_within_the_gap_without_the_exact_program(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = sc.zoo.heterogeneous_chain(120)
    exact = sc.solve(chain, "50%", solver="dp")
    monkeypatch.setattr("scheduler.solvers.dp.pruned_search.run_program", None)
    close = sc.solve(chain, "50%", solver="dp", gap=0.2)
    assert close.gap <= 0.2
    assert exact.time * (1 - 1e-9) <= close.time <= exact.time / (1 - 0.2)


def test_a_slightly_faster_schedule_without_a_proof_does_not_replace_one_within_the_gap() -> None:
    graph = branches(6)
    # All large tensors come first, each dropped for the next: all six are recomputed.
    given = sc.solve(graph, 106, reorder=False, time_limit=20).schedule
    # One branch after another, and four needless runs of the first large tensor.
    other = schedule_from_runs(graph, [0, 0, 0, 0, 0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11])
    for gap, time in ((0.0, 16), (0.1, 16), (0.2, 18)):
        best = Incumbent(Problem(graph, 106, gap=gap), {"input order": graph})
        best.update(Proposal(given, "input order", bound=17.9))
        best.update(Proposal(other, "any order"))
        # At least 12 are needed in any order: a gap of a quarter.
        assert (best.time, best.is_final) == (time, time == 18)


@pytest.mark.parametrize("solver", ["auto", "ilp", "greedy"])
def test_progress_ends_with_the_answer_and_never_gets_worse(solver: str) -> None:
    seen: list[Progress] = []
    with FakeClock(seconds_per_look=0.01):
        solution = sc.solve(conv_net(4), "60%", solver=solver, time_limit=5, progress=seen.append)
    assert (seen[-1].time, seen[-1].bound) == (solution.time, pytest.approx(solution.bound))
    assert seen[-1].gap == pytest.approx(solution.gap)
    assert [entry.time for entry in seen] == sorted((entry.time for entry in seen), reverse=True)
    assert [entry.seconds for entry in seen] == sorted(entry.seconds for entry in seen)
    assert len({(entry.time, entry.bound) for entry in seen}) == len(seen)


def test_progress_must_be_a_function() -> None:
    with pytest.raises(InvalidOptionError, match="progress must be a function or None, got 5"):
        sc.solve(uniform_chain(3), 16, progress=5)  # type: ignore[arg-type]
