"""Check exact neighborhoods: against the exhaustive oracle, and how they end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.schedule import follows_input_order, runs_of, schedule_from_runs
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.greedy import GreedySearch
from scheduler.solvers.neighborhoods.search import FIRST_SIZE, LEAST_OPERATIONS, NeighborhoodWalker, propose
from tests.support.examples import examples
from tests.support.fake_clock import SECONDS_PER_LOOK, FakeClock
from tests.support.oracle import optimum
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import conv_net, uniform_chain

NEVER = Deadline(1e6)


def greedy_runs(graph: sc.Graph, budget: int) -> Sequence[int]:
    """The runs of the greedy search's schedule."""
    search = GreedySearch(graph, budget)
    search.fit(NEVER)
    return runs_of(graph, search.schedule())


def improved(graph: sc.Graph, budget: int, runs: Sequence[int], programs: int, seed: int = 0) -> sc.Schedule | None:
    """The schedule after so many programs."""
    return NeighborhoodWalker(Contraction(graph, budget), seed).improve(runs, programs, NEVER)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_an_answer_fits_is_faster_than_the_start_and_not_faster_than_the_optimum(data: st.DataObject) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    runs = greedy_runs(graph, data.draw(st.integers(0, 40)))
    start = schedule_from_runs(graph, runs)
    before = sc.simulate(graph, start)
    budget = before.peak_bytes + data.draw(st.integers(0, 8))
    found = improved(graph, budget, runs, 2)
    if found is not None:
        after = sc.simulate(graph, found)
        best = optimum(graph.to_dict(), budget, "input order")
        assert follows_input_order(graph, found)
        assert after.peak_bytes <= budget
        assert best is not None
        assert best <= after.time < before.time


@pytest.mark.parametrize("budget", [20, 24, 28])
def test_on_a_chain_of_six_it_finds_what_the_exhaustive_search_finds(budget: int) -> None:
    graph = uniform_chain(6)
    runs = greedy_runs(graph, 20)
    assert sc.simulate(graph, schedule_from_runs(graph, runs)).peak_bytes <= budget
    found = improved(graph, budget, runs, 8) or schedule_from_runs(graph, runs)
    assert sc.simulate(graph, found).time == optimum(graph.to_dict(), budget, "input order")


def test_the_answer_depends_on_the_seed_only() -> None:
    graph = conv_net(2)
    runs = greedy_runs(graph, Problem(graph, 0).baseline.peak_bytes // 2)
    budget = int(sc.simulate(graph, schedule_from_runs(graph, runs)).peak_bytes * 1.2)
    found = improved(graph, budget, runs, 3, seed=1)
    assert found is not None
    assert found == improved(graph, budget, runs, 3, seed=1)


def test_it_solves_nothing_once_time_is_up() -> None:
    graph = uniform_chain(6)
    walker = NeighborhoodWalker(Contraction(graph, 28), 0)
    with FakeClock():
        assert walker.improve(greedy_runs(graph, 20), 8, Deadline(0.0)) is None
    assert set(walker.sizes) == {FIRST_SIZE}


def test_the_first_start_that_fits_is_improved() -> None:
    graph = conv_net(16)
    runs = greedy_runs(graph, Problem(graph, 0).baseline.peak_bytes // 2)
    start = schedule_from_runs(graph, runs)
    before = sc.simulate(graph, start)
    problem = Problem(graph, int(1.1 * before.peak_bytes), starts=(Problem(graph, 0).save_everything, start))
    assert len(graph.operations) >= LEAST_OPERATIONS
    with FakeClock(seconds_per_look=SECONDS_PER_LOOK):
        found = propose(problem, deadline=Deadline(5.0), seed=0).schedule
    assert found is not None
    after = sc.simulate(graph, found)
    assert after.peak_bytes <= problem.budget_bytes
    assert after.time < before.time


def test_without_a_start_that_fits_or_on_a_small_graph_there_is_no_answer() -> None:
    for graph in (conv_net(16), uniform_chain(6)):
        problem = Problem(graph, 0)
        is_small = len(graph.operations) < LEAST_OPERATIONS
        budget = problem.baseline.peak_bytes if is_small else problem.floor.bytes
        problem = Problem(graph, budget, starts=(problem.save_everything,))
        with FakeClock(seconds_per_look=1e-4):
            assert propose(problem, deadline=Deadline(5.0), seed=0).schedule is None
