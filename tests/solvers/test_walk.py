"""Check walks through the input order: what they recompute, and what they keep of it."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.schedule import schedule_from_runs
from scheduler.solvers.walk import Walk
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs


def stacked_states(steps: int) -> sc.Graph:
    """A chain of states, a stack of all of them, and an operation that reads the stack and the first state."""
    names = [f"s{k}" for k in range(steps)]
    tensors = [sc.Tensor("x", 0), *(sc.Tensor(name, 1) for name in names), sc.Tensor("stack", steps), sc.Tensor("y", 1)]
    operations = [sc.Operation(f"f{k}", [names[k - 1] if k else "x"], [name], 1.0) for k, name in enumerate(names)]
    operations += [sc.Operation("stack", names, ["stack"], 1.0), sc.Operation("y", ["s0", "stack"], ["y"], 1.0)]
    return sc.Graph(operations, tensors, resident=["x"], results=["y"])


def test_what_is_rebuilt_alone_leaves_nothing_behind_that_was_not_there_before() -> None:
    graph = stacked_states(4)
    collector, stack = graph.index.operation_ids["stack"], graph.index.tensor_ids["stack"]
    kept = graph.index.tensor_ids["s1"]
    for rebuilt_alone, others in (((), {"s0", "s1", "s2", "s3"}), ((collector,), {"s1"})):
        walk = Walk(graph, rebuilt_alone)
        for i in range(collector + 1):
            walk.run(i)
        walk.keep_only([kept])
        walk.ensure([stack])
        assert {graph.tensors[t].name for t in walk.available} == {"stack", *others}


def test_what_is_needed_beside_what_is_rebuilt_alone_is_there_in_any_order() -> None:
    graph = stacked_states(4)
    collector, last = graph.index.operation_ids["stack"], graph.index.operation_ids["y"]
    walk = Walk(graph, [collector])
    for i in range(last):
        walk.run(i)
    walk.keep_only([])
    walk.run(last)
    names = [graph.operations[i].name for i in walk.runs[last:]]
    assert names == ["f0", "f1", "f2", "f3", "stack", "y"]  # the first state was there before the stack
    walk.keep_only([])
    walk.ensure([graph.index.tensor_ids[name] for name in ("stack", "s0")])
    names = [graph.operations[i].name for i in walk.runs[last + len(names) :]]
    assert names == ["f0", "f1", "f2", "f3", "stack", "f0"]


@settings(max_examples=examples(150))
@given(graph=st.one_of(graphs(), joint_graphs()), random=st.randoms(use_true_random=False))
def test_whatever_is_rebuilt_alone_each_run_finds_its_inputs(graph: sc.Graph, random: Random) -> None:
    """Drop random tensors before each operation, and rebuild random operations alone."""
    defaults = graph.index.defaults
    walk = Walk(graph, {i for i in range(len(graph.operations)) if random.random() < 0.5})
    for i in defaults:
        walk.drop(t for t in sorted(walk.available) if random.random() < 0.4)
        walk.run(i)
    results = [t for t, result in enumerate(graph.index.is_result) if result]
    walk.ensure(results)
    assert all(t in walk.available or graph.index.is_resident[t] for t in results)
    sc.simulate(graph, schedule_from_runs(graph, walk.runs))  # raises an error if an input is missing
