"""The programs of `ilp` on a small graph, checked against the exhaustive oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import combinations

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
    """Draw a budget, an order, perhaps a pair that makes two branches of it, and chains of cuts; check the bounds.

    None exceeds the true optimum, nor does the least one of branches, and what is absorbed does not weaken them. (In a
    branch it may raise the bound: the schedules that it rules out have equals in the other one.)
    """
    problem = Problem(graph, 0)
    budget = data.draw(st.integers(problem.floor.bytes, max(problem.floor.bytes, problem.baseline.peak_bytes)))
    reorder = data.draw(ORDERS, label="reorder")
    best = optimum(graph.to_dict(), budget, "any" if reorder else "input order")
    least = math.inf if best is None else best * (1 + 1e-9)
    branches = [Precedence(graph, reorder=reorder)]
    if reorder and (pairs := pairs_without_order(graph, branches[0])) and data.draw(st.booleans(), label="branches"):
        first, then = data.draw(st.sampled_from(pairs), label="pair")
        branches = [Precedence(graph, reorder=True, pairs=[pair]) for pair in ((first, then), (then, first))]
    for kind in ("whole", data.draw(st.sampled_from(["whole", "relaxed", "counted"]), label="kind")):
        bounds = [branch_bounds(data, graph, budget, precedence, kind) for precedence in branches]
        assert all(min(of_branches) <= least for of_branches in zip(*bounds, strict=True))
        for plain, absorbed in bounds if kind == "whole" else ():
            assert absorbed == plain if len(branches) == 1 else absorbed >= plain


def branch_bounds(
    data: st.DataObject, graph: sc.Graph, budget: int, precedence: Precedence, kind: str
) -> tuple[float, float]:
    """Return the bounds of programs with the same cuts that absorb nothing, and all that can be.

    By their kind, they are whole, relaxed, or relaxed but for some cuts and how often some operations run again.
    """
    tasks = st.lists(st.sampled_from(range(precedence.tasks)), min_size=1, max_size=MOST_TASKS)
    drawn = st.lists(tasks.map(partial(moment, graph, precedence)), min_size=1, max_size=MOST_CUTS)
    chain = precedence.chain(data.draw(drawn, label="cuts"))
    budgets, reductions = [budget] * len(chain), [Reduction(graph, absorbs=absorbs) for absorbs in (False, True)]
    counted: set[int] = set()
    whole_cuts: set[int] | None = None
    if kind == "counted":
        counted = data.draw(st.sets(st.sampled_from(range(len(graph.operations))), min_size=1), label="counted")
        whole_cuts = data.draw(st.sets(st.sampled_from(chain)), label="whole cuts")
    programs = [
        CutRelaxation(graph, precedence, chain, budgets, reduction=reduction, whole_cuts=whole_cuts, counted=counted)
        for reduction in reductions
    ]
    if kind == "relaxed":
        lines = (relax(program, Deadline(20)) for program in programs)
        plain, absorbed = (0.0 if line is None else line[0] for line in lines)
    else:
        for program in programs if data.draw(st.booleans(), label="rows over paths") else ():
            relax(program, Deadline(20), 0.0)
        plain, absorbed = (program.solve(Deadline(20)).bound for program in programs)
    return plain, absorbed


def pairs_without_order(graph: sc.Graph, precedence: Precedence) -> list[tuple[int, int]]:
    """Return the pairs of tasks without alternatives that every schedule runs, in either order."""
    tasks = [task for task in necessary_tasks(graph) if len(graph.index.tasks[task]) == 1]
    return [
        (first, then)
        for first, then in combinations(tasks, 2)
        if not (precedence.precedes(first, then) or precedence.precedes(then, first))
    ]


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
