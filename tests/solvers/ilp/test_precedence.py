"""Check what must come before what: tasks, and moments at which the first one of several tasks runs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.solvers.ilp.precedence import Precedence, bits
from tests.support.contract import SMALL_STEPS
from tests.support.cut_bounds import moment, step_with_two_branches
from tests.support.examples import examples


def test_precedence_in_any_order_follows_data_and_phases_only() -> None:
    graph = sc.Graph(
        [
            sc.Operation("a", [], ["a"], 1.0),
            sc.Operation("b", [], ["b"], 1.0),
            sc.Operation("c", ["a"], ["c"], 1.0),
            sc.Operation("z", [], ["z"], 1.0, phase="backward"),
        ],
        [sc.Tensor(name, 1) for name in "abcz"],
        results=["c", "z"],
        required=["b"],
    )
    free, given = Precedence(graph, reorder=True), Precedence(graph, reorder=False)
    assert [free.before(task) for task in range(4)] == [0, 0, 0b001, 0b111]
    assert [free.after(task) for task in range(4)] == [0b1100, 0b1000, 0b1000, 0]
    assert [given.before(task) for task in range(4)] == [0, 0b1, 0b11, 0b111]
    assert free.chain([1, 2, 3]) == [1, 3]
    assert (free.unordered.tolist(), given.unordered.tolist()) == ([1, 2, 1, 0], [0, 0, 0, 0])


def test_tasks_without_precedence_have_a_first_one() -> None:
    precedence = Precedence(step_with_two_branches(), reorder=True)
    first = precedence.first_of((3, 2))
    assert first == precedence.first_of((2, 3)) != precedence.first_of((0, 1))
    assert precedence.members(first) == (2, 3)
    assert precedence.first_of((2,)) == 2
    assert precedence.chain([2, 3]) == [2]
    assert precedence.chain([2, first, precedence.first_of((0, 1))]) == [precedence.first_of((0, 1)), 2]


def test_a_task_that_all_of_a_moment_follow_comes_before_it() -> None:
    # As many tasks must follow "root" as follow the first one of these two, which are among those.
    operations = [sc.Operation(name, [] if name == "root" else ["root"], [name], 1.0) for name in ("root", "x", "y")]
    graph = sc.Graph(operations, [sc.Tensor(name, 1) for name in ("root", "x", "y")], results=["x", "y"])
    precedence = Precedence(graph, reorder=True)
    first = precedence.first_of((1, 2))
    assert precedence.after(0) == precedence.after(first) == 0b110
    assert precedence.chain([first, 0]) == precedence.chain([0, first]) == [0, first]


def test_the_order_of_a_pair_holds_for_all_that_precede_or_follow_it() -> None:
    operations = [
        sc.Operation("a", [], ["a"], 1.0),
        sc.Operation("b", ["a"], ["b"], 1.0),
        sc.Operation("c", [], ["c"], 1.0),
        sc.Operation("d", ["c"], ["d"], 1.0),
    ]
    graph = sc.Graph(operations, [sc.Tensor(name, 1) for name in "abcd"], results=["b", "d"])
    free, given = Precedence(graph, reorder=True), Precedence(graph, reorder=True, pairs=[(1, 2)])
    assert [free.before(task) for task in range(4)] == [0, 0b0001, 0, 0b0100]
    assert [given.before(task) for task in range(4)] == [0, 0b0001, 0b0011, 0b0111]
    assert [given.after(task) for task in range(4)] == [0b1110, 0b1100, 0b1000, 0]
    assert (free.unordered.tolist(), given.unordered.tolist()) == ([2, 2, 2, 2], [0, 0, 0, 0])


def test_what_a_forward_task_needs_precedes_the_backward_though_it_may_run_there_too() -> None:
    operations = [
        sc.Operation("f", [], ["t"], 1.0),
        sc.Operation("g", ["t"], ["u"], 1.0),
        sc.Operation("b", [], ["t"], 1.0, phase="backward"),
        sc.Operation("c", [], ["v"], 1.0, phase="backward"),
    ]
    graph = sc.Graph(operations, [sc.Tensor(name, 1) for name in "tuv"], results=["u", "v"])
    precedence = Precedence(graph, reorder=True)
    assert graph.index.tasks == ((0, 2), (1,), (3,))
    assert [precedence.before(task) for task in range(3)] == [0, 0b1, 0b11]
    assert precedence.chain([1, 0]) == [0, 1]


@settings(max_examples=examples(100))
@given(data=st.data(), graph=SMALL_STEPS)
def test_what_is_said_of_moments_holds_in_every_order(data: st.DataObject, graph: sc.Graph) -> None:
    precedence = Precedence(graph, reorder=True)
    tasks = range(precedence.tasks)
    place: dict[int, int] = {}
    while len(place) < len(tasks):
        ready = [t for t in tasks if t not in place and all(other in place for other in bits(precedence.before(t)))]
        place[data.draw(st.sampled_from(ready))] = len(place)
    drawn = st.lists(st.sampled_from(tasks), min_size=1, max_size=4).map(lambda some: moment(graph, precedence, some))
    moments = data.draw(st.lists(drawn, min_size=1, max_size=4))
    at = {number: min(place[task] for task in precedence.members(number)) for number in moments}
    for number in moments:
        assert all(place[task] < at[number] for task in bits(precedence.before(number)))
        assert all(place[task] >= at[number] for task in bits(precedence.after(number)))
        assert all(at[number] < at[other] for other in moments if precedence.precedes(number, other))
    chain = precedence.chain(moments)
    assert moments[0] in chain
    assert [at[number] for number in chain] == sorted({at[number] for number in chain})
