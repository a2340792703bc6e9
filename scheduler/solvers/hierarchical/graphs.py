"""A block as a graph of its own, equal for equal blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.graph import Graph, GraphIndex, Operation, Phase, Tensor
from scheduler.solvers.hierarchical.partition import Block


@dataclass(frozen=True)
class BlockGraph:
    """A block by itself: what comes from outside is resident and costs nothing, nor does what goes out.

    Attributes
    ----------
    graph : Graph
        Operations and tensors have numbers for names; equal blocks have equal graphs.
        Results are what other blocks read, with no bytes, and the step's own results.
        Between forward and backward stands a marker, an operation that does nothing.
    again : Graph or None
        The same with an output so large that it cannot be kept, only made again; None
        where no output has bytes.
    operations, tensors : tuple of int
        Position in the whole graph of each of `graph`'s; -1 for the marker.
    exported : frozenset of int
        Tensors of `graph` made in the forward that other blocks read.
    output : frozenset of int
        What only the next block reads, with all that share its storages: what `again` makes again.
    passing : frozenset of int
        What the forward makes and yet other blocks read.
    output_bytes, gradient_bytes : int
        What the next block's forward reads, and what the backward of the block before reads.
    passing_bytes : int
        Of all that yet other blocks read.
    reads_output : bool
        Whether the backward reads what the next block's forward reads.
    """

    graph: Graph
    again: Graph | None
    operations: tuple[int, ...]
    tensors: tuple[int, ...]
    exported: frozenset[int]
    output: frozenset[int]
    passing: frozenset[int]
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
    known: dict[object, Graph] = {}
    return tuple(_block_graph(graph, number, block, readers, known) for number, block in enumerate(blocks))


def _block_graph(
    graph: Graph,
    number: int,
    block: Block,
    readers: dict[int, set[int]],
    known: dict[object, Graph],
) -> BlockGraph:
    index = graph.index
    operations = (*block.forward, -1, *block.backward)
    made = {t for i in (*block.forward, *block.backward) for t in index.outputs[i]}
    exported = {t for t in made if readers.get(t, set()) - {number}}
    out_storages = {index.storage_of[t] for t in exported}
    read = {t for i in (*block.forward, *block.backward) for t in index.inputs[i]}
    foreign = {index.storage_of[t] for t in read - made}
    own = {index.storage_of[t] for t in made} - out_storages - foreign
    forward = {t for i in block.forward for t in index.outputs[i]}
    output, gradient, passing = set(), set(), set()
    for t in exported:
        storage = index.storage_of[t]
        others = readers[t] - {number}
        if t in forward and others == {number + 1}:
            output.add(storage)
        elif t not in forward and others == {number - 1}:
            gradient.add(storage)
        else:
            passing.add(storage)
    size = {s: index.storage_bytes[s] for s in own}
    results = sorted(exported | {t for t in made if index.is_result[t]})
    small = _shared_graph(graph, operations, size, results, known)
    read_back = {index.storage_of[t] for i in block.backward for t in index.inputs[i]}
    output = {s for s in output - passing if index.storage_bytes[s]}
    # Where the block reads what another one made on such a storage, nothing is said of making it again.
    remade = output - foreign
    large = dict.fromkeys(remade, sum(size.values()) + 1)
    again = _shared_graph(graph, operations, size | large, results, known) if remade else None
    tensors = _numbered(index, operations)
    number_of = {t: n for n, t in enumerate(tensors)}
    return BlockGraph(
        small,
        again,
        operations,
        tensors,
        frozenset(number_of[t] for t in exported & forward),
        frozenset(number_of[t] for t in made if index.storage_of[t] in remade),
        frozenset(number_of[t] for t in exported & forward if index.storage_of[t] in passing),
        _bytes(index.storage_bytes, output),
        _bytes(index.storage_bytes, gradient - passing),
        _bytes(index.storage_bytes, passing),
        bool(read_back & output),
    )


def _shared_graph(
    graph: Graph,
    operations: Sequence[int],
    size: dict[int, int],
    results: Iterable[int],
    known: dict[object, Graph],
) -> Graph:
    """Return the graph of these operations, with numbers for names; the one known if there is an equal one."""
    index = graph.index
    number = {t: n for n, t in enumerate(_numbered(index, operations))}
    storage: dict[int, int] = {}
    for t in number:
        storage.setdefault(index.storage_of[t], len(storage))
    rows: list[tuple[tuple[int, ...], tuple[int, ...], float, int, Phase, bool, bool]] = []
    for i in operations:
        if i < 0:
            rows.append(((), (), 0.0, 0, "backward", False, True))
            continue
        operation = graph.operations[i]
        rows.append(
            (
                tuple(number[t] for t in index.inputs[i]),
                tuple(number[t] for t in index.outputs[i]),
                operation.time,
                operation.workspace_bytes,
                operation.phase,
                operation.repeatable,
                operation.phase == "forward" or i in index.required,
            )
        )
    tensors = tuple((storage[index.storage_of[t]], size.get(index.storage_of[t], 0)) for t in number)
    ends = tuple(sorted(number[t] for t in results))
    key = (tuple(rows), tensors, ends)
    if key not in known:
        made = {t for row in rows for t in row[1]}
        known[key] = Graph(
            tuple(
                Operation(str(n), _names(inputs), _names(outputs), time, workspace, phase, repeatable)
                for n, (inputs, outputs, time, workspace, phase, repeatable, _) in enumerate(rows)
            ),
            tuple(Tensor(str(t), bytes_, f"s{s}") for t, (s, bytes_) in enumerate(tensors)),
            resident=tuple(str(t) for t in range(len(tensors)) if t not in made),
            results=_names(ends),
            required=tuple(str(n) for n, row in enumerate(rows) if row[-1]),
            time_unit=graph.time_unit,
        )
    return known[key]


def _names(numbers: Iterable[int]) -> tuple[str, ...]:
    return tuple(str(number) for number in numbers)


def _numbered(index: GraphIndex, operations: Sequence[int]) -> tuple[int, ...]:
    """Return the tensors of these operations by first appearance."""
    return tuple(dict.fromkeys(t for i in operations if i >= 0 for t in (*index.inputs[i], *index.outputs[i])))


def _bytes(sizes: Sequence[int], storages: Iterable[int]) -> int:
    return sum(sizes[s] for s in storages)
