"""The graph of a step as it would be with other memory resident, or with its gradients handed over early."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from scheduler.graph import Graph, Tensor
from scheduler.graph.operations import Role


def with_resident(graph: Graph, name: str, size_bytes: int, role: Role) -> Graph:
    """Return a graph with a further resident tensor; the same graph if it has no bytes."""
    if not size_bytes:
        return graph
    tensor = Tensor(name, size_bytes, role=role)
    return replace(graph, tensors=(*graph.tensors, tensor), resident=(*graph.resident, name))


def with_gradients_handed_over(graph: Graph) -> Graph:
    """Return a graph in which each gradient may be freed once it has been computed and nothing reads it any more.

    So it is if an optimizer steps in the hooks of the gradients, or if they are added to existing
    ones, which then are resident.
    """
    gradients = set(gradient_names(graph))
    makers = [operation.name for operation in graph.operations if gradients.intersection(operation.outputs)]
    results = tuple(name for name in graph.results if name not in gradients)
    return replace(graph, results=results, required=tuple(dict.fromkeys((*graph.required, *makers))))


def in_proportion(graph: Graph, part: int, whole: int, *, kept: Collection[Role] = ()) -> Graph:
    """Return a graph with part / whole of the bytes and times, as an estimate of a smaller step.

    Parameters
    ----------
    graph : Graph
    part, whole : int
    kept : collection of Role
        Tensors of these roles keep their sizes.
    """

    def scaled(size: int) -> int:
        return -(-size * part // whole)

    return replace(
        graph,
        tensors=tuple(
            tensor if tensor.role in kept else replace(tensor, size_bytes=scaled(tensor.size_bytes))
            for tensor in graph.tensors
        ),
        operations=tuple(
            replace(o, time=o.time * part / whole, workspace_bytes=scaled(o.workspace_bytes)) for o in graph.operations
        ),
    )


def gradient_names(graph: Graph) -> tuple[str, ...]:
    """Return the gradients that a step computes and returns, without those that exist before it."""
    resident = set(graph.resident)
    return tuple(n for n in graph.results if n not in resident and graph.tensor(n).role == "gradient")


def gradient_bytes(graph: Graph) -> int:
    """Return the bytes of the storages of the gradients that a step returns."""
    index = graph.index
    storages = {index.storage_of[index.tensor_ids[name]] for name in gradient_names(graph)}
    return sum(index.storage_bytes[storage] for storage in storages)
