"""Check retention annealing: what it decodes, and what it finds at tight budgets."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.problem import Problem
from scheduler.schedule import follows_input_order, runs_of
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.anneal.retention import RetentionWalker
from scheduler.solvers.deadline import Deadline
from tests.support.examples import examples
from tests.support.oracle import optimum
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import uniform_chain

NEVER = Deadline(1e6)


def walked(graph: sc.Graph, budget: int, moves: int, *, free: bool = False) -> RetentionWalker:
    """A walker that has made hot moves from the save-everything schedule."""
    walker = RetentionWalker(Contraction(graph, budget), 0)
    walker.load(runs_of(graph, Problem(graph, budget).save_everything))
    walker.cool(5.0, moves, NEVER, free=free)
    return walker


@settings(max_examples=examples(150))
@given(data=st.data(), free=st.booleans())
def test_what_it_finds_fits_and_takes_the_time_that_it_counts(data: st.DataObject, free: bool) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    budget = data.draw(st.integers(0, 40))
    free = free and all(len(task) == 1 for task in graph.index.tasks)
    walker = walked(graph, budget, data.draw(st.integers(1, 300)), free=free)
    if math.isfinite(walker.best_time):
        simulation = sc.simulate(graph, walker.best())
        assert free or follows_input_order(graph, walker.best())
        assert simulation.peak_bytes <= budget
        assert simulation.time == pytest.approx(walker.best_time)


@settings(max_examples=examples(50))
@given(graph=st.one_of(graphs(), joint_graphs()), budget=st.integers(0, 40), moves=st.integers(1, 300))
def test_its_last_decisions_make_a_schedule_that_is_no_faster_than_its_best_if_it_fits(
    graph: sc.Graph, budget: int, moves: int
) -> None:
    walker = walked(graph, budget, moves)
    last = walker.last()
    assert follows_input_order(graph, last)
    simulation = sc.simulate(graph, last)
    if simulation.peak_bytes <= budget:
        assert simulation.time >= walker.best_time * (1 - 1e-9)


@pytest.mark.parametrize("budget", [20, 24, 28])
def test_on_a_chain_of_six_it_finds_what_the_exhaustive_search_finds(budget: int) -> None:
    graph = uniform_chain(6)
    found = walked(graph, budget, 5_000).best()
    assert sc.simulate(graph, found).time == optimum(graph.to_dict(), budget, "input order")


def test_it_counts_the_time_of_a_view_that_is_a_result_and_whose_base_is_recomputed() -> None:
    graph = sc.Graph(
        [
            sc.Operation("make", [], ["x"], 1.0),
            sc.Operation("view", ["x"], ["y"], 1.0),
            sc.Operation("use", [], ["z"], 1.0, workspace_bytes=8),
            sc.Operation("last", ["x", "z"], ["w"], 1.0),
        ],
        [sc.Tensor("x", 8, storage="s"), sc.Tensor("y", 8, storage="s"), sc.Tensor("z", 1), sc.Tensor("w", 1)],
        results=["y", "w"],
    )
    walker = walked(graph, 10, 200)
    # `make` and `view` run twice, because 8 bytes of workspace leave no room for their storage.
    assert walker.best_time == sc.simulate(graph, walker.best()).time == 6.0


def test_the_schedule_that_it_starts_from_is_its_best_until_a_move_finds_a_faster_one() -> None:
    graph = uniform_chain(6)
    problem = Problem(graph, 1000)
    assert walked(graph, 1000, 1).best_time == problem.baseline.time
