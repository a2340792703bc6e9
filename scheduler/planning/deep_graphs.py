"""The graph of a deep model at other sizes, from graphs of the same model with fewer blocks.

Blocks that are repeated grow alike, so a step with three of them, traced at two sizes, says how
every operation of the whole step grows. That takes a fraction of tracing the whole step again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scheduler.graph import Graph, Operation
from scheduler.planning.batch_scaling import structure


def deep_graph_at(deep: Graph, shallow: Graph, other: Graph) -> Graph | None:
    """Return the graph of a deep model at another size, None if it does not follow.

    Parameters
    ----------
    deep, shallow : Graph
        Of the model, and of the same model with some equal blocks left out, at one size.
    other : Graph
        Of the shallow model at the other size.
    """
    if structure(shallow) != structure(other):
        return None
    places = _places(deep, shallow)
    if places is None:
        return None
    tensors = _tensor_map(deep, shallow, places)
    if tensors is None:
        return None
    operations = tuple(
        replace(operation, time=grown.time, workspace_bytes=grown.workspace_bytes)
        for operation, grown in zip(deep.operations, (other.operations[place] for place in places), strict=True)
    )
    sizes = [
        tensor.size_bytes if found is None else other.tensors[found].size_bytes
        for tensor, found in zip(deep.tensors, tensors, strict=True)
    ]
    grown_tensors = tuple(
        tensor if tensor.size_bytes == size else replace(tensor, size_bytes=size)
        for tensor, size in zip(deep.tensors, sizes, strict=True)
    )
    return replace(deep, operations=operations, tensors=grown_tensors)


def _places(deep: Graph, shallow: Graph) -> list[int] | None:
    """Return the operation of the shallow graph for each one of the deep graph, None if they do not match."""
    places: list[int] = []
    offset = 0
    for phase in ("forward", "backward"):
        long = [operation for operation in deep.operations if operation.phase == phase]
        short = [operation for operation in shallow.operations if operation.phase == phase]
        found = _periodic(long, short)
        if found is None:
            return None
        places += [offset + place for place in found]
        offset += len(short)
    return places


def _periodic(long: Sequence[Operation], short: Sequence[Operation]) -> list[int] | None:
    """Return places in a short sequence for a long one, in which a part of the short one is repeated."""
    added = len(long) - len(short)
    common = next((i for i, (a, b) in enumerate(zip(long, short, strict=False)) if not _alike(a, b)), len(short))
    if added < 0:
        return None
    if not added:
        return list(range(len(long))) if common == len(short) else None
    for period in _periods(added, common):
        begin = common - period
        end = len(long) - (len(short) - common)
        places = [i if i < begin else begin + (i - begin) % period if i < end else i - added for i in range(len(long))]
        if all(_alike(operation, short[place]) for operation, place in zip(long, places, strict=True)):
            return places
    return None


def _periods(added: int, most: int) -> list[int]:
    """Return the lengths of a part that may have been repeated, the shortest first."""
    return [period for period in range(1, most + 1) if added % period == 0]


def _alike(one: Operation, other: Operation) -> bool:
    return (
        one.signature == other.signature
        and (len(one.inputs), len(one.outputs)) == (len(other.inputs), len(other.outputs))
        and one.repeatable == other.repeatable
    )


def _tensor_map(deep: Graph, shallow: Graph, places: Sequence[int]) -> list[int | None] | None:
    """Return the tensor of the shallow graph for each one of the deep graph that may grow.

    None instead if sizes or inputs do not agree. What stays, such as parameters, has no counterpart.
    """
    deep_ids, shallow_ids = deep.index.tensor_ids, shallow.index.tensor_ids
    found: list[int | None] = [None] * len(deep.tensors)
    for operation, place in zip(deep.operations, places, strict=True):
        for name, other in zip(operation.outputs, shallow.operations[place].outputs, strict=True):
            found[deep_ids[name]] = shallow_ids[other]
    inputs = [
        [name for name in graph.resident if graph.tensor(name).role not in ("parameter", "buffer")]
        for graph in (deep, shallow)
    ]
    if len(inputs[0]) != len(inputs[1]):
        return None
    for name, other in zip(*inputs, strict=True):
        found[deep_ids[name]] = shallow_ids[other]
    agree = all(
        other is None or tensor.size_bytes == shallow.tensors[other].size_bytes
        for tensor, other in zip(deep.tensors, found, strict=True)
    )
    return found if agree else None
