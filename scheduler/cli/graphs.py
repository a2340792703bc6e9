"""Graphs named on the command line: files, folders of files, standard input, or graphs of the zoo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path

from scheduler import zoo
from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.graph.formats import read_graph

_ZOO = "zoo:"


def read_named_graph(name: str) -> Graph | Chain:
    """Return the graph in a file, or the graph of a zoo name such as `zoo:resnet:batch_size=8,size=128`."""
    if not name.startswith(_ZOO):
        return read_graph(name)
    generator, _, sizes = name.removeprefix(_ZOO).partition(":")
    if generator not in zoo.__all__:
        raise InvalidOptionError(f'no graph "{generator}" in the zoo: the names are {", ".join(zoo.__all__)}')
    generate: Callable[..., Graph | Chain] = getattr(zoo, generator)
    entries = [entry.partition("=") for entry in sizes.split(",")] if sizes else []
    try:
        options = {key: float(value) if "." in value else int(value) for key, _, value in entries}
        signature(generate).bind(**options)
    except (TypeError, ValueError) as error:
        raise InvalidOptionError(f"{name}: {error}; write {_ZOO}{generator}:NAME=NUMBER,...") from error
    return generate(**options)


def read_graphs(names: Sequence[str]) -> dict[str, Graph | Chain]:
    """Return graphs by zoo name or file name, or by path where several files share a name."""
    found = [entry for name in names for entry in _listed(name)]
    labels = [entry if entry.startswith(_ZOO) else Path(entry).stem for entry in found]
    return {
        label if labels.count(label) == 1 else entry: read_named_graph(entry)
        for label, entry in zip(labels, found, strict=True)
    }


def _listed(name: str) -> list[str]:
    """Return the names that a name expands to: all graphs of the zoo, the files of a folder, or itself."""
    if name == f"{_ZOO}all":
        return [f"{_ZOO}{generator}" for generator in zoo.__all__]
    if not Path(name).is_dir():
        return [name]
    files = sorted(file for file in Path(name).iterdir() if file.suffix in (".json", ".txt"))
    if not files:
        raise InvalidOptionError(f"no graph in {name}: a folder of graphs must contain .json or .txt files")
    return [str(file) for file in files]
