"""Graph files: ours, other tools', networkx; and the files that are refused."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import get_args

import networkx
import pytest
from hypothesis import given, settings

import scheduler as sc
from scheduler.errors import GraphFormatError, InvalidGraphError
from scheduler.files import write_text
from scheduler.graph import Role
from scheduler.graph.networkx_graphs import from_networkx, to_networkx
from tests.support.examples import examples
from tests.support.strategies import graphs

RANDOM_LAYERED = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "tiny", "order": [0, 2, 1, 3]},
    "nodes": [
        {"out_cost": 5, "param_cost": 0, "duration": 1, "name": 0, "id": 0},
        {"out_cost": 7, "param_cost": 0, "duration": 2, "name": 1, "id": 1},
        {"out_cost": 9, "param_cost": 0, "duration": 3, "name": 2, "id": 2},
        {"out_cost": 1, "param_cost": 0, "duration": 4, "name": 3, "id": 3},
    ],
    "links": [{"0": 0, "1": 1}, {"0": 0, "1": 2}, {"0": 1, "1": 3}, {"0": 2, "1": 3}],
}
CHECKMATE = {
    "directed": True,
    "multigraph": False,
    "graph": {"name": "net"},
    "nodes": [
        {"name": "conv", "backward": False, "cost_cpu": 10, "cost_ram": 64, "id": 0},
        {"name": "loss", "backward": False, "cost_cpu": 1, "cost_ram": 4, "id": 1},
        {"name": "conv_backward", "backward": True, "cost_cpu": 20, "cost_ram": 32, "id": 2},
    ],
    "links": [{"source": 0, "target": 1}, {"source": 0, "target": 2}, {"source": 1, "target": 2}],
}


def write(path: Path, data: object) -> Path:
    path.write_text(json.dumps(data))
    return path


@settings(max_examples=examples(50))
@given(graph=graphs())
def test_our_json_and_networkx_read_back_what_was_written(
    graph: sc.Graph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("graphs") / "graph.json"
    graph = replace(
        graph,
        operations=[replace(op, layer=f"layer {op.name}", kind=op.name) for op in graph.operations],
        tensors=[replace(t, role=role) for t, role in zip(graph.tensors, cycle(get_args(Role)), strict=False)],
    )
    sc.write_graph(graph, path)
    assert sc.read_graph(path) == graph
    assert from_networkx(to_networkx(graph)) == graph


def test_a_node_link_file_gives_one_required_operation_per_node_in_the_files_order(tmp_path: Path) -> None:
    graph = sc.read_graph(write(tmp_path / "g.json", RANDOM_LAYERED))
    assert [entry.name for entry in graph.operations] == ["0", "2", "1", "3"]
    assert [entry.time for entry in graph.operations] == [1.0, 3.0, 2.0, 4.0]
    assert [graph.tensor(name).size_bytes for name in "0123"] == [5, 7, 9, 1]
    assert graph.operation("3").inputs == ("1", "2")
    assert set(graph.required) == set("0123")
    assert graph.results == ()
    assert graph.resident == ()


def test_marks_of_the_published_training_graphs_become_phases(tmp_path: Path) -> None:
    graph = sc.read_graph(write(tmp_path / "g.json", CHECKMATE))
    assert [(entry.name, entry.phase) for entry in graph.operations] == [
        ("conv", "forward"),
        ("loss", "forward"),
        ("conv_backward", "backward"),
    ]


def test_marks_that_do_not_split_the_order_say_nothing(tmp_path: Path) -> None:
    data = json.loads(json.dumps(CHECKMATE))
    data["nodes"][0]["backward"] = True
    graph = sc.read_graph(write(tmp_path / "g.json", data))
    assert {entry.phase for entry in graph.operations} == {"forward"}


def test_costs_under_other_names_are_found_when_they_are_named(tmp_path: Path) -> None:
    data = {
        "nodes": [{"id": "a", "joules": 2, "kilos": 3}, {"id": "b", "joules": 4, "kilos": 5}],
        "links": [{"source": "a", "target": "b"}],
    }
    path = write(tmp_path / "g.json", data)
    with pytest.raises(GraphFormatError, match=r"no known node attribute holds time.*joules.*kilos"):
        sc.read_graph(path)
    graph = sc.read_graph(path, time="joules", size_bytes="kilos")
    assert (graph.operation("b").time, graph.tensor("b").size_bytes) == (4.0, 5)
    with pytest.raises(GraphFormatError, match='no node has "grams"'):
        sc.read_graph(path, time="joules", size_bytes="grams")


def test_a_cycle_is_named(tmp_path: Path) -> None:
    data = json.loads(json.dumps(CHECKMATE))
    data["links"].append({"source": 2, "target": 0})
    with pytest.raises(InvalidGraphError, match="cycle"):
        sc.read_graph(write(tmp_path / "g.json", data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": "none"}, "neither"),
        ({"nodes": [7]}, "node 0 is not a JSON object"),
        ({"nodes": [{"id": None}]}, "node 0: id None must be a plain value"),
        ({"links": [{"a": 0, "b": 1}]}, "link 0 has no ends"),
        ({"links": [{"source": 0, "target": 9}]}, "unknown node 9"),
        ({"links": [{"source": [0], "target": 1}]}, "unknown node"),
        ({"graph": {"order": [0, 1]}}, "must list every node once"),
        ({"graph": {"order": 3}}, "list of nodes"),
    ],
)
def test_damaged_node_link_files_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(GraphFormatError, match=message):
        sc.read_graph(write(tmp_path / "g.json", {**CHECKMATE, **change}))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "NaN", '{"time": Infinity}', "[" * 100_000, "\x00"])
def test_what_is_not_json_or_not_a_graph_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "g.json"
    path.write_text(text)
    with pytest.raises(GraphFormatError):
        sc.read_graph(path)


def test_a_missing_file_and_a_binary_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphFormatError, match="No such file"):
        sc.read_graph(tmp_path / "none.json")
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphFormatError, match="not valid UTF-8"):
        sc.read_graph(tmp_path / "b")


def test_an_undirected_graph_is_refused() -> None:
    with pytest.raises(GraphFormatError, match="directed"):
        from_networkx(networkx.path_graph(3))


def test_a_repeated_entry_is_refused(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text('{"format": "scheduler-graph", "version": 1, "version": 1}')
    with pytest.raises(GraphFormatError, match='two entries of one object are called "version"'):
        sc.read_graph(tmp_path / "graph.json")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text(target, "new \ud800")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_files_written_in_threads_have_the_mode_that_the_mask_leaves(tmp_path: Path) -> None:
    """The mask is the process's: a write that changed it for a moment would show in other threads' files."""
    old = os.umask(0o027)
    try:
        with ThreadPoolExecutor(8) as pool:
            for i in range(100):
                pool.submit(write_text, tmp_path / f"ours{i % 4}", "text")
                pool.submit((tmp_path / f"other{i}").touch)
    finally:
        os.umask(old)
    assert len(list(tmp_path.iterdir())) == 104
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o640}


def test_writing_into_a_folder_that_is_not_there_fails_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_text(tmp_path / "none" / "out.json", "text")


def test_a_chain_file_reads_back_as_a_chain(tmp_path: Path) -> None:
    chain = sc.Chain([sc.Layer("a", 1.0, 2.0, 8, 4), sc.Layer("b", 1.0, 2.0, 8, 4)], input_bytes=8)
    sc.write_graph(chain, tmp_path / "chain.json")
    assert sc.read_graph(tmp_path / "chain.json") == chain
