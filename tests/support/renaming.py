"""Graphs and plans with all names changed, and texts with the names changed back."""

from __future__ import annotations

from dataclasses import replace

import scheduler as sc


def new_names(graph: sc.Graph) -> dict[str, str]:
    """New names of operations, tensors and storages, in reverse alphabetical order."""
    operations = {f"operation {operation.name}": f"op{9999 - i}po" for i, operation in enumerate(graph.operations)}
    tensors = {f"tensor {tensor.name}": f"te{9999 - i}et" for i, tensor in enumerate(graph.tensors)}
    storages = list(dict.fromkeys(str(tensor.storage) for tensor in graph.tensors))
    return operations | tensors | {f"storage {storage}": f"st{9999 - i}ts" for i, storage in enumerate(storages)}


def renamed(graph: sc.Graph) -> sc.Graph:
    """The same graph under other names."""
    new = new_names(graph)

    def tensors(names: object) -> tuple[str, ...]:
        return tuple(new[f"tensor {name}"] for name in names)

    return replace(
        graph,
        operations=[
            replace(
                operation,
                name=new[f"operation {operation.name}"],
                inputs=tensors(operation.inputs),
                outputs=tensors(operation.outputs),
            )
            for operation in graph.operations
        ],
        tensors=[
            replace(tensor, name=new[f"tensor {tensor.name}"], storage=new[f"storage {tensor.storage}"])
            for tensor in graph.tensors
        ],
        resident=tensors(graph.resident),
        results=tensors(graph.results),
        required=[new[f"operation {name}"] for name in graph.required],
    )


def renamed_schedule(graph: sc.Graph, schedule: sc.Schedule) -> sc.Schedule:
    """A schedule of `graph` as one of `renamed(graph)`."""
    new = new_names(graph)
    return sc.Schedule(
        sc.Compute(new[f"operation {action.operation}"])
        if isinstance(action, sc.Compute)
        else sc.Free(new[f"tensor {action.tensor}"])
        for action in schedule
    )


def renamed_plan(plan: sc.Plan) -> sc.Plan:
    """A plan of `graph` as one of `renamed(graph)`, with the same claims."""
    new = new_names(plan.graph)
    return replace(
        plan,
        graph=renamed(plan.graph),
        schedule=renamed_schedule(plan.graph, plan.schedule),
        saved=tuple(new[f"tensor {name}"] for name in plan.saved),
    )


def with_old_names(text: str, graph: sc.Graph) -> str:
    """A text about `renamed(graph)` as one about `graph`."""
    for old, new in new_names(graph).items():
        text = text.replace(new, old.partition(" ")[2])
    return text
