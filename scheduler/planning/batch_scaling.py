"""Graphs of a model at any batch size: traced at a few sizes and predicted at the others.

From batch size 2 on, the graphs of most models differ only in bytes and times, which are
affine in the batch size. So two traces predict a third, and tracing that one confirms it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from scheduler.graph import Graph

Step = TypeVar("Step")

LEAST_PREDICTED = 2
"""Smaller batches are always traced: PyTorch captures another program for a dimension of size 1."""


class StepsBySize(ABC, Generic[Step]):
    """The steps of one model, by batch size.

    Parameters
    ----------
    trace : callable
        Returns the step of a batch size.

    Attributes
    ----------
    traced : dict of int to Step
        The traced steps by batch size.
    """

    def __init__(self, trace: Callable[[int], Step]) -> None:
        self._trace = trace
        self.traced: dict[int, Step] = {}
        self._predicted: dict[int, Step] = {}

    @abstractmethod
    def structure(self, step: Step) -> Hashable:
        """Return a key that steps share if they differ only in names, bytes and times."""

    @abstractmethod
    def bytes_of(self, step: Step) -> object:
        """Return all bytes of a step, to be compared."""

    @abstractmethod
    def predict(self, size: int, one: int, other: int) -> Step:
        """Return the step of a size from the traced ones of two others."""

    def at(self, size: int) -> Step:
        """Return the step of a batch size, predicted if two traced steps have the same structure."""
        if size in self.traced:
            return self.traced[size]
        if size not in self._predicted:
            structures = {known: self.structure(step) for known, step in self.traced.items()}
            pair = nearest_pair(size, structures) if size >= LEAST_PREDICTED else None
            if pair is None:
                return self._trace_now(size)
            self._predicted[size] = self.predict(size, *pair)
        return self._predicted[size]

    def estimate(self, size: int) -> Step:
        """Return the step of a size, also of a smaller one than those that `at` predicts, without a trace if possible.

        What PyTorch captures for one sample differs from that for more in a few operations without weight.
        """
        pair = nearest_pair(size, {known: self.structure(step) for known, step in self.traced.items()})
        return self.at(size) if pair is None or size in self.traced else self.predict(size, *pair)

    def confirm(self, size: int) -> bool:
        """Trace a batch size and return whether its step was traced or predicted correctly before.

        If not, all predictions are discarded.
        """
        if size in self.traced:
            return True
        before = self._predicted.get(size)
        step = self._trace_now(size)
        if before is not None and self._key(step) == self._key(before):
            return True
        self._predicted.clear()
        return False

    def _key(self, step: Step) -> object:
        return self.structure(step), self.bytes_of(step)

    def _trace_now(self, size: int) -> Step:
        self.traced[size] = self._trace(size)
        return self.traced[size]


class Growth(StepsBySize[Graph]):
    """The graphs of one model, by batch size; see `StepsBySize`."""

    def structure(self, step: Graph) -> Hashable:
        return structure(step)

    def bytes_of(self, step: Graph) -> object:
        return bytes_of(step)

    def predict(self, size: int, one: int, other: int) -> Graph:
        return predict(size, one, other, self.traced[one], self.traced[other])


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
            a if a.size_bytes == b.size_bytes else replace(a, size_bytes=affine(a.size_bytes, b.size_bytes))
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


def bytes_of(graph: Graph) -> tuple[list[int], list[int]]:
    """Return the bytes of all tensors and workspaces of a graph."""
    tensors = [tensor.size_bytes for tensor in graph.tensors]
    return tensors, [operation.workspace_bytes for operation in graph.operations]
