"""A schedule is a value, its text form is complete, and runs become actions with the earliest frees."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.errors import InvalidScheduleError
from scheduler.graph import Graph, Operation, Tensor
from scheduler.schedule import Compute, Free, Schedule, schedule_from_runs
from tests.support import oracle
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs

NAMES = st.text(st.characters().filter(str.isprintable), min_size=1, max_size=5)
ACTIONS = st.builds(Compute, NAMES) | st.builds(Free, NAMES)


# The value.


def test_schedules_are_equal_by_value_and_hashable() -> None:
    first, second = Schedule([Compute("a"), Free("x")]), Schedule(iter([Compute("a"), Free("x")]))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Schedule([Compute("a")])
    assert first != Schedule([Compute("a"), Compute("x")])


def test_a_schedule_is_iterable_any_number_of_times() -> None:
    schedule = Schedule(iter([Compute("a"), Free("x")]))
    assert list(schedule) == list(schedule) == [Compute("a"), Free("x")]


def test_a_schedule_is_a_sequence() -> None:
    schedule = Schedule([Compute("a"), Free("x"), Compute("b")])
    assert len(schedule) == 3
    assert schedule[0] == Compute("a")
    assert schedule[-1] == Compute("b")
    assert schedule[1:] == Schedule([Free("x"), Compute("b")])
    assert Free("x") in schedule
    assert schedule.index(Free("x")) == 1
    assert not Schedule()


def test_a_schedule_cannot_be_changed() -> None:
    schedule = Schedule([Compute("a")])
    with pytest.raises(AttributeError):
        schedule.actions = ()
    with pytest.raises(AttributeError):
        schedule[0].operation = "b"


def test_a_schedule_can_be_pickled() -> None:
    schedule = Schedule([Compute("a"), Free("x")])
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_an_entry_that_is_not_an_action_is_rejected_with_its_index() -> None:
    with pytest.raises(InvalidScheduleError) as rejected:
        Schedule([Compute("a"), "+b"])
    assert rejected.value.index == 1


def test_a_schedule_is_shown_in_one_line_and_summarized() -> None:
    schedule = Schedule([Compute("a"), Compute("b"), Free("x"), Compute("a")])
    assert repr(schedule) == "Schedule(4 actions)"
    assert schedule.summary().splitlines() == [
        "actions              4",
        "runs                 3",
        "frees                1",
        "operations           2",
        "repeated operations  1",
    ]


# The text form.


def test_the_text_form_has_one_action_a_line() -> None:
    schedule = Schedule([Compute("a b"), Free("-x"), Compute("+a")])
    assert str(schedule) == "+a b\n--x\n++a"
    assert schedule.to_lines() == ["+a b", "--x", "++a"]
    assert str(Schedule()) == ""


@given(st.lists(ACTIONS, max_size=8))
def test_the_text_form_reads_back(actions: list[Compute | Free]) -> None:
    schedule = Schedule(actions)
    assert Schedule.from_text(str(schedule)) == schedule
    assert Schedule.from_lines(schedule.to_lines()) == schedule


@pytest.mark.parametrize("line", ["", "a", "+", "-", " +a", "*a", 3, None])
def test_a_line_that_is_not_an_action_is_rejected_with_its_index(line: object) -> None:
    with pytest.raises(InvalidScheduleError) as rejected:
        Schedule.from_lines(["+a", line])
    assert rejected.value.index == 1


# Runs.


def chain(results: list[str]) -> Graph:
    return Graph(
        [Operation("f", ["w"], ["x"], 1), Operation("g", ["x"], ["y"], 1), Operation("h", ["x", "y"], ["z"], 1)],
        [Tensor(name, 1) for name in "wxyz"],
        resident=["w"],
        results=results,
    )


def test_each_tensor_is_freed_at_once_after_its_last_reader() -> None:
    schedule = schedule_from_runs(chain(["z"]), [0, 1, 2])
    assert schedule.to_lines()[:3] == ["+f", "+g", "+h"]
    assert sorted(schedule.to_lines()[3:]) == ["-x", "-y"]


def test_a_tensor_is_freed_before_it_is_recomputed() -> None:
    schedule = schedule_from_runs(chain(["z"]), [0, 1, 0, 2])
    assert schedule.to_lines()[:4] == ["+f", "+g", "-x", "+f"]


def test_an_unused_tensor_is_freed_at_once() -> None:
    assert schedule_from_runs(chain(["x"]), [0, 1]).to_lines() == ["+f", "+g", "-y"]


def test_a_result_is_held_to_the_end() -> None:
    assert schedule_from_runs(chain(["x", "y", "z"]), [0, 1, 2]).to_lines() == ["+f", "+g", "+h"]


def test_a_result_is_not_held_before_it_is_recomputed() -> None:
    assert schedule_from_runs(chain(["x", "y"]), [0, 1, 0]).to_lines() == ["+f", "+g", "-x", "+f"]


def test_no_runs_are_an_empty_schedule() -> None:
    assert schedule_from_runs(chain(["z"]), []) == Schedule()


def test_a_live_output_is_freed_before_it_is_recomputed_with_another() -> None:
    graph = Graph(
        [
            Operation("both", [], ["a", "b"], 1),
            Operation("p", ["b"], ["c"], 1),
            Operation("q", ["a", "b", "c"], ["z"], 1),
        ],
        [Tensor(name, 1) for name in "abcz"],
        results=["z"],
    )
    # a has no reader before both runs again, so the first a goes at once.
    assert schedule_from_runs(graph, [0, 1, 0, 2]).to_lines()[:5] == ["+both", "-a", "+p", "-b", "+both"]


@settings(max_examples=examples(200))
@given(graphs() | joint_graphs(), st.data())
def test_runs_whose_inputs_were_produced_break_no_rule_of_liveness(graph: Graph, data: st.DataObject) -> None:
    # Phases forbid some orders of runs; here only liveness is in question.
    graph = replace(graph, operations=tuple(replace(op, phase="forward") for op in graph.operations))
    runs: list[int] = []
    for _ in range(data.draw(st.integers(0, 8))):
        made = {name for i in runs for name in graph.operations[i].outputs} | set(graph.resident)
        possible = [i for i, op in enumerate(graph.operations) if op.repeatable and set(op.inputs) <= made]
        if possible:
            runs.append(data.draw(st.sampled_from(possible)))
    plain, state = oracle.read(graph.to_dict()), oracle.start()
    for action in schedule_from_runs(graph, runs):
        kind, name = ("compute", action.operation) if isinstance(action, Compute) else ("free", action.tensor)
        state, _ = oracle.step(plain, state, (kind, name))  # raises where a rule is broken
    held = frozenset().union(*state.instances)
    assert held == set(graph.results) & {name for i in runs for name in graph.operations[i].outputs}
