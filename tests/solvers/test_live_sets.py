"""Check the floor of sets of tensors that are live at once against the oracle, and what it proves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import scheduler as sc
from scheduler.problem import Floor, floor
from scheduler.solvers import live_sets
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.live_sets import floor_of_live_sets
from tests.support.contract import SMALL_CHAINS, SMALL_STEPS
from tests.support.examples import examples
from tests.support.oracle import least_peak
from tests.support.training_graphs import conv_net

EVERYTHING = 2**40


def floor_bytes(graph: sc.Graph, enough_bytes: int = EVERYTHING) -> int:
    found = floor_of_live_sets(graph, Deadline(20), enough_bytes=enough_bytes)
    assert found is not None
    return found.bytes


@settings(max_examples=examples(100))
@given(graph=SMALL_STEPS)
def test_no_set_needs_more_than_the_least_peak(graph: sc.Graph) -> None:
    assert floor_bytes(graph) <= least_peak(graph.to_dict(), "any")


@settings(max_examples=examples(30))
@given(chain=SMALL_CHAINS)
def test_of_a_small_chain_the_floor_is_the_least_peak(chain: sc.Chain) -> None:
    assert floor_bytes(chain.graph) == least_peak(chain.graph.to_dict(), "any")


def test_what_runs_only_once_is_not_recomputed_for_less_memory() -> None:
    # If the draw could run again, "y" and then "z" would take 5 + 5; but the mask stays for "z": 4 + 5 + 5.
    operations = [
        sc.Operation("draw", [], ["mask"], 1.0, repeatable=False),
        sc.Operation("first", ["mask"], ["y"], 1.0),
        sc.Operation("second", ["y"], ["small"], 1.0),
        sc.Operation("last", ["mask", "small"], ["z"], 1.0),
    ]
    sizes = {"mask": 4, "y": 9, "small": 1, "z": 9}
    tensors = [sc.Tensor(name, size) for name, size in sizes.items()]
    graph = sc.Graph(operations, tensors, results=["z"])
    assert floor_bytes(graph) == least_peak(graph.to_dict(), "any") == 14


def test_where_all_results_need_most_the_last_operation_that_makes_one_is_named() -> None:
    operations = [sc.Operation(name, [], [f"of {name}"], 1.0) for name in ("first", "last")]
    tensors = [sc.Tensor("of first", 4), sc.Tensor("of last", 5)]
    graph = sc.Graph(operations, tensors, results=["of first", "of last"])
    found = floor_of_live_sets(graph, Deadline(20), enough_bytes=EVERYTHING)
    assert found == Floor(9, "last", alone=False) == floor(graph)


@pytest.mark.parametrize("blocks", [2, 4, 8, 16])
def test_the_smallest_peak_of_a_residual_net_is_proven(blocks: int) -> None:
    graph = conv_net(blocks)
    found = sc.minimum_budget(graph, time_limit=10)
    assert found.peak_bytes == found.floor_bytes
    assert sc.solve(graph, found.peak_bytes - 1, time_limit=20).status is sc.Status.INFEASIBLE


def test_the_search_ends_when_a_floor_is_enough_and_after_so_many_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = conv_net(4)
    exact = floor_bytes(graph)
    few = floor_bytes(graph, 300)
    assert 300 <= few < exact
    monkeypatch.setattr(live_sets, "MOST_SETS", 3)
    assert graph.resident_bytes < floor_bytes(graph) < exact
    monkeypatch.setattr(live_sets, "MOST_OPERATIONS", 3)
    assert floor_of_live_sets(graph, Deadline(20), enough_bytes=EVERYTHING) is None
