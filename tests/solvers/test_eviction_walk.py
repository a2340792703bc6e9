"""Check walks that evict when memory is short: they are true, stay within their bytes, and recompute little."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.schedule import follows_input_order
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.eviction_walk import Eviction, EvictionWalks
from tests.support import oracle
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import uniform_chain

EVERY = pytest.mark.parametrize("eviction", Eviction)
EVERY_BUT_ONE = pytest.mark.parametrize("eviction", [rule for rule in Eviction if rule != Eviction.WORKING_SET])
"""Those that keep what is used next. The other one keeps what takes most memory to recompute, at the cost of time."""


@EVERY
def test_a_walk_succeeds_within_the_least_peak_of_a_chain_and_not_within_less(eviction: Eviction) -> None:
    graph = uniform_chain(5, size=1)
    least = oracle.least_peak(graph.to_dict())
    walks = EvictionWalks(graph)
    found = walks.within(least, eviction)
    assert found is not None
    assert sc.simulate(graph, found).peak_bytes == least
    assert walks.within(least - 1, eviction) is None


@EVERY_BUT_ONE
def test_a_walk_within_the_peak_of_saving_everything_recomputes_nothing(eviction: Eviction) -> None:
    problem = Problem(uniform_chain(6, size=1), 0)
    found = EvictionWalks(problem.graph).within(problem.baseline.peak_bytes, eviction)
    assert found is not None
    assert sc.simulate(problem.graph, found).time == problem.baseline.time


@EVERY_BUT_ONE
def test_a_walk_within_few_bytes_keeps_what_they_hold(eviction: Eviction) -> None:
    # Saving nothing runs the forward of 100 layers about 50 times; 24 sizes hold 20 saved outputs.
    graph = uniform_chain(100, size=1)
    found = EvictionWalks(graph).within(24, eviction)
    assert found is not None
    simulation = sc.simulate(graph, found)
    assert simulation.peak_bytes <= 24
    assert sum(simulation.recomputed.values()) < 400


@pytest.mark.parametrize("eviction", [Eviction.CONNECTED_RUNS, Eviction.CONNECTED_TIME])
def test_counting_connected_tensors_recomputes_a_chain_in_linear_time(eviction: Eviction) -> None:
    """Each of n layers about once within 2 sqrt(n) sizes (Kirisame et al. 2021, theorem 3.1: O(n)), not sqrt(n) times.

    Dynamic programming, which is exact here, recomputes .9 n.
    """
    layers = 400
    graph = uniform_chain(layers, size=1)
    found = EvictionWalks(graph).within(2 * math.isqrt(layers) + 4, eviction)
    assert found is not None
    assert sum(sc.simulate(graph, found).recomputed.values()) < 1.2 * layers


@EVERY
def test_a_walk_that_keeps_what_is_smaller_lets_go_of_what_cannot_be_recomputed(eviction: Eviction) -> None:
    """A gradient of 10 bytes, its sum of 1, another tensor of 10, and 1 for the end: 22, or 12 without the gradient."""
    sizes = {"x": 1, "gradient": 10, "sum": 1, "other": 10, "end": 1}
    operations = [
        sc.Operation("add", ["x"], ["gradient"], 1.0, repeatable=False, phase="backward"),
        sc.Operation("reduce", ["gradient"], ["sum"], 1.0, phase="backward"),
        sc.Operation("make", ["x"], ["other"], 1.0, phase="backward"),
        sc.Operation("finish", ["other", "sum"], ["end"], 1.0, phase="backward"),
    ]
    graph = sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], ["x"], ["end"])
    least = oracle.least_peak(graph.to_dict())
    assert least == 1 + 12
    assert EvictionWalks(graph).within(least, eviction) is None
    found = EvictionWalks(graph, keeps_smaller=True).within(least, eviction)
    assert found is not None
    simulation = sc.simulate(graph, found)
    assert (simulation.time, simulation.peak_bytes) == (4.0, least)


@settings(max_examples=60, deadline=None)
@given(st.one_of(graphs(), joint_graphs()), st.sampled_from(Eviction), st.floats(0.3, 1.0), st.booleans())
def test_every_walk_is_a_true_schedule_in_the_input_order(
    graph: sc.Graph, eviction: Eviction, share: float, keeps_smaller: bool
) -> None:
    problem = Problem(graph, 0)
    walks = EvictionWalks(graph, keeps_smaller=keeps_smaller)
    found = walks.within(int(share * problem.baseline.peak_bytes), eviction)
    if found is not None:
        sc.simulate(graph, found)  # raises an error if it is not
        assert follows_input_order(graph, found)


@settings(max_examples=60, deadline=None)
@given(st.one_of(graphs(), joint_graphs()), st.floats(0.3, 1.0))
def test_a_fitting_walk_fits_and_is_found_wherever_the_first_walk_fits(graph: sc.Graph, share: float) -> None:
    budget = int(share * Problem(graph, 0).baseline.peak_bytes)
    walks = EvictionWalks(graph)
    first, found = walks.within(budget, Eviction.RUNS), walks.fitting(budget, Deadline(math.inf))
    if found is not None:
        assert sc.simulate(graph, found).peak_bytes <= budget
    elif first is not None:
        assert sc.simulate(graph, first).peak_bytes > budget


def test_where_any_schedule_is_enough_no_other_walk_is_made_after_the_first_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = uniform_chain(20)
    budget, within, rules = Problem(graph, 0).floor.bytes + 4, EvictionWalks.within, list[Eviction]()

    def counted(walks: EvictionWalks, budget_bytes: int, eviction: Eviction) -> sc.Schedule | None:
        rules.append(eviction)
        return within(walks, budget_bytes, eviction)

    monkeypatch.setattr(EvictionWalks, "within", counted)
    found = EvictionWalks(graph).fitting(budget, Deadline(math.inf), any_fits=True)
    assert found is not None
    assert sc.simulate(graph, found).peak_bytes <= budget
    assert rules == [next(iter(Eviction))]
    assert EvictionWalks(graph).fitting(budget, Deadline(math.inf)) is not None
    assert set(rules) == set(Eviction)


def test_no_walk_begins_once_none_is_needed() -> None:
    graph = uniform_chain(4)
    walks, budget = EvictionWalks(graph), Problem(graph, 0).baseline.peak_bytes
    deadline = Deadline(math.inf)
    assert walks.fitting(budget, deadline) is not None
    deadline.stop()
    assert walks.fitting(budget, deadline) is None


def test_what_is_dear_to_recompute_is_kept_where_times_count() -> None:
    """Two tensors of one size are used again at the end; only one of them is in memory meanwhile."""
    operations = [
        sc.Operation("dear", [], ["dear"], 100.0),
        sc.Operation("cheap", [], ["cheap"], 1.0),
        sc.Operation("large", [], ["large"], 1.0),
        sc.Operation("small", ["large"], ["small"], 1.0),
        sc.Operation("y", ["cheap", "dear", "small"], ["y"], 1.0),
    ]
    sizes = {"dear": 4, "cheap": 4, "large": 5, "small": 1, "y": 1}
    graph = sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=["y"])
    found = EvictionWalks(graph).within(10, Eviction.TIME)
    assert found is not None
    assert sc.simulate(graph, found).recomputed == {"dear": 0, "cheap": 1, "large": 0, "small": 0, "y": 0}
    assert EvictionWalks(graph).fitting(10, Deadline(math.inf)) == found


@pytest.mark.parametrize("eviction", [Eviction.ALLOCATED, Eviction.WORKING_SET])
def test_what_takes_far_more_memory_to_recompute_than_to_keep_stays(eviction: Eviction) -> None:
    """Before "wide" runs, 1 of 13 bytes must go: "mask", which is used last but takes 12 to recompute, or "cheap"."""
    operations = [
        sc.Operation("x", [], ["x"], 1.0),
        sc.Operation("dropout", ["x"], ["mask"], 1.0, workspace_bytes=10),
        sc.Operation("h", ["x"], ["h"], 1.0),
        sc.Operation("cheap", [], ["cheap"], 1.0),
        sc.Operation("wide", ["h"], ["wide"], 1.0),
        sc.Operation("z", ["wide", "cheap"], ["z"], 1.0),
        sc.Operation("y", ["z", "mask"], ["y"], 1.0),
    ]
    sizes = {"x": 1, "mask": 1, "h": 3, "cheap": 1, "wide": 8, "z": 2, "y": 1}
    graph = sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=["y"])
    assert EvictionWalks(graph).within(12, Eviction.NEXT_USE) is None
    found = EvictionWalks(graph).within(12, eviction)
    assert found is not None
    assert sc.simulate(graph, found).peak_bytes == 12
    assert sc.simulate(graph, found).recomputed == {o.name: int(o.name == "cheap") for o in operations}


@EVERY
def test_what_cannot_run_again_is_kept_while_a_step_is_attempted_twice(eviction: Eviction) -> None:
    """For the last operation, "b" and "a" run again; where "a" does not fit next to "x", that must run again too."""
    operations = [
        sc.Operation("random", [], ["random"], 1.0, repeatable=False),
        sc.Operation("b", ["random"], ["b"], 1.0),
        sc.Operation("a", ["b"], ["a"], 1.0),
        sc.Operation("x", ["random"], ["x"], 1.0),
        sc.Operation("large", [], ["large"], 1.0),
        sc.Operation("small", ["large"], ["small"], 1.0),
        sc.Operation("y", ["a", "x", "small"], ["y"], 1.0),
    ]
    sizes = {"random": 1, "b": 3, "a": 2, "x": 2, "large": 3, "small": 1, "y": 1}
    graph = sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=["y"])
    found = [EvictionWalks(graph).within(budget, eviction) for budget in range(6, 10)]
    assert found[-1] is not None
    for schedule in filter(None, found):
        sc.simulate(graph, schedule)  # raises an error if "random" runs again


def test_a_storage_is_evicted_with_all_its_tensors_where_an_earlier_one_must_run_again_first() -> None:
    """For the last operation "b" and "a" run again, next to which only one of the storages of "x" and "z" fits."""
    operations = [
        sc.Operation("b", [], ["b"], 1.0),
        sc.Operation("a", ["b"], ["a"], 1.0),
        sc.Operation("x", [], ["x", "of_x"], 100.0),
        sc.Operation("z", [], ["z"], 100.0),
        sc.Operation("large", [], ["large"], 1.0),
        sc.Operation("small", ["large"], ["small"], 1.0),
        sc.Operation("y", ["a", "x", "of_x", "z", "small"], ["y"], 1.0),
    ]
    sizes = {"b": 2, "a": 3, "x": 2, "z": 2, "of_x": 2, "large": 4, "small": 1, "y": 1}
    tensors = [sc.Tensor(name, size, storage="x" if name == "of_x" else None) for name, size in sizes.items()]
    graph = sc.Graph(operations, tensors, results=["y"])
    found = EvictionWalks(graph).within(9, Eviction.TIME)
    assert found is not None
    recomputed = {"b": 1, "a": 1, "x": 1, "z": 0, "large": 0, "small": 0, "y": 0}
    assert sc.simulate(graph, found).recomputed == recomputed
