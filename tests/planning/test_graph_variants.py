"""Graphs of a step as it would be with other memory."""

from __future__ import annotations

from scheduler.graph import Graph, Operation, Tensor
from scheduler.planning.graph_variants import in_proportion


def test_a_smaller_step_keeps_the_sizes_of_some_roles() -> None:
    tensors = [Tensor("w", 10, role="parameter"), Tensor("x", 10, role="input"), Tensor("y", 7)]
    graph = Graph([Operation("f", ["w", "x"], ["y"], 6.0, workspace_bytes=5)], tensors, ["w", "x"], ["y"])
    smaller = in_proportion(graph, 1, 2, kept={"parameter"})
    assert [tensor.size_bytes for tensor in smaller.tensors] == [10, 5, 4]
    assert (smaller.operations[0].time, smaller.operations[0].workspace_bytes) == (3.0, 3)
