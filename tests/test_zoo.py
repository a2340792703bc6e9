"""Generated graphs: of the size asked for, the same for the same seed, and like those they are named after."""

from __future__ import annotations

import pytest

import scheduler as sc
from scheduler.errors import InvalidOptionError


@pytest.mark.parametrize("operations", [3, 4, 10, 100, 250])
def test_random_layered_has_one_source_one_sink_and_all_operations(operations: int) -> None:
    graph = sc.zoo.random_layered(operations, seed=1)
    assert len(graph.operations) == operations
    assert [operation.name for operation in graph.operations if not operation.inputs] == ["op0"]
    read = {name for operation in graph.operations for name in operation.inputs}
    assert {tensor.name for tensor in graph.tensors} - read == {f"t{operations - 1}"}
    assert len(graph.required) == operations


def test_random_layered_is_like_the_published_graph_of_100() -> None:
    # Read off random_layered_n100 of MOCCASIN: 236 edges, mean 2041 bytes, mean time 478.
    graphs = [sc.zoo.random_layered(100, seed=seed) for seed in range(20)]
    edges = sum(len(operation.inputs) for graph in graphs for operation in graph.operations) / 20
    size = sum(tensor.size_bytes for graph in graphs for tensor in graph.tensors) / 2000
    time = sum(operation.time for graph in graphs for operation in graph.operations) / 2000
    assert edges == pytest.approx(236, rel=0.2)
    assert size == pytest.approx(2041, rel=0.2)
    assert time == pytest.approx(478, rel=0.1)


def test_the_seed_decides() -> None:
    assert sc.zoo.random_layered(50, seed=3) == sc.zoo.random_layered(50, seed=3)
    assert sc.zoo.random_layered(50, seed=3) != sc.zoo.random_layered(50, seed=4)


def test_too_few_operations_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="at least 3"):
        sc.zoo.random_layered(2)
