"""Check the greedy search, and its kernels against the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.schedule import schedule_from_runs
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.graph_arrays import graph_arrays, profile_runs
from scheduler.solvers.greedy import GreedySearch, propose
from scheduler.solvers.walk import Walk
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import conv_net


def check_profile(graph: sc.Graph, runs: Sequence[int]) -> sc.Simulation:
    """Check memory during runs against the simulator, and return the simulation."""
    memory = profile_runs(graph_arrays(graph), np.array(runs, dtype=np.int64)).memory
    schedule = schedule_from_runs(graph, [int(i) for i in runs])
    simulation = sc.simulate(graph, schedule)
    during = [m for m, action in zip(simulation.memory, schedule, strict=True) if isinstance(action, sc.Compute)]
    assert np.array_equal(memory + graph.resident_bytes, during)
    return simulation


@settings(max_examples=examples(150))
@given(data=st.data())
def test_the_profile_of_greedy_runs_is_that_of_the_simulator(data: st.DataObject) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    budget = data.draw(st.integers(0, 40))
    search = GreedySearch(graph, budget)
    search.fit(Deadline(5))
    assert search.peak_bytes == check_profile(graph, search.best.runs).peak_bytes


@settings(max_examples=examples(150))
@given(graph=st.one_of(graphs(), joint_graphs()), random=st.randoms(use_true_random=False))
def test_the_profile_of_random_runs_is_that_of_the_simulator(graph: sc.Graph, random: Random) -> None:
    """Drop random tensors before each operation, and recompute random ones that nothing reads next."""
    walk = Walk(graph)
    for i in graph.index.defaults:
        walk.drop(t for t in sorted(walk.available) if random.random() < 0.4)
        recomputable = [t for run in walk.runs for t in graph.index.outputs[run] if walk.can_compute(t)]
        walk.ensure(random.sample(recomputable, min(len(recomputable), random.randint(0, 2))))
        walk.run(i)
    walk.ensure(t for t, result in enumerate(graph.index.is_result) if result)
    check_profile(graph, walk.runs)


@pytest.mark.parametrize("share", [90, 80, 70])
def test_on_a_convolutional_net_it_comes_within_two_percent_of_the_optimum(share: int) -> None:
    graph = conv_net(10)
    best = sc.solve(graph, f"{share}%", solver="ilp")
    quick = propose(Problem(graph, best.budget_bytes), deadline=Deadline(60), seed=0).schedule
    assert quick is not None
    simulation = sc.simulate(graph, quick)
    assert simulation.peak_bytes <= best.budget_bytes
    assert best.status is sc.Status.OPTIMAL
    assert best.time <= simulation.time <= 1.02 * best.time


def test_unnecessary_evictions_are_undone() -> None:
    graph = conv_net(6)
    budget = sc.solve(graph, "70%").budget_bytes
    search = GreedySearch(graph, budget)
    search.fit(Deadline(10))
    before = search.best.time
    search.restore(Deadline(10))
    assert search.fits
    assert search.best.time <= before


def test_a_backward_alternative_whose_forward_has_not_run_recomputes_nothing() -> None:
    # "cheap" needs t1, but "extra" may not run for the first time once "dear" has begun the backward phase.
    operations = [
        sc.Operation("f0", [], ["t0"], 0.0),
        sc.Operation("extra", [], ["t1"], 0.0),
        sc.Operation("dear", [], ["t2"], 1.0, phase="backward"),
        sc.Operation("cheap", ["t1"], ["t2"], 0.0, phase="backward"),
        sc.Operation("once", [], [], 0.0, workspace_bytes=1, phase="backward", repeatable=False),
    ]
    tensors = [sc.Tensor("t0", 0), sc.Tensor("t1", 0), sc.Tensor("t2", 1)]
    graph = sc.Graph(operations, tensors, results=["t0", "t2"])
    schedule = propose(Problem(graph, 1), deadline=Deadline(5), seed=0).schedule
    assert schedule is not None
    simulation = sc.simulate(graph, schedule)
    assert (simulation.time, simulation.peak_bytes) == (2.0, 1)
