"""The programs of `ilp` on a small graph, checked against the exhaustive oracle."""

from __future__ import annotations

import math

from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation
from tests.support.oracle import optimum

MOST_CUTS = 3
ORDERS = st.sampled_from([True, True, False])


def check_cut_bounds(data: st.DataObject, graph: sc.Graph) -> None:
    """Draw a budget, an order and two chains of cuts, and check that no bound exceeds the true optimum."""
    problem = Problem(graph, 0)
    budget = data.draw(st.integers(problem.floor.bytes, max(problem.floor.bytes, problem.baseline.peak_bytes)))
    reorder = data.draw(ORDERS, label="reorder")
    best = optimum(graph.to_dict(), budget, "any" if reorder else "input order")
    least = math.inf if best is None else best * (1 + 1e-9)
    precedence = Precedence(graph, reorder=reorder)
    for relaxed in (False, data.draw(st.booleans(), label="relaxed")):
        tasks = st.lists(st.sampled_from(range(len(graph.index.tasks))), min_size=1, max_size=MOST_CUTS, unique=True)
        chain = precedence.chain(data.draw(tasks, label="cuts"))
        program = CutRelaxation(graph, precedence, chain, [budget] * len(chain))
        if relaxed:
            line = program.relaxed(Deadline(20))
            assert line is None or line[0] <= least
        else:
            assert program.solve(Deadline(20)).bound <= least
