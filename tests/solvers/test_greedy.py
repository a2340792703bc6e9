"""The greedy search, and the kernels against the judge."""

from __future__ import annotations

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
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import conv_net


@settings(max_examples=examples(150))
@given(data=st.data())
def test_the_profile_of_runs_is_the_judges(data: st.DataObject) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    a = graph_arrays(graph)
    budget = data.draw(st.integers(0, 40))
    search = GreedySearch(graph, budget)
    search.fit(Deadline(5))
    runs = search.best.runs
    memory, _ = profile_runs(
        runs, len(runs), a.input_start, a.inputs, a.output_start, a.outputs, a.storage, a.storage_bytes,
        a.workspace, a.is_result,
    )  # fmt: skip
    schedule = schedule_from_runs(graph, [int(i) for i in runs])
    simulated = sc.simulate(graph, schedule)
    during = [m for m, action in zip(simulated.memory, schedule, strict=True) if isinstance(action, sc.Compute)]
    assert np.array_equal(memory + graph.resident_bytes, during)
    assert search.peak_bytes == simulated.peak_bytes


@pytest.mark.parametrize("share", [90, 80, 70])
def test_on_a_convolutional_net_it_comes_within_two_per_cent_of_the_optimum(share: int) -> None:
    graph = conv_net(10)
    best = sc.solve(graph, f"{share}%", solver="ilp")
    quick = propose(Problem(graph, best.budget_bytes), deadline=Deadline(60), seed=0).schedule
    assert quick is not None
    simulated = sc.simulate(graph, quick)
    assert simulated.peak_bytes <= best.budget_bytes
    assert best.status is sc.Status.OPTIMAL
    assert best.time <= simulated.time <= 1.02 * best.time


def test_evictions_that_were_not_needed_are_taken_back() -> None:
    graph = conv_net(6)
    budget = sc.solve(graph, "70%").budget_bytes
    search = GreedySearch(graph, budget)
    search.fit(Deadline(10))
    before = search.best.time
    search.restore(Deadline(10))
    assert search.fits
    assert search.best.time <= before
