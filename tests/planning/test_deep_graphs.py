"""Deep models at other sizes, from fewer blocks: equal to a trace of the whole model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.graph import Graph, Operation, Tensor
from scheduler.planning.deep_graphs import deep_graph_at


def _chain(blocks: int, size: int, kind: str = "block") -> Graph:
    """Return a step of equal blocks, whose outputs the backward reads; a block makes twice the bytes of the input."""
    tensors = [Tensor("x", size, role="input"), Tensor("w", 7, role="parameter")]
    operations: list[Operation] = []

    def add(name: str, inputs: list[str], bytes_: int, signature: str, phase: str) -> None:
        tensors.append(Tensor(f"{name}.out", bytes_))
        operations.append(
            Operation(name, inputs, [f"{name}.out"], float(bytes_), 3 * size, phase, signature=signature)  # type: ignore[arg-type]
        )

    add("first", ["x", "w"], size, f"first {size}", "forward")
    last = "first.out"
    for number in range(blocks):
        add(f"{number}.a", [last, "w"], 2 * size, f"a {kind} {size}", "forward")
        add(f"{number}.b", [f"{number}.a.out"], size, f"b {size}", "forward")
        last = f"{number}.b.out"
    add("loss", [last], 4, f"loss {size}", "forward")
    last = "loss.out"
    for number in reversed(range(blocks)):
        add(f"{number}.grad", [last, f"{number}.a.out"], size, f"grad {kind} {size}", "backward")
        last = f"{number}.grad.out"
    return Graph(operations, tensors, resident=["x", "w"], results=["loss.out", last])


@pytest.mark.parametrize("blocks", [4, 5, 9])
def test_a_deep_step_grows_as_its_blocks_do(blocks: int) -> None:
    found = deep_graph_at(_chain(blocks, 10), _chain(4, 10), _chain(4, 25))
    assert found is not None
    whole = _chain(blocks, 25)
    assert found.tensors == whole.tensors
    assert [(o.name, o.time, o.workspace_bytes) for o in found.operations] == [
        (o.name, o.time, o.workspace_bytes) for o in whole.operations
    ]


def test_blocks_that_differ_say_nothing() -> None:
    assert deep_graph_at(_chain(9, 10, "other"), _chain(4, 10), _chain(4, 25)) is None


def test_sizes_that_differ_say_nothing() -> None:
    deep = _chain(9, 10)
    larger = tuple(replace(t, size_bytes=99) if t.name == "5.a.out" else t for t in deep.tensors)
    assert deep_graph_at(replace(deep, tensors=larger), _chain(4, 10), _chain(4, 25)) is None


def test_another_structure_at_the_other_size_says_nothing() -> None:
    assert deep_graph_at(_chain(9, 10), _chain(4, 10), _chain(5, 25)) is None
