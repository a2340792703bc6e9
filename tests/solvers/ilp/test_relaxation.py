"""Check the integer programs of `ilp`: that their optima are bounds, and what makes them strong."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.path_rows import PathRows, relax
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutRelaxation, PathRow
from tests.support.contract import SMALL_STEPS
from tests.support.cut_bounds import check_cut_bounds, step_with_a_task_that_may_wait, step_with_two_branches
from tests.support.examples import examples
from tests.support.oracle import optimum
from tests.support.strategies import thin_graphs
from tests.support.training_graphs import conv_net


@settings(max_examples=examples(100))
@given(data=st.data(), graph=st.one_of(SMALL_STEPS, thin_graphs()))
def test_no_program_claims_more_than_the_oracle_finds(data: st.DataObject, graph: sc.Graph) -> None:
    check_cut_bounds(data, graph)


@settings(max_examples=examples(30))
@given(data=st.data(), graph=SMALL_STEPS)
def test_further_cuts_never_weaken_the_relaxed_program(data: st.DataObject, graph: sc.Graph) -> None:
    problem = Problem(graph, 0)
    budget = data.draw(st.integers(problem.floor.bytes, max(problem.floor.bytes, problem.baseline.peak_bytes)))
    precedence = Precedence(graph, reorder=data.draw(st.booleans(), label="reorder"))
    tasks = st.lists(st.sampled_from(range(len(graph.index.tasks))), min_size=1, max_size=4, unique=True)
    chain = precedence.chain(data.draw(tasks, label="cuts"))
    fewer = data.draw(st.sets(st.sampled_from(chain), min_size=1), label="fewer")
    some = [cut for cut in chain if cut in fewer]
    more, less = (
        relax(CutRelaxation(graph, precedence, cuts, [budget] * len(cuts)), Deadline(20), 0.0, 1e-6)
        for cuts in (chain, some)
    )
    # No line means that the program has no point, or no variable.
    assert more is None or less is None or more[0] >= less[0] * (1 - 1e-6)


@settings(max_examples=examples(100))
@given(data=st.data(), graph=st.one_of(SMALL_STEPS, thin_graphs()))
def test_rows_over_paths_cut_off_no_integral_point(data: st.DataObject, graph: sc.Graph) -> None:
    problem = Problem(graph, 0)
    budget = data.draw(st.integers(problem.floor.bytes, max(problem.floor.bytes, problem.baseline.peak_bytes)))
    precedence = Precedence(graph, reorder=data.draw(st.booleans(), label="reorder"))
    reduction = Reduction(graph, absorbs=data.draw(st.booleans(), label="absorbs"))
    tasks = st.lists(st.sampled_from(range(len(graph.index.tasks))), min_size=1, max_size=5, unique=True)
    chain = precedence.chain(data.draw(tasks, label="cuts"))

    def program(paths: Iterable[PathRow] = ()) -> CutRelaxation:
        return CutRelaxation(graph, precedence, chain, [budget] * len(chain), reduction=reduction, paths=paths)

    point = program()
    # Any values will do: those at random break more rows than the points of relaxations.
    random = data.draw(st.randoms(use_true_random=False))
    for variable in point.program.variables:
        variable.value = random.choice((0.0, 0.5, 1.0))
    paths = PathRows(point, 0.0).broken()
    assert program(paths).solve(Deadline(20)).bound == program().solve(Deadline(20)).bound


def test_rows_over_paths_know_at_every_later_cut_that_a_task_has_run() -> None:
    # All forward tasks come before "again", and "second" after the task of "first", though this one may be backward.
    operations = [
        sc.Operation("first", [], ["x"], 1.0),
        sc.Operation("middle", ["x"], ["y"], 0.0, repeatable=False),
        sc.Operation("second", ["y", "x"], ["p", "q"], 0.0),
        sc.Operation("other", ["q"], ["x", "z"], 2.0, workspace_bytes=1, phase="backward"),
        sc.Operation("again", [], ["r"], 0.0, workspace_bytes=3, phase="backward", repeatable=False),
    ]
    sizes = {"x": 1, "y": 0, "p": 1, "q": 0, "z": 0, "r": 1}
    graph = sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=["p"])
    precedence = Precedence(graph, reorder=True)
    assert [precedence.before(task) for task in range(4)] == [0, 0b1, 0b11, 0b111]
    for absorbs in (False, True):
        program = CutRelaxation(graph, precedence, [1, 2, 3], [12] * 3, reduction=Reduction(graph, absorbs=absorbs))
        relaxed = relax(program, Deadline(20))
        assert relaxed is not None
        assert relaxed[0] <= 1.0 == optimum(graph.to_dict(), 12, "any")


def test_a_task_that_may_run_before_or_after_the_cut_needs_memory_there_either_way() -> None:
    graph = step_with_a_task_that_may_wait()
    assert optimum(graph.to_dict(), 9, "any") == 5 + 1 + 1 + 5
    program = CutRelaxation(graph, Precedence(graph, reorder=True), [1], [9])
    assert program.solve(Deadline(20)).bound == 12.0


def test_the_first_one_of_two_branches_needs_memory_for_both() -> None:
    graph, budget = step_with_two_branches(), 11
    precedence = Precedence(graph, reorder=True)

    def bound(cut: int, precedence: Precedence = precedence) -> float:
        return CutRelaxation(graph, precedence, [cut], [budget]).solve(Deadline(20)).bound

    assert bound(2) == bound(3) == 12.0  # the other one comes first
    for pair in ((2, 3), (3, 2)):
        assert bound(pair[0], Precedence(graph, reorder=True, pairs=[pair])) == 17.0
    assert bound(precedence.first_of((2, 3))) == optimum(graph.to_dict(), budget, "any") == 17.0


def test_an_operation_that_is_counted_does_not_run_again_in_part() -> None:
    # At the cut, half of x fits.
    operations = [
        sc.Operation("x", [], ["x"], 10.0),
        sc.Operation("cut", [], ["y"], 1.0, workspace_bytes=3),
        sc.Operation("last", ["x", "y"], ["z"], 1.0),
    ]
    graph = sc.Graph(operations, [sc.Tensor("x", 4), sc.Tensor("y", 1), sc.Tensor("z", 1)], results=["z"])
    precedence = Precedence(graph, reorder=False)
    in_part = CutRelaxation(graph, precedence, [1], [6], whole_cuts=[])
    counted = CutRelaxation(graph, precedence, [1], [6], whole_cuts=[], counted=[0])
    assert in_part.solve(Deadline(20)).bound == 12 + 5
    assert in_part.counted_in_part() == [0]
    assert counted.solve(Deadline(20)).bound == 12 + 10
    assert counted.counted_in_part() == []


def test_the_relaxed_program_recomputes_the_base_of_a_view_with_the_view() -> None:
    # At the cut, half of x fits. Its other half costs half of what both x and its view take: (8 + 1) / 2.
    operations = [
        sc.Operation("base", [], ["x"], 8.0),
        sc.Operation("view", ["x"], ["v"], 1.0),
        sc.Operation("cut", ["v"], ["y"], 1.0),
        sc.Operation("second", ["y"], ["w"], 1.0, workspace_bytes=3),
        sc.Operation("reader", ["v", "w"], ["z"], 1.0),
    ]
    tensors = [sc.Tensor("x", 4), sc.Tensor("v", 4, "x"), *(sc.Tensor(name, 1) for name in "ywz")]
    graph = sc.Graph(operations, tensors, results=["z"])
    program = CutRelaxation(graph, Precedence(graph, reorder=False), [3], [7])
    time, prices = program.relaxed(Deadline(20))
    assert time == pytest.approx(12 + 4.5)
    assert prices == pytest.approx([9 / 4])
    assert program.solve(Deadline(20)).bound == 12 + 9


def test_small_tensors_are_kept_in_part_where_that_is_allowed() -> None:
    # At the cut, 250 of 400 bytes fit, in tensors of 4 bytes that take 1 each to recompute: 62 of them or 62.5.
    names = [f"x{k}" for k in range(100)]
    operations = [
        *(sc.Operation(name, [], [name], 1.0) for name in names),
        sc.Operation("cut", [], ["y"], 1.0),
        *(sc.Operation(f"read_{name}", [name], [f"r{name}"], 1.0) for name in names),
    ]
    tensors = [
        *(sc.Tensor(name, 4) for name in names),
        sc.Tensor("y", 0),
        *(sc.Tensor(f"r{name}", 0) for name in names),
    ]
    graph = sc.Graph(operations, tensors, results=["y", *(f"r{name}" for name in names)])
    precedence = Precedence(graph, reorder=False)
    whole = CutRelaxation(graph, precedence, [100], [251])
    assert whole.solve(Deadline(20)).bound == 201 + 38
    parts = CutRelaxation(graph, precedence, [100], [251], most_whole=50).solve(Deadline(20))
    assert 201 + 37 <= parts.bound <= 201 + 38
    assert sum(len(live) for live in parts.live) in (62, 63)


@pytest.mark.parametrize("reorder", [False, True])
def test_absorbed_operations_have_no_variables_and_the_same_bound(reorder: bool) -> None:
    graph = conv_net(6)
    precedence = Precedence(graph, reorder=reorder)
    cut = precedence.chain([len(graph.index.tasks) // 2])
    budget = [parse_budget("60%", graph)]
    programs = [
        CutRelaxation(graph, precedence, cut, budget, reduction=Reduction(graph, absorbs=a)) for a in (True, False)
    ]
    assert len(programs[0].saved[0]) < len(programs[1].saved[0])
    absorbed, plain = (program.solve(Deadline(20)).bound for program in programs)
    assert absorbed == plain
