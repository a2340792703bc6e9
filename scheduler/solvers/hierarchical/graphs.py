"""Cut a network into the graphs of its blocks; equal blocks share one graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scheduler.graph import Graph, GraphIndex, Operation, Phase, Tensor
from scheduler.solvers.hierarchical.partition import Block


@dataclass(frozen=True)
class BlockGraph:
    """A block by itself: its inputs from other blocks are resident, and its outputs to them have no bytes.

    Attributes
    ----------
    graph : Graph
        Operations and tensors have numbers for names; equal blocks have equal graphs.
        Results are what other blocks read, with no bytes, and the step's own results.
        A marker, an operation that does nothing, separates forward and backward.
    recomputed_output_graph : Graph or None
        The same graph with an output too large to be kept, which must be recomputed; None
        where no output has bytes.
    operations, tensors : tuple of int
        Position in the whole graph of each of `graph`'s; -1 for the marker.
    exported : frozenset of int
        Forward outputs in `graph` that other blocks read.
    output : frozenset of int
        What only the next block reads, and all tensors that share its storages: what
        `recomputed_output_graph` recomputes.
    output_bytes, gradient_bytes : int
        What the next block's forward reads, and what the previous block's backward reads.
    passing_bytes : int
        What blocks other than the two neighbors read.
    reads_output : bool
        Whether the backward reads what the next block's forward reads.
    """

    graph: Graph
    recomputed_output_graph: Graph | None
    operations: tuple[int, ...]
    tensors: tuple[int, ...]
    exported: frozenset[int]
    output: frozenset[int]
    output_bytes: int
    gradient_bytes: int
    passing_bytes: int
    reads_output: bool

    @property
    def marker(self) -> int:
        """Position of the marker in `graph`."""
        return self.operations.index(-1)


def block_graphs(graph: Graph, blocks: Sequence[Block]) -> tuple[BlockGraph, ...]:
    """Return the graph of each block.

    Equal blocks share one `Graph` object.

    Parameters
    ----------
    graph : Graph
    blocks : sequence of Block
        As `partition` returns them.
    """
    index = graph.index
    home = {i: number for number, block in enumerate(blocks) for i in (*block.forward, *block.backward)}
    readers: dict[int, set[int]] = {}
    for i, number in home.items():
        for tensor in index.inputs[i]:
            readers.setdefault(tensor, set()).add(number)
    known: dict[_GraphKey, Graph] = {}
    return tuple(_block_graph(graph, number, block, readers, known) for number, block in enumerate(blocks))


def _block_graph(
    graph: Graph,
    number: int,
    block: Block,
    readers: dict[int, set[int]],
    known: dict[_GraphKey, Graph],
) -> BlockGraph:
    index = graph.index
    operations = (*block.forward, -1, *block.backward)
    made = {t for i in (*block.forward, *block.backward) for t in index.outputs[i]}
    read = {t for i in (*block.forward, *block.backward) for t in index.inputs[i]}
    exported = {t for t in made if readers.get(t, set()) - {number}}
    forward = {t for i in block.forward for t in index.outputs[i]}
    output, gradient, passing = _exported_storages(index, number, exported, forward, readers)
    foreign = {index.storage_of[t] for t in read - made}
    own = {index.storage_of[t] for t in made} - {index.storage_of[t] for t in exported} - foreign
    size = {s: index.storage_bytes[s] for s in own}
    results = sorted(exported | {t for t in made if index.is_result[t]})
    output = {s for s in output - passing if index.storage_bytes[s]}
    # Where the block reads another block's tensor on such a storage, its recomputation is not modeled.
    recomputed = output - foreign
    large = dict.fromkeys(recomputed, sum(size.values()) + 1)
    tensors = _by_first_appearance(index, operations)
    number_of = {t: n for n, t in enumerate(tensors)}
    return BlockGraph(
        graph=_shared_graph(graph, operations, size, results, known),
        recomputed_output_graph=_shared_graph(graph, operations, size | large, results, known) if recomputed else None,
        operations=operations,
        tensors=tensors,
        exported=frozenset(number_of[t] for t in exported & forward),
        output=frozenset(number_of[t] for t in made if index.storage_of[t] in recomputed),
        output_bytes=_bytes(index.storage_bytes, output),
        gradient_bytes=_bytes(index.storage_bytes, gradient - passing),
        passing_bytes=_bytes(index.storage_bytes, passing),
        reads_output=bool({index.storage_of[t] for i in block.backward for t in index.inputs[i]} & output),
    )


def _exported_storages(
    index: GraphIndex, number: int, exported: set[int], forward: set[int], readers: dict[int, set[int]]
) -> tuple[set[int], set[int], set[int]]:
    """Return the storages that only the next block reads, only the previous block, and other blocks."""
    output: set[int] = set()
    gradient: set[int] = set()
    passing: set[int] = set()
    for t in exported:
        others = readers[t] - {number}
        if t in forward and others == {number + 1}:
            output.add(index.storage_of[t])
        elif t not in forward and others == {number - 1}:
            gradient.add(index.storage_of[t])
        else:
            passing.add(index.storage_of[t])
    return output, gradient, passing


class _OperationKey(NamedTuple):
    """An operation of a block, with numbers for tensors: equal for corresponding operations of equal blocks."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    time: float
    workspace_bytes: int
    phase: Phase
    repeatable: bool
    required: bool


_MARKER = _OperationKey((), (), 0.0, 0, "backward", repeatable=False, required=True)


class _GraphKey(NamedTuple):
    """All that the graph of a block depends on.

    Attributes
    ----------
    operations : tuple of _OperationKey
    tensors : tuple of (int, int)
        Storage and its bytes, per tensor.
    results : tuple of int
    """

    operations: tuple[_OperationKey, ...]
    tensors: tuple[tuple[int, int], ...]
    results: tuple[int, ...]


def _shared_graph(
    graph: Graph,
    operations: Sequence[int],
    size: dict[int, int],
    results: Iterable[int],
    known: dict[_GraphKey, Graph],
) -> Graph:
    """Return the graph of these operations, with numbers for names; an equal one from `known` if there is one."""
    index = graph.index
    number = {t: n for n, t in enumerate(_by_first_appearance(index, operations))}
    storage: dict[int, int] = {}
    for t in number:
        storage.setdefault(index.storage_of[t], len(storage))
    key = _GraphKey(
        operations=tuple(_operation_key(graph, i, number) if i >= 0 else _MARKER for i in operations),
        tensors=tuple((storage[index.storage_of[t]], size.get(index.storage_of[t], 0)) for t in number),
        results=tuple(sorted(number[t] for t in results)),
    )
    if key not in known:
        known[key] = _graph_of(key, graph.time_unit)
    return known[key]


def _operation_key(graph: Graph, i: int, number: dict[int, int]) -> _OperationKey:
    operation = graph.operations[i]
    return _OperationKey(
        inputs=tuple(number[t] for t in graph.index.inputs[i]),
        outputs=tuple(number[t] for t in graph.index.outputs[i]),
        time=operation.time,
        workspace_bytes=operation.workspace_bytes,
        phase=operation.phase,
        repeatable=operation.repeatable,
        required=operation.phase == "forward" or i in graph.index.required,
    )


def _graph_of(key: _GraphKey, time_unit: str) -> Graph:
    made = {t for operation in key.operations for t in operation.outputs}
    return Graph(
        tuple(
            Operation(
                str(n),
                _names(operation.inputs),
                _names(operation.outputs),
                operation.time,
                operation.workspace_bytes,
                operation.phase,
                operation.repeatable,
            )
            for n, operation in enumerate(key.operations)
        ),
        tuple(Tensor(str(t), size_bytes, f"s{storage}") for t, (storage, size_bytes) in enumerate(key.tensors)),
        resident=tuple(str(t) for t in range(len(key.tensors)) if t not in made),
        results=_names(key.results),
        required=tuple(str(n) for n, operation in enumerate(key.operations) if operation.required),
        time_unit=time_unit,
    )


def _names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(str(number) for number in numbers)


def _by_first_appearance(index: GraphIndex, operations: Sequence[int]) -> tuple[int, ...]:
    """Return the tensors of these operations by first appearance."""
    return tuple(dict.fromkeys(t for i in operations if i >= 0 for t in (*index.inputs[i], *index.outputs[i])))


def _bytes(sizes: Sequence[int], storages: Iterable[int]) -> int:
    return sum(sizes[s] for s in storages)
