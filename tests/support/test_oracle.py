"""The oracle agrees with hand counts, and its fast search with the definition taken literally."""

from __future__ import annotations

import heapq
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.graph import Graph, Operation, Tensor
from tests.support import oracle
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs

ANY, GIVEN = oracle.SPACES


def graph_dict(operations: list[tuple], sizes: dict, results: str, **options: object) -> dict:
    """Build graph data: operations as (name, inputs, outputs, time); sizes as bytes or (bytes, storage)."""
    return Graph(
        [Operation(name, inputs.split(), outputs.split(), time) for name, inputs, outputs, time in operations],
        [Tensor(name, *(size if isinstance(size, tuple) else (size,))) for name, size in sizes.items()],
        results=results.split(),
        **options,
    ).to_dict()


CHAIN = graph_dict(
    [("f1", "", "x1", 1), ("f2", "x1", "x2", 2), ("f3", "x2", "x3", 4), ("b", "x3 x1", "y", 8)],
    {"x1": 1, "x2": 1, "x3": 1, "y": 0},
    "y",
)


def compute(*names: str) -> list[oracle.OracleVerb]:
    return [("compute", name) for name in names]


def test_a_chain_that_fits_runs_everything_once() -> None:
    # 1 + 2 + 4 + 8 = 15; during f3: x1, x2, x3 = 3 bytes.
    assert oracle.optimum(CHAIN, 3) == 15
    assert oracle.best_schedule(CHAIN, 3) == (15, compute("f1", "f2", "f3", "b"))


def test_a_chain_that_does_not_fit_computes_its_cheapest_tensor_again() -> None:
    # 2 bytes: at f3 only x2 and x3 may stand, so x1 (time 1) is made again.
    assert oracle.optimum(CHAIN, 2) == 16


def test_nothing_fits_below_the_least_peak() -> None:
    # f2 needs x1 and x2 at once.
    assert oracle.least_peak(CHAIN) == oracle.least_peak(CHAIN, GIVEN) == 2
    assert oracle.optimum(CHAIN, 1) is None


def test_the_order_of_first_runs_matters() -> None:
    # Two branches a -> p and b -> q, joined by r.
    branches = graph_dict(
        [("a", "", "a", 3), ("b", "", "b", 1), ("p", "a", "p", 1), ("q", "b", "q", 1), ("r", "p q", "r", 1)],
        {"a": 8, "b": 8, "p": 1, "q": 1, "r": 0},
        "r",
    )
    # Branch by branch, each once: at most p, b, q = 10 bytes.
    assert oracle.optimum(branches, 10, ANY) == 7
    # In input order b first runs before p. 17 bytes hold a, b and p during p; with 16, b is
    # dropped before p and made again; with 10, a is dropped before b, too: 7 + 1 + 3.
    assert oracle.optimum(branches, 17, GIVEN) == 7
    assert oracle.optimum(branches, 16, GIVEN) == 8
    assert oracle.optimum(branches, 15, GIVEN) == 11
    assert oracle.optimum(branches, 10, GIVEN) == 11
    # p and q must stand together, one of them beside the 8 bytes that the other is made of.
    assert oracle.least_peak(branches, ANY) == oracle.least_peak(branches, GIVEN) == 10


def test_a_view_costs_nothing_and_holds_its_source() -> None:
    view = graph_dict(
        [("make", "", "x", 1), ("view", "x", "v", 0), ("y", "", "y", 1), ("end", "v y", "z", 1)],
        {"x": 4, "v": (4, "x"), "y": 1, "z": 0},
        "z",
    )
    # x and v are one instance of 4 bytes; v alone holds it, so y stands beside it.
    actions = [*compute("make", "view"), ("free", "x"), *compute("y", "end")]
    assert oracle.peak_of(view, actions) == (3, 5)
    assert oracle.least_peak(view) == 5


def test_a_live_output_made_again_counts_during_the_operation_only() -> None:
    data = graph_dict(
        [("both", "", "a b", 1), ("alone", "", "a", 1), ("end", "a b", "z", 0)], {"a": 2, "b": 3, "z": 4}, "z"
    )
    # During both with a live: old a, its copy, b = 2 + 2 + 3; during end: a, b, z = 9.
    assert oracle.peak_of(data, compute("both", "end")) == (1, 9)
    graph = oracle.read(data)
    state, _ = oracle.step(graph, oracle.start(), ("compute", "alone"))
    state, during = oracle.step(graph, state, ("compute", "both"))
    assert during == 7
    assert oracle.step(graph, state, ("compute", "end"))[1] == 9


def test_keeping_a_live_output_while_its_sibling_is_made_again_can_be_the_best() -> None:
    data = Graph(
        [
            Operation("both", [], ["a", "c"], 1),
            Operation("view", ["a"], ["v"], 1),
            Operation("mid", ["v"], ["m"], 1, workspace_bytes=5),
            Operation("end", ["a", "v", "c", "m"], ["z"], 1, workspace_bytes=3),
        ],
        [Tensor("a", 4), Tensor("c", 3), Tensor("v", 4, "a"), Tensor("m", 1), Tensor("z", 0)],
        results=["z"],
    ).to_dict()
    # With c during mid: 4 + 3 + 1 + 5 = 13.
    assert oracle.optimum(data, 13) == 4
    # Without c (10), then both again beside a and v: 4 + copy 4 + 3 + 1 = 12; end 4 + 3 + 1 + 3.
    assert oracle.optimum(data, 12) == 5
    # Without the copy: a and v go, both and view run again (4 + 3 + 1 = 8); end is 11.
    assert oracle.optimum(data, 11) == 6
    assert oracle.least_peak(data) == 11


def test_a_task_may_be_run_by_its_cheaper_alternative_where_that_fits() -> None:
    alternatives = Graph(
        [Operation("slow", [], ["x"], 5), Operation("fast", [], ["x"], 2, workspace_bytes=10)],
        [Tensor("x", 1)],
        results=["x"],
    ).to_dict()
    assert oracle.optimum(alternatives, 11) == 2
    assert oracle.optimum(alternatives, 10) == 5
    assert oracle.least_peak(alternatives) == 1


def test_the_forward_results_stand_before_the_backward_begins() -> None:
    step = Graph(
        [
            Operation("x", [], ["x"], 1),
            Operation("s", ["x"], ["s"], 1),
            Operation("y", ["s"], ["y"], 1),
            Operation("loss", ["y"], ["loss"], 1),
            Operation("b", ["x"], ["g"], 1, phase="backward"),
        ],
        [Tensor("x", 8), Tensor("s", 1), Tensor("y", 8), Tensor("loss", 0), Tensor("g", 1)],
        results=["loss", "g"],
    ).to_dict()
    # x, s and y together are 17 bytes; with less, x is dropped before y and made again for
    # b. That b ran right after x and s (10 bytes, each once) is what the rule forbids.
    assert oracle.optimum(step, 17) == 5
    assert oracle.optimum(step, 16) == 6
    assert oracle.least_peak(step) == 9
    with pytest.raises(oracle.Refused) as refused:
        oracle.peak_of(step, compute("x", "s", "b", "y", "loss"))
    assert refused.value.index == 2


def test_an_unknown_space_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown space"):
        oracle.optimum(CHAIN, 3, "sideways")


SMALL = graphs(max_operations=4) | joint_graphs(max_layers=1)
LARGER = graphs() | joint_graphs(max_layers=2)


@settings(max_examples=examples(150))
@given(SMALL, st.sampled_from(oracle.SPACES), st.data())
def test_the_search_finds_what_the_literal_definition_allows(graph: Graph, space: str, data: st.DataObject) -> None:
    plain = graph.to_dict()
    least = oracle.least_peak(plain, space)
    for budget in (least - 1, least, least + data.draw(st.integers(1, 8))):
        assert oracle.optimum(plain, budget, space) == literal_optimum(plain, budget, space)


@settings(max_examples=examples(150))
@given(LARGER, st.sampled_from(oracle.SPACES), st.integers(0, 6))
def test_the_schedule_found_is_worth_what_the_oracle_says(graph: Graph, space: str, more: int) -> None:
    plain = graph.to_dict()
    budget = oracle.least_peak(plain, space) + more
    time, actions = oracle.best_schedule(plain, budget, space)
    simulated_time, peak = oracle.peak_of(plain, actions)
    assert time == simulated_time
    assert peak <= budget
    assert space == ANY or first_runs(plain, actions) == sorted(first_runs(plain, actions))


@settings(max_examples=examples(150))
@given(LARGER)
def test_any_order_is_never_worse_than_the_given_one(graph: Graph) -> None:
    plain = graph.to_dict()
    least = oracle.least_peak(plain, GIVEN)
    assert oracle.least_peak(plain, ANY) <= least
    assert oracle.optimum(plain, least, ANY) <= oracle.optimum(plain, least, GIVEN)


@settings(max_examples=examples(150))
@given(LARGER, st.sampled_from(oracle.SPACES))
def test_a_larger_budget_is_never_slower(graph: Graph, space: str) -> None:
    plain = graph.to_dict()
    least = oracle.least_peak(plain, space)
    times = [oracle.optimum(plain, least + more, space) for more in (0, 1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)


def literal_optimum(data: dict, budget: int, space: str) -> float | None:
    """Dijkstra over `oracle.step`: every action at every state, nothing left out."""
    graph = oracle.read(data)
    actions = [("compute", op.name) for op in graph.operations] + [("free", name) for name in graph.storage]
    time_of = {op.name: op.time for op in graph.operations}
    number = itertools.count()
    heap = [(0.0, next(number), oracle.start())] if graph.resident_bytes <= budget else []
    closed = set()
    while heap:
        time, _, state = heapq.heappop(heap)
        if state in closed:
            continue
        closed.add(state)
        try:
            oracle.check_end(graph, state)
        except ValueError:
            pass
        else:
            return time
        for kind, name in actions:
            try:
                after, needed = oracle.step(graph, state, (kind, name))
            except ValueError:
                continue
            new = {graph.task[i] for i in after.ran} - {graph.task[i] for i in state.ran}
            in_order = all(graph.task[i] <= task for i in state.ran for task in new)
            if needed <= budget and (space == ANY or in_order):
                heapq.heappush(heap, (time + (time_of[name] if kind == "compute" else 0), next(number), after))
    return None


def first_runs(data: dict, actions: list[oracle.OracleVerb]) -> list[int]:
    """Return the tasks, by the position of their default, in the order of their first runs."""
    graph = oracle.read(data)
    position = {op.name: i for i, op in enumerate(graph.operations)}
    return list(dict.fromkeys(graph.task[position[name]] for kind, name in actions if kind == "compute"))
