"""Check what integer programs leave out of a graph: operations absorbed by their readers, and twins."""

from __future__ import annotations

import scheduler as sc
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction


def step(sizes: dict[str, int], rows: list[tuple[str, str, str]], results: str = "z") -> sc.Graph:
    """Return a step of operations, given as name, inputs and outputs; each name of a tensor is a letter."""
    operations = [sc.Operation(name, list(inputs), list(outputs), 1.0) for name, inputs, outputs in rows]
    return sc.Graph(operations, [sc.Tensor(name, size) for name, size in sizes.items()], results=list(results))


def names_absorbed(graph: sc.Graph) -> dict[str, str]:
    operations = graph.operations
    found = Reduction(graph, absorbs=True).reader
    return {operations[i].name: operations[reader].name for i, reader in found.items()}


CHAIN = [("first", "", "a"), ("middle", "a", "b"), ("last", "b", "c"), ("wide", "", "y"), ("end", "cy", "z")]


def test_an_operation_is_absorbed_by_its_only_reader_if_that_takes_no_more_memory() -> None:
    assert names_absorbed(step({"a": 4, "b": 4, "c": 2, "y": 9, "z": 1}, CHAIN)) == {
        "first": "middle",
        "middle": "last",
    }
    # What "middle" returns is larger than what it reads.
    assert names_absorbed(step({"a": 4, "b": 5, "c": 2, "y": 9, "z": 1}, CHAIN)) == {"middle": "last"}


def test_an_operation_is_not_absorbed_if_its_reader_needs_more_than_it_did() -> None:
    # To keep "b" saves memory if "x" may be freed: "last" reads both.
    rows = [("other", "", "x"), ("first", "", "b"), ("last", "bx", "c"), ("end", "c", "z")]
    assert "first" not in names_absorbed(step({"x": 4, "b": 4, "c": 4, "z": 1}, rows))


def test_an_operation_with_two_readers_or_a_result_is_not_absorbed() -> None:
    sizes = {"a": 4, "b": 4, "c": 2, "y": 9, "z": 1}
    assert names_absorbed(step(sizes, CHAIN, "zb")) == {"first": "middle"}
    twice = [*CHAIN[:3], ("wide", "a", "y"), CHAIN[4]]
    assert "first" not in names_absorbed(step(sizes, twice))


def test_outputs_that_are_always_read_together_are_twins() -> None:
    rows = [("first", "", "abc"), ("middle", "ab", "y"), ("end", "abcy", "z")]
    graph = step(dict.fromkeys("abcyz", 1), rows)
    reduction, number = Reduction(graph, absorbs=True), graph.index.tensor_ids
    assert reduction.twins == {number["a"]: [number["b"]]}
    assert reduction.with_twins([number["a"]]) == {number["a"], number["b"]}
    assert number["b"] not in reduction.inputs[1]


def test_a_reader_counts_as_run_with_what_it_absorbs_only_where_the_order_is_free() -> None:
    rows = [("first", "", "a"), ("cut", "", "y"), ("middle", "a", "b"), ("end", "yb", "z")]
    operations = [sc.Operation(name, list(inputs), list(outputs), 1.0) for name, inputs, outputs in rows]
    graph = sc.Graph(operations, [sc.Tensor(name, 4) for name in "aybz"], results=["z"])
    reduction = Reduction(graph, absorbs=True)
    free, given = (reduction.merged(Precedence(graph, reorder=reorder), 1) for reorder in (True, False))
    assert (free.before, free.lead) == (0, {0: 2})
    # In the input order, "a" is live at the cut, and "b" is not.
    assert (given.before, given.lead) == (0b1, {})
