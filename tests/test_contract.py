"""What every registered solver owes its callers: `tests/support/contract.py`, and what needs no oracle."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import MissingExtraError, UnsuitableProblemError
from tests.support.contract import SMALL_CHAINS, SMALL_STEPS, check_answer, draw_case, solve_or_skip
from tests.support.examples import examples
from tests.support.fake_clock import FakeClock
from tests.support.oracle import least_peak
from tests.support.strategies import chains, joint_graphs
from tests.support.training_graphs import conv_net

pytestmark = pytest.mark.long(45)

SOLVERS = sc.solver_names()


@settings(max_examples=examples(60))
@given(data=st.data())
def test_every_answer_of_every_solver_is_true_against_the_oracle(data: st.DataObject) -> None:
    check_all(data, data.draw(SMALL_STEPS))


@settings(max_examples=examples(10))
@given(data=st.data())
def test_every_answer_of_every_solver_on_a_chain_is_true_against_the_oracle(data: st.DataObject) -> None:
    check_all(data, data.draw(SMALL_CHAINS))


def check_all(data: st.DataObject, graph_or_chain: sc.Graph | sc.Chain) -> None:
    """Draw a budget, ask the oracle once, and check all solvers with and without reordering."""
    case = draw_case(data, graph_or_chain)
    for solver in SOLVERS:
        for reorder in (True, False):
            check_answer(case, solver, reorder=reorder)


@settings(max_examples=examples(40))
@given(graph=SMALL_STEPS)
def test_the_least_peak_lies_between_the_floor_and_a_budget_that_is_met(graph: sc.Graph) -> None:
    peak, floor, operation = sc.minimum_budget(graph, time_limit=10.0)
    assert sc.solve(graph, peak, time_limit=10.0).peak_bytes <= peak
    assert floor <= least_peak(graph.to_dict(), "any") <= peak
    assert operation in {entry.name for entry in graph.operations}


CLOCKLESS = [name for name in SOLVERS if name not in ("auto", "anneal", "moccasin", "checkmate")]
"""Solvers whose answers for such small graphs do not depend on the clock."""


def scaled(graph: sc.Graph, power: int) -> sc.Graph:
    """The graph with times and bytes times a power of two, and other names."""
    return replace(
        graph,
        operations=[
            replace(
                entry,
                name=f"renamed_{entry.name}",
                inputs=[f"renamed_{name}" for name in entry.inputs],
                outputs=[f"renamed_{name}" for name in entry.outputs],
                time=entry.time * 2.0**power,
                workspace_bytes=entry.workspace_bytes * 2**power,
            )
            for entry in graph.operations
        ],
        tensors=[
            replace(
                entry,
                name=f"renamed_{entry.name}",
                size_bytes=entry.size_bytes * 2**power,
                storage=f"renamed_{entry.storage}",
            )
            for entry in graph.tensors
        ],
        resident=[f"renamed_{name}" for name in graph.resident],
        results=[f"renamed_{name}" for name in graph.results],
        required=[f"renamed_{name}" for name in graph.required],
    )


@pytest.mark.parametrize("solver", CLOCKLESS)
@settings(max_examples=examples(15))
@given(graph=joint_graphs(max_layers=2), power=st.integers(1, 12), share=st.integers(40, 100))
def test_powers_of_two_and_other_names_change_nothing_else(
    solver: str, graph: sc.Graph, power: int, share: int
) -> None:
    extra = sc.solve(graph, 2**40, solver="save-all").peak_bytes - graph.resident_bytes
    budget = graph.resident_bytes + extra * share // 100
    plain = solve_or_skip(graph, budget, solver=solver)
    other = solve_or_skip(scaled(graph, power), budget * 2**power, solver=solver)
    assert (plain is None) == (other is None)
    if plain is None or other is None:
        return
    assert other.status is plain.status
    assert (other.schedule is None) == (plain.schedule is None)
    if plain.schedule is not None and other.schedule is not None:
        assert str(other.schedule).replace("renamed_", "") == str(plain.schedule)
        assert other.time == plain.time * 2.0**power
        assert other.peak_bytes == plain.peak_bytes * 2**power


@pytest.mark.parametrize("solver", ["dp", "ilp", "checkmate"])
@settings(max_examples=examples(15))
@given(chain=chains(min_layers=2, max_layers=4, max_modes=0), data=st.data())
def test_a_larger_budget_is_never_slower(solver: str, chain: sc.Chain, data: st.DataObject) -> None:
    peak = sc.solve(chain, 2**40, solver="save-all").peak_bytes
    budgets = sorted(data.draw(st.lists(st.integers(0, peak), min_size=2, max_size=4)))
    solutions = [solve_or_skip(chain, budget, solver=solver) for budget in budgets]
    done = [entry for entry in solutions if entry is not None and entry.status is not sc.Status.FEASIBLE]
    assert [entry.time for entry in done] == sorted((entry.time for entry in done), reverse=True)


LARGE = {
    "convolutions": conv_net(40),
    "random": sc.zoo.random_layered(100, seed=3),
    "chain": sc.Chain(
        [sc.Layer(f"l{i}", 1.0 + i % 7, 2.0 + i % 5, 100 + i % 11, 300 + i % 13) for i in range(100)], 100
    ),
}


@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("solver", SOLVERS)
def test_at_most_as_much_work_follows_the_time_limit_as_came_before_it(solver: str, kind: str) -> None:
    # One second is 100 looks at the clock, or a million calls, which take about a tenth of a second of real time.
    with FakeClock(seconds_per_look=0.01, seconds_per_call=1e-6) as fake:
        with contextlib.suppress(UnsuitableProblemError, MissingExtraError):
            sc.solve(LARGE[kind], "50%", solver=solver, time_limit=1.0)
        assert fake.seconds < 2.0


def test_an_unknown_solver_is_refused_with_the_known_ones() -> None:
    graph = sc.Graph([sc.Operation("a", [], ["x"], 1.0)], [sc.Tensor("x", 1)], results=["x"])
    with pytest.raises(sc.SchedulerError, match=r"save-all.*ilp.*auto"):
        sc.solve(graph, 10, solver="magic")
