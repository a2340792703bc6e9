"""Graphs of a model at any batch size: traced at a few sizes and predicted at the others.

From batch size 2 on, the graphs of most models differ only in bytes and times, which are
affine in the batch size. So two traces predict a third, and tracing that one confirms it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

from scheduler.graph import Graph

LEAST_PREDICTED = 2
"""Smaller batches are always traced: PyTorch captures another program for a dimension of size 1."""


class Growth:
    """The graphs of one model, by batch size.

    Parameters
    ----------
    trace : callable
        Returns the graph of a batch size.

    Attributes
    ----------
    traced : dict of int to Graph
        The traced graphs by batch size.
    """

    def __init__(self, trace: Callable[[int], Graph]) -> None:
        self._trace = trace
        self.traced: dict[int, Graph] = {}
        self._predicted: dict[int, Graph] = {}

    def at(self, size: int) -> Graph:
        """Return the graph of a batch size, predicted if two traced graphs have the same structure."""
        if size in self.traced:
            return self.traced[size]
        if size not in self._predicted:
            structures = {known: structure(graph) for known, graph in self.traced.items()}
            pair = nearest_pair(size, structures) if size >= LEAST_PREDICTED else None
            if pair is None:
                return self._trace_now(size)
            self._predicted[size] = predict(size, *pair, self.traced[pair[0]], self.traced[pair[1]])
        return self._predicted[size]

    def confirm(self, size: int) -> bool:
        """Trace a batch size and return whether its graph was traced or predicted correctly before.

        If not, all predictions are discarded.
        """
        if size in self.traced:
            return True
        predicted = self._predicted.get(size)
        graph = self._trace_now(size)
        if predicted is not None and structure(graph) == structure(predicted) and _bytes(graph) == _bytes(predicted):
            return True
        self._predicted.clear()
        return False

    def _trace_now(self, size: int) -> Graph:
        self.traced[size] = self._trace(size)
        return self.traced[size]


def nearest_pair(size: int, structures: Mapping[int, Hashable]) -> tuple[int, int] | None:
    """Return two sizes with the same structure: the nearest on each side of a size, or the two nearest."""
    by_structure: dict[Hashable, list[int]] = {}
    for known in sorted(structures, key=lambda known: abs(known - size)):
        if known >= LEAST_PREDICTED:
            by_structure.setdefault(structures[known], []).append(known)
    for near, *others in by_structure.values():
        beyond = [other for other in others if (other < size) != (near < size)]
        if others:
            return near, (beyond or others)[0]
    return None


def structure(graph: Graph) -> Hashable:
    """Return a key that graphs share if they differ only in names, bytes and times.

    A schedule of one such graph, as a sequence of operations, is a schedule of the others.
    """
    index = graph.index
    return (
        tuple(
            (tuple(index.inputs[i]), tuple(index.outputs[i]), operation.phase, operation.repeatable)
            for i, operation in enumerate(graph.operations)
        ),
        tuple(index.storage_of),
        tuple(index.is_resident),
        tuple(index.is_result),
        tuple(index.required),
    )


def predict(size: int, one: int, other: int, graph: Graph, second: Graph) -> Graph:
    """Return the graph of a batch size, with bytes and times extrapolated from two other sizes.

    Parameters
    ----------
    size : int
        The batch size to predict.
    one, other : int
        The batch sizes of `graph` and `second`.
    graph, second : Graph
        Two graphs of equal structure.

    Examples
    --------
    >>> from scheduler.graph import Operation, Tensor
    >>> def step(batch):
    ...     return Graph([Operation("f", [], ["y"], 2.0 * batch)], [Tensor("y", 5 + 3 * batch)], results=["y"])
    >>> graph = predict(10, 2, 3, step(2), step(3))
    >>> graph.tensors[0].size_bytes, graph.operations[0].time
    (35, 20.0)
    """
    steps, apart = size - one, other - one

    def affine(a: int, b: int) -> int:
        return extrapolate(size, one, other, a, b)

    return replace(
        graph,
        tensors=tuple(
            replace(a, size_bytes=affine(a.size_bytes, b.size_bytes))
            for a, b in zip(graph.tensors, second.tensors, strict=True)
        ),
        operations=tuple(
            replace(
                a,
                time=max(0.0, a.time + (b.time - a.time) * steps / apart),
                workspace_bytes=affine(a.workspace_bytes, b.workspace_bytes),
            )
            for a, b in zip(graph.operations, second.operations, strict=True)
        ),
    )


def extrapolate(size: int, one: int, other: int, a: int, b: int) -> int:
    """Return the bytes at a batch size from those at two others, at least 0 and rounded up."""
    return max(0, a - (a - b) * (size - one) // (other - one))


def _bytes(graph: Graph) -> tuple[list[int], list[int]]:
    tensors = [tensor.size_bytes for tensor in graph.tensors]
    return tensors, [operation.workspace_bytes for operation in graph.operations]
