"""Graphs of networkx, and node-link JSON of other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.errors import GraphFormatError, InvalidGraphError
from scheduler.graph.graph import GRAPH_FORMAT, Graph
from scheduler.graph.operations import Operation, Phase, Tensor

if TYPE_CHECKING:
    import networkx

_OPERATION_FIELDS = ("name", "time", "workspace_bytes", "phase", "repeatable", "signature", "layer", "kind")
_TIME_NAMES = ("time", "duration", "cost_cpu", "weight", "cost")
_SIZE_NAMES = ("size_bytes", "out_cost", "cost_ram", "memory", "size")
_END_NAMES = (("source", "target"), ("0", "1"), ("from", "to"))


def to_networkx(graph: Graph) -> networkx.DiGraph:
    """Return a bipartite graph: nodes "operation:NAME" and "tensor:NAME", edges along the data.

    Each node has the fields of its operation or tensor, and `node_type`; the graph has the
    rest. `from_networkx` reads it back.

    Parameters
    ----------
    graph : Graph
    """
    import networkx

    data = graph.to_dict()
    result: networkx.DiGraph = networkx.DiGraph(
        **{key: data[key] for key in ("name", "time_unit", "resident", "results", "required")}
    )
    for tensor in graph.tensors:
        result.add_node(
            f"tensor:{tensor.name}",
            node_type="tensor",
            name=tensor.name,
            size_bytes=tensor.size_bytes,
            storage=tensor.storage,
            role=tensor.role,
        )
    for position, operation in enumerate(graph.operations):
        node = f"operation:{operation.name}"
        result.add_node(
            node,
            node_type="operation",
            position=position,
            name=operation.name,
            time=operation.time,
            workspace_bytes=operation.workspace_bytes,
            phase=operation.phase,
            repeatable=operation.repeatable,
            signature=operation.signature,
            layer=operation.layer,
            kind=operation.kind,
        )
        for number, tensor_name in enumerate(operation.inputs):
            result.add_edge(f"tensor:{tensor_name}", node, number=number)
        for number, tensor_name in enumerate(operation.outputs):
            result.add_edge(node, f"tensor:{tensor_name}", number=number)
    return result


def from_networkx(graph: networkx.DiGraph, *, time: str | None = None, size_bytes: str | None = None) -> Graph:
    """Return the graph that `to_networkx` wrote, or one operation for each node of any other.

    Parameters
    ----------
    graph : networkx.DiGraph
    time, size_bytes : str, optional
        Node attributes that hold time and bytes, if `to_networkx` did not write the graph.

    Raises
    ------
    GraphFormatError
        If a node lacks its costs (names the attributes found), or the graph is not directed.
    InvalidGraphError
        If the graph contradicts itself, for example by a cycle.
    """
    kinds = {attributes.get("node_type") for _, attributes in graph.nodes(data=True)}
    if "operation" in kinds and kinds <= {"operation", "tensor"}:
        return _from_bipartite(graph)
    return _one_operation_per_node(graph, time=time, size_bytes=size_bytes)


def _from_bipartite(graph: networkx.DiGraph) -> Graph:
    tensors = [
        Tensor(fields["name"], fields["size_bytes"], fields["storage"], role=fields["role"])
        for _, fields in graph.nodes(data=True)
        if fields["node_type"] == "tensor"
    ]
    operations = []
    for node, fields in graph.nodes(data=True):
        if fields["node_type"] == "operation":
            inputs = sorted(
                (data["number"], graph.nodes[source]["name"]) for source, _, data in graph.in_edges(node, data=True)
            )
            outputs = sorted(
                (data["number"], graph.nodes[target]["name"]) for _, target, data in graph.out_edges(node, data=True)
            )
            own = {key: fields[key] for key in _OPERATION_FIELDS}
            operation = Operation(inputs=tuple(n for _, n in inputs), outputs=tuple(n for _, n in outputs), **own)
            operations.append((fields["position"], operation))
    return Graph([operation for _, operation in sorted(operations, key=lambda entry: entry[0])], tensors, **graph.graph)


def from_node_link(data: dict[str, object], *, time: str | None, size_bytes: str | None) -> Graph:
    """Return one operation for each node of node-link JSON data; arguments and errors as for `from_networkx`."""
    import networkx

    nodes, links = data.get("nodes"), data.get("links", data.get("edges"))
    if not isinstance(nodes, list) or not isinstance(links, list):
        raise GraphFormatError(
            f'neither a "{GRAPH_FORMAT}" file nor node-link JSON: it has {sorted(map(str, data))},'
            ' and node-link JSON has "nodes" and "links"'
        )
    graph: networkx.DiGraph = networkx.DiGraph()
    own = data.get("graph")
    if isinstance(own, dict):
        graph.graph.update(own)
    for number, entry in enumerate(nodes):
        if not isinstance(entry, dict):
            raise GraphFormatError(f"node {number} is not a JSON object")
        node = entry.get("id", entry.get("name", number))
        if node is None or isinstance(node, (list, dict)) or node in graph:
            raise GraphFormatError(f"node {number}: id {node!r} must be a plain value that no other node has")
        graph.add_node(node, **{str(key): value for key, value in entry.items()})
    for number, link in enumerate(links):
        ends = next((e for e in _END_NAMES if isinstance(link, dict) and e[0] in link and e[1] in link), None)
        if ends is None:
            raise GraphFormatError(f"link {number} has no ends: the known pairs of names are {list(_END_NAMES)}")
        source, target = link[ends[0]], link[ends[1]]
        for node in (source, target):
            if isinstance(node, (list, dict)) or node not in graph:
                raise GraphFormatError(f"link {number} names an unknown node {node!r}")
        graph.add_edge(source, target)
    return _one_operation_per_node(graph, time=time, size_bytes=size_bytes)


def _one_operation_per_node(graph: networkx.DiGraph, *, time: str | None, size_bytes: str | None) -> Graph:
    import networkx

    if not graph.is_directed():
        raise GraphFormatError("a graph of operations must be directed: give a networkx.DiGraph")
    if not graph.nodes:
        raise InvalidGraphError("a graph needs at least one operation")
    found = {str(key) for _, attributes in graph.nodes(data=True) for key in attributes}
    time_name = _attribute(time, _TIME_NAMES, found, "time")
    size_name = _attribute(size_bytes, _SIZE_NAMES, found, "size_bytes")
    order = graph.graph.get("order")
    if order is None:
        try:
            order = list(networkx.topological_sort(graph))
        except networkx.NetworkXUnfeasible:
            cycle = " -> ".join(str(source) for source, _ in networkx.find_cycle(graph))
            raise InvalidGraphError(
                f"the graph has a cycle: {cycle} -> ...; an operation cannot need its own result"
            ) from None
    else:
        order = _input_order(order, graph)
    names = _unique_names(graph, order)
    marks = [
        graph.nodes[node].get("backward") is True or graph.nodes[node].get("phase") == "backward" for node in order
    ]
    # Marks that do not split the order into two phases do not mark phases.
    two_phases = marks == sorted(marks)
    operations, tensors = [], []
    for node, marked in zip(order, marks, strict=True):
        attributes = graph.nodes[node]
        for name in (time_name, size_name):
            if name not in attributes:
                raise GraphFormatError(f'node {node!r} lacks "{name}"; it has {sorted(map(str, attributes))}')
        phase: Phase = "backward" if marked and two_phases else "forward"
        inputs = [names[source] for source in graph.predecessors(node)]
        operations.append(Operation(names[node], tuple(inputs), (names[node],), attributes[time_name], phase=phase))
        tensors.append(Tensor(names[node], attributes[size_name]))
    return Graph(
        operations,
        tensors,
        required=[operation.name for operation in operations],
        time_unit=str(graph.graph.get("time_unit", "unit")),
        name=str(graph.graph.get("name", "")),
    )


def _attribute(given: str | None, known: tuple[str, ...], found: set[str], what: str) -> str:
    if given is not None:
        if given not in found:
            raise GraphFormatError(f'no node has "{given}"; the attributes found are {sorted(found)}')
        return given
    name = next((name for name in known if name in found), None)
    if name is None:
        raise GraphFormatError(
            f"no known node attribute holds {what}: found {sorted(found)}, known are {list(known)};"
            f" name it with {what}=..."
        )
    return name


def _input_order(order: object, graph: networkx.DiGraph) -> list[object]:
    nodes = set(graph.nodes)
    if not isinstance(order, (list, tuple)):
        raise GraphFormatError(f'"order" of the graph must be a list of nodes, got {type(order).__name__}')
    listed = [node for node in order if not isinstance(node, (list, dict))]
    if len(listed) != len(order) or len(listed) != len(nodes) or set(listed) != nodes:
        raise GraphFormatError('"order" of the graph must list every node once')
    return listed


def _unique_names(graph: networkx.DiGraph, order: list[object]) -> dict[object, str]:
    own = {node: str(graph.nodes[node].get("name", node)) for node in order}
    if len(set(own.values())) == len(own):
        return own
    return {node: f"{name}#{node}" for node, name in own.items()}
