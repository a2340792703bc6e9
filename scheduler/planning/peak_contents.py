"""What fills the memory at the peak of a step, by kind and by layer, to the byte."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.schedule import Schedule
from scheduler.simulator import live_instances, simulate

KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer state": "optimizer state",
    "gradient": "gradients of parameters",
    "input": "inputs",
    "constant": "constants",
    "activation": "activations",
    "backward": "gradients of activations",
    "output": "outputs",
    "random state": "random states",
    "reserve": "reserve",
    "workspace": "workspaces",
    "optimizer step": "temporaries of the optimizer's step",
}
"""What each kind of a part is called, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory at a peak.

    Attributes
    ----------
    kind : str
        A role of tensors, or "backward": what the backward computed and is no gradient of a
        parameter; "workspace": what the operation at the peak needs while it runs.
    layer : str
        The layers whose operations made it, with "*" for their numbers; "" if it has none.
    size_bytes : int
    """

    kind: str
    layer: str
    size_bytes: int


def peak_contents(graph: Graph, schedule: Schedule) -> tuple[Part, ...]:
    """Return what fills the memory at the peak of a schedule: its bytes add up to the peak.

    Parameters
    ----------
    graph : Graph
    schedule : Schedule

    Returns
    -------
    tuple of Part
        In the order of `KINDS`, and the largest first in each.
    """
    simulation = simulate(graph, schedule)
    sizes: defaultdict[tuple[str, str], int] = defaultdict(int)
    for role, size in graph.resident_bytes_by_role().items():
        sizes[role, ""] += size
    position = int(simulation.memory.argmax())
    made_by = {tensor: operation for operation in graph.operations for tensor in operation.outputs}
    live = live_instances(graph, schedule, position)
    for instance in live:
        roles = {graph.tensor(name).role for name in instance.tensors}
        operation = made_by[instance.tensors[0]]
        kind = next((role for role in ("gradient", "output", "random state") if role in roles), "activation")
        if kind == "activation" and operation.phase == "backward":
            kind = "backward"
        sizes[kind, "" if kind == "gradient" else collapsed(operation.layer)] += instance.size_bytes
    # Of a repeated output, the second copy is in memory only while the operation runs, as a workspace is.
    sizes["workspace", ""] += simulation.peak_bytes - sum(sizes.values())
    parts = [Part(kind, layer, size) for (kind, layer), size in sizes.items() if size]
    order = list(KINDS)
    return tuple(sorted(parts, key=lambda part: (order.index(part.kind), -part.size_bytes, part.layer)))


def total_by_kind(parts: Sequence[Part]) -> dict[str, int]:
    """Return the bytes of each kind, in the order of `KINDS`."""
    totals = {kind: sum(part.size_bytes for part in parts if part.kind == kind) for kind in KINDS}
    return {kind: size for kind, size in totals.items() if size}


def collapsed(layer: str) -> str:
    """Return the name of a layer with "*" for its numbers: the same for all blocks of a model.

    Examples
    --------
    >>> collapsed("model.layers.17.mlp")
    'model.layers.*.mlp'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", layer)
