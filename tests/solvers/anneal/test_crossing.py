"""Check crossings of schedules: they are valid, and combine what is good in either."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.schedule import follows_input_order, runs_of, schedule_from_runs
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.anneal.crossing import MOST_PARENTS, Crossings, Parent, cross, translate
from scheduler.solvers.anneal.repeats import NONE
from scheduler.solvers.anneal.walker import Walker
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.graph_arrays import graph_arrays, profile_runs
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import uniform_chain


def annealed(graph: sc.Graph, budget: int, seed: int, *, free: bool) -> sc.Schedule:
    """The schedule after hot moves from the save-everything one; it may exceed the budget."""
    walker = Walker(Contraction(graph, budget), seed, free=free)
    walker.load(runs_of(graph, Problem(graph, budget).save_everything), 0.5)
    walker.cool(0.5, 200, Deadline(1e6))
    return schedule_from_runs(graph, walker.contraction.expand(walker.state.run[walker.state.run >= 0].tolist()))


@settings(max_examples=examples(150))
@given(data=st.data(), free=st.booleans())
def test_a_crossing_is_valid_and_in_the_order_of_its_parents(data: st.DataObject, free: bool) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    budget = data.draw(st.integers(0, 40))
    begin, end = (Parent(graph, annealed(graph, budget, seed, free=free)) for seed in range(2))
    runs = cross(begin, end, data.draw(st.integers(1, min(len(begin.firsts), len(end.firsts)))))
    schedule = schedule_from_runs(graph, runs)
    simulation = sc.simulate(graph, schedule)  # raises if a rule is broken
    memory = profile_runs(graph_arrays(graph), np.array(runs, dtype=np.int64)).memory
    assert memory.max() + graph.resident_bytes == simulation.peak_bytes
    assert free or follows_input_order(graph, schedule)


@settings(max_examples=examples(50))
@given(data=st.data())
def test_a_schedule_crossed_with_itself_is_itself(data: st.DataObject) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    parent = Parent(graph, annealed(graph, 20, 0, free=True))
    for firsts in range(1, len(parent.firsts) + 1):
        assert cross(parent, parent, firsts) == list(parent.runs)


def test_where_orders_differ_what_the_beginning_lacks_follows_it_and_nothing_runs_first_twice() -> None:
    graph = sc.Graph(
        [
            *(sc.Operation(name, [], [name.upper()], 1.0) for name in "abcd"),
            sc.Operation("e", list("ABCD"), ["E"], 1.0),
        ],
        [sc.Tensor(name, 1) for name in "ABCDE"],
        results=["E"],
    )
    begin, end = (
        Parent(graph, schedule_from_runs(graph, ["abcde".index(name) for name in order]))
        for order in ("abcdabe", "dcbdcae")
    )
    assert "".join("abcde"[i] for i in cross(begin, end, 2)) == "abdcdce"


def wasteful(graph: sc.Graph, at: int, waste: int = 1) -> sc.Schedule:
    """Everything saved, but the first operation runs so many more times right before a position, for nothing."""
    runs = list(runs_of(graph, Problem(graph, 0).save_everything))
    return schedule_from_runs(graph, [*runs[:at], *[0] * waste, *runs[at:]])


def test_the_crossing_has_what_is_fast_in_either() -> None:
    graph = uniform_chain(6)
    baseline = Problem(graph, 0).baseline
    crossings = Crossings(graph, baseline.peak_bytes)
    early, late = wasteful(graph, 3), wasteful(graph, len(graph.operations) - 1, 2)
    for schedule in (early, late):
        assert crossings.next(Random(0), Deadline(1e6)) is None
        assert not crossings.are_possible
        crossings.add(schedule)
    found = crossings.next(Random(0), Deadline(1e6))
    assert found is not None
    assert sc.simulate(graph, found).time == baseline.time


def test_a_schedule_is_crossed_with_itself_where_parts_repeat() -> None:
    """One layer's output is recomputed for nothing; those of the others are not."""
    graph = uniform_chain(8)
    baseline = Problem(graph, 0).baseline
    crossings = Crossings(graph, baseline.peak_bytes)
    runs = list(runs_of(graph, Problem(graph, 0).save_everything))
    crossings.add(schedule_from_runs(graph, [*runs[:10], 4, *runs[10:]]))
    assert crossings.are_possible
    found = crossings.next(Random(0), Deadline(1e6))
    assert found is not None
    assert sc.simulate(graph, found).time == baseline.time


def test_none_is_returned_twice() -> None:
    graph = uniform_chain(6)
    crossings = Crossings(graph, Problem(graph, 0).baseline.peak_bytes)
    crossings.add(wasteful(graph, 3))
    crossings.add(wasteful(graph, len(graph.operations) - 1, 2))
    found = [crossings.next(Random(seed), Deadline(1e6)) for seed in range(3)]
    assert found[0] is not None
    assert found[1:] == [None, None]


def test_parents_are_the_fastest_schedules_of_different_times() -> None:
    graph = uniform_chain(6)
    crossings = Crossings(graph, 0)
    for waste in range(MOST_PARENTS + 2, 0, -1):
        for at in (1, 3):
            crossings.add(wasteful(graph, at, waste))
    unwasted = Problem(graph, 0).baseline.time
    assert [parent.time - unwasted for parent in crossings.parents] == list(range(1, MOST_PARENTS + 1))


@settings(max_examples=examples(150))
@given(data=st.data(), free=st.booleans())
def test_a_translation_is_valid_and_in_the_order_of_its_target(data: st.DataObject, free: bool) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    count = len(graph.operations)
    source, target = (Parent(graph, annealed(graph, 20, seed, free=free)) for seed in range(2))
    image = np.array(data.draw(st.permutations(range(count))), dtype=np.int64)
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    image[[not graph.operations[i].repeatable for i in image]] = NONE
    image[data.draw(flags)] = NONE
    part = (image != NONE) & data.draw(flags)
    runs = translate(source, target, image, part)
    schedule = schedule_from_runs(graph, runs)
    sc.simulate(graph, schedule)  # raises if a rule is broken
    assert list(dict.fromkeys(runs)) == list(dict.fromkeys(target.runs))
    assert free or follows_input_order(graph, schedule)
    others = np.isin(target.again, image[part], invert=True)
    assert np.isin(runs, target.again[others]).sum() >= others.sum()


def test_a_translation_recomputes_in_one_part_what_another_one_recomputes() -> None:
    """Of a chain of six layers, the second one's output is recomputed for its reader in the backward, as of others."""
    graph = uniform_chain(6)
    names = {operation.name: i for i, operation in enumerate(graph.operations)}

    def recomputing(*layers: int) -> Parent:
        order = [*(f"f{i}" for i in range(6)), "loss"]
        for i in reversed(range(6)):
            order += [f"f{i - 1}"] * (i - 1 in layers) + [f"b{i}"]
        return Parent(graph, schedule_from_runs(graph, [names[name] for name in order]))

    image = np.full(len(names), NONE)
    for i in range(5):
        image[names[f"f{i}"]], image[names[f"b{i}"]] = names[f"f{i + 1}"], names[f"b{i + 1}"]
    part = np.zeros(len(names), dtype=np.bool_)
    part[names["f1"]] = True
    assert translate(recomputing(1), recomputing(3), image, part) == list(recomputing(2, 3).runs)
    assert translate(recomputing(0), recomputing(2, 3), image, part) == list(recomputing(3).runs)
