"""A new solver is one file with a `propose` function and one line in the registry: this file, and the line below."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers import registry
from tests.support.contract import SMALL_STEPS, check_answer, draw_case
from tests.support.examples import examples
from tests.support.training_graphs import conv_net


def propose(problem: Problem, *, deadline: registry.Deadline, seed: int) -> Proposal:
    """Return the save-everything schedule, or nothing if it does not fit."""
    fits = problem.baseline.peak_bytes <= problem.budget_bytes
    return Proposal(problem.save_everything if fits else None, "input order")


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_toy_solver_passes_the_contract(data: st.DataObject) -> None:
    case = draw_case(data, data.draw(SMALL_STEPS))
    with patch.dict(registry.MODULES, {"toy": __name__}):
        for reorder in (True, False):
            check_answer(case, "toy", reorder=reorder)


def test_a_toy_solver_is_solved_with_compared_and_planned_with() -> None:
    graph = conv_net(3)
    with patch.dict(registry.MODULES, {"toy": __name__}):
        assert "toy" in sc.solver_names()
        solution = sc.solve(graph, "100%", solver="toy")
        # The bound comes from the house: it proves the toy right.
        assert (solution.status, solution.overhead) == (sc.Status.OPTIMAL, 0.0)
        assert sc.solve(graph, "60%", solver="toy").status is sc.Status.UNKNOWN
        assert [row.solver for row in sc.compare([graph], ["100%"], ["toy", "greedy"]).rows] == ["toy", "greedy"]
        assert sc.make_plan(graph, "100%", solver="toy").solver == "toy"
