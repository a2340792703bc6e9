"""The programs of `ilp` on a small graph, checked against the exhaustive oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem, necessary_tasks
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.path_rows import relax
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutRelaxation
from tests.support.oracle import optimum

MOST_CUTS, MOST_TASKS = 3, 3
"""Cuts of a program, and tasks of which the first one's run is a cut."""
ORDERS = st.sampled_from([True, True, False])


def check_cut_bounds(data: st.DataObject, graph: sc.Graph) -> None:
    """Draw a budget, an order and two chains of cuts; check the bounds.

    None exceeds the true optimum, and what is absorbed does not weaken them.
    """
    problem = Problem(graph, 0)
    budget = data.draw(st.integers(problem.floor.bytes, max(problem.floor.bytes, problem.baseline.peak_bytes)))
    reorder = data.draw(ORDERS, label="reorder")
    best = optimum(graph.to_dict(), budget, "any" if reorder else "input order")
    least = math.inf if best is None else best * (1 + 1e-9)
    precedence = Precedence(graph, reorder=reorder)
    for relaxed in (False, data.draw(st.booleans(), label="relaxed")):
        tasks = st.lists(st.sampled_from(range(len(graph.index.tasks))), min_size=1, max_size=MOST_TASKS)
        drawn = st.lists(tasks.map(partial(moment, graph, precedence)), min_size=1, max_size=MOST_CUTS)
        chain = precedence.chain(data.draw(drawn, label="cuts"))
        programs = [
            CutRelaxation(graph, precedence, chain, [budget] * len(chain), reduction=Reduction(graph, absorbs=absorbs))
            for absorbs in (False, True)
        ]
        if relaxed:
            lines = [relax(program, Deadline(20)) for program in programs]
            assert all(line is None or line[0] <= least for line in lines)
        else:
            for program in programs if data.draw(st.booleans(), label="rows over paths") else ():
                relax(program, Deadline(20), 0.0)
            plain, absorbed = (program.solve(Deadline(20)).bound for program in programs)
            assert plain <= least
            assert absorbed == plain


def moment(graph: sc.Graph, precedence: Precedence, tasks: Sequence[int]) -> int:
    """Return the first run of the first one of these tasks that may come first; of one task, if it is the only one."""
    joint: list[int] = []
    for task in tasks:
        may_join = task in necessary_tasks(graph) and len(graph.index.tasks[task]) == 1
        if may_join and not any(
            precedence.precedes(task, other) or precedence.precedes(other, task) for other in joint
        ):
            joint.append(task)
    return precedence.first_of(joint) if joint else tasks[0]


def step_with_a_task_that_may_wait() -> sc.Graph:
    """The task "wide" needs all but two of the budget's 9 bytes; "free" may run before it or after it.

    Before it, its result takes 4 bytes; after it, so does its input, unless it is computed again, in 5.
    """
    operations = [
        sc.Operation("first", [], ["x", "y"], 5.0),
        sc.Operation("wide", ["y"], ["z"], 1.0, workspace_bytes=5),
        sc.Operation("free", ["x"], ["r"], 1.0),
    ]
    sizes = {"x": 4, "y": 1, "z": 1, "r": 4}
    return sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=["z", "r"])


def step_with_two_branches() -> sc.Graph:
    """Either of "a" and "b" may come first, and needs 10 bytes next to the other's input of 4, which takes 5 s."""
    operations = [
        sc.Operation("input of a", [], ["x"], 5.0),
        sc.Operation("input of b", [], ["y"], 5.0),
        sc.Operation("a", ["x"], ["p"], 1.0, workspace_bytes=5, phase="backward"),
        sc.Operation("b", ["y"], ["q"], 1.0, workspace_bytes=5, phase="backward"),
    ]
    sizes = {"x": 4, "y": 4, "p": 1, "q": 1}
    return sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=["p", "q"])
