"""Graph files: our own JSON, and node-link JSON and text of other tools."""

from __future__ import annotations

import json
import os
from pathlib import Path

from scheduler.errors import GraphFormatError, SchedulerError
from scheduler.files import parse_json, read_text, write_text
from scheduler.graph.chain import CHAIN_FORMAT, Chain
from scheduler.graph.graph import GRAPH_FORMAT, Graph
from scheduler.graph.kusumoto import looks_like_computation_graph, parse_computation_graph
from scheduler.graph.networkx_graphs import from_node_link

_FORMATS = ("auto", "scheduler", "node-link", "computation-graph")


def read_graph(
    path: str | os.PathLike[str], *, format: str = "auto", time: str | None = None, size_bytes: str | None = None
) -> Graph | Chain:
    """Read a graph or a chain from a file.

    Parameters
    ----------
    path : path
        A file; "-" reads standard input.
    format : "auto", "scheduler", "node-link" or "computation-graph"
        The last is the text form of Kusumoto et al. 2019; "auto" looks at the content.
    time, size_bytes : str, optional
        Node attributes of a node-link file that hold time and bytes; by default those of
        the published graph sets are found.

    Returns
    -------
    Graph or Chain
        A chain file gives a chain, every other file a graph. A node-link file gives one
        operation with one output for each node: all required, nothing kept at the end, in
        the order that the file lists under `graph.order`, else in networkx's topological
        order. A computation graph gives a forward and a backward operation for each
        function; see `parse_computation_graph`.

    Raises
    ------
    GraphFormatError
        If the file cannot be read or understood.
    InvalidGraphError
        If the graph in it contradicts itself.
    """
    if format not in _FORMATS:
        raise GraphFormatError(f'format must be one of {", ".join(_FORMATS)}, got "{format}"')
    text = read_text(path)
    if format == "auto" and looks_like_computation_graph(text):
        format = "computation-graph"
    data = None if format == "computation-graph" else parse_json(path, text)
    try:
        if format == "computation-graph":
            return parse_computation_graph(text, name="" if str(path) == "-" else Path(path).stem)
        if not isinstance(data, dict):
            raise GraphFormatError(f"a graph file must hold a JSON object, got {type(data).__name__}")
        if data.get("format") == CHAIN_FORMAT and format in ("auto", "scheduler"):
            return Chain.from_dict(data)
        if format == "auto":
            format = "scheduler" if data.get("format") == GRAPH_FORMAT else "node-link"
        if format == "scheduler":
            return Graph.from_dict(data)
        return from_node_link(data, time=time, size_bytes=size_bytes)
    except SchedulerError as error:
        raise type(error)(f"{path}: {error}") from error


def write_graph(graph: Graph | Chain, path: str | os.PathLike[str]) -> None:
    """Write a graph or a chain as JSON; `read_graph` reads it back.

    Raises
    ------
    OSError
        If the path cannot be written; an existing file is left as it was.
    """
    write_text(path, json.dumps(graph.to_dict(), indent=1, allow_nan=False) + "\n")
