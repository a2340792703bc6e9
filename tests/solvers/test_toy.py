"""Check that a new solver is one function and one line of public names: the function and the line below."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.solvers import registry
from tests.support.contract import SMALL_STEPS, check_answer, draw_case
from tests.support.examples import examples
from tests.support.training_graphs import conv_net


def propose(problem: sc.Problem, *, deadline: sc.Deadline, seed: int) -> sc.Proposal:
    """Return the save-everything schedule, or nothing if it does not fit."""
    fits = problem.baseline.peak_bytes <= problem.budget_bytes
    return sc.Proposal(problem.save_everything if fits else None, "input order")


@pytest.fixture(autouse=True, scope="module")
def toy() -> Iterator[None]:
    with patch.dict(registry.REGISTERED):  # other tests have no toy
        sc.register_solver("toy", propose)
        yield


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_toy_solver_passes_the_contract(data: st.DataObject) -> None:
    case = draw_case(data, data.draw(SMALL_STEPS))
    for reorder in (True, False):
        check_answer(case, "toy", reorder=reorder)


def test_a_toy_solver_solves_compares_and_plans() -> None:
    graph = conv_net(3)
    assert "toy" in sc.solver_names()
    solution = sc.solve(graph, "100%", solver="toy")
    # The bound comes from `ilp`: it proves that the toy's answer is optimal.
    assert (solution.status, solution.overhead) == (sc.Status.OPTIMAL, 0.0)
    assert sc.solve(graph, "60%", solver="toy").status is sc.Status.UNKNOWN
    assert [row.solver for row in sc.compare([graph], ["100%"], ["toy", "greedy"]).rows] == ["toy", "greedy"]
    assert sc.make_plan(graph, "100%", solver="toy").solver == "toy"


@pytest.mark.parametrize("name", ["toy", "ilp"])
def test_a_name_that_is_taken_is_rejected(name: str) -> None:
    with pytest.raises(sc.SchedulerError, match=f'"{name}" is already registered: choose another name'):
        sc.register_solver(name, propose)


def test_a_solver_must_have_a_name_and_be_callable() -> None:
    with pytest.raises(sc.SchedulerError, match="name must be a non-empty str, got ''"):
        sc.register_solver("", propose)
    with pytest.raises(sc.SchedulerError, match="propose must be a function, got 'toy'"):
        sc.register_solver("new", "toy")  # type: ignore[arg-type]
