"""A graph is checked at birth, never changes, and is known by its digests."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given

from scheduler.errors import InvalidGraphError
from scheduler.graph import Graph, Operation, Tensor
from tests.support import oracle
from tests.support.strategies import graphs, joint_graphs


def op(name: str, inputs: str, outputs: str, time: float = 1, **options: object) -> Operation:
    return Operation(name, inputs.split(), outputs.split(), time, **options)


def tensors(names: str) -> list[Tensor]:
    return [Tensor(name, 1) for name in names.split()]


def refuse(message: str) -> pytest.RaisesExc:
    return pytest.raises(InvalidGraphError, match=message)


# Tensors.


def test_a_tensor_has_a_storage_of_its_own_by_default() -> None:
    assert Tensor("a", 1).storage == "a"
    assert Tensor("a", 1) == Tensor("a", 1, "a")


def test_sizes_become_ints() -> None:
    assert type(Tensor("a", np.int32(4)).size_bytes) is int


@pytest.mark.parametrize("size", [-1, 1.0, 1.5, math.nan, math.inf, "8", None, True, np.True_])
def test_a_size_that_is_not_an_int_of_at_least_0_is_refused(size: object) -> None:
    with refuse('size_bytes of tensor "a"'):
        Tensor("a", size)


@pytest.mark.parametrize("name", ["", None, 3, "a\nb", "a\u2028b", "\x00"])
def test_a_name_that_is_empty_or_unprintable_is_refused(name: object) -> None:
    with refuse("name of a tensor"):
        Tensor(name, 1)
    with refuse("name of an operation"):
        Operation(name, [], ["x"], 1)


@pytest.mark.parametrize("role", ["", "weights", None, 3])
def test_a_role_that_is_unknown_is_refused(role: object) -> None:
    with refuse('role of tensor "a" must be one of "activation", "parameter"'):
        Tensor("a", 1, role=role)


@pytest.mark.parametrize("field", ["layer", "kind"])
@pytest.mark.parametrize("text", [None, 3, "a\nb", "\x1b[31m"])
def test_a_layer_or_kind_that_is_not_printable_text_is_refused(field: str, text: object) -> None:
    with refuse(f'{field} of operation "a"'):
        op("a", "", "x", **{field: text})


def test_an_empty_storage_name_is_refused() -> None:
    with refuse("storage"):
        Tensor("a", 1, "")


# Operations.


def test_inputs_and_outputs_become_tuples() -> None:
    operation = Operation("a", iter(["x", "y"]), ["z"], 1)
    assert (operation.inputs, operation.outputs) == (("x", "y"), ("z",))


@pytest.mark.parametrize("names", ["xy", 3, [1], None])
def test_inputs_that_are_not_a_sequence_of_names_are_refused(names: object) -> None:
    with refuse('inputs of operation "a"'):
        Operation("a", names, ["z"], 1)
    with refuse('outputs of operation "a"'):
        Operation("a", [], names, 1)


def test_repeated_inputs_count_once() -> None:
    graph = Graph([op("a", "x x", "y")], tensors("x y"), resident=["x"], results=["y"])
    assert graph.index.inputs == ((0,),)
    assert graph.index.readers[0] == (0,)


def test_repeated_outputs_are_refused() -> None:
    with refuse("produces the same tensor twice"):
        op("a", "", "x x")


def test_an_operation_in_place_is_refused() -> None:
    with refuse('reads and produces "x"'):
        op("a", "x", "x y")


@pytest.mark.parametrize("time", [-1, -1e-9, math.nan, math.inf, 1e31, 10**400, True, "1", None, [1]])
def test_a_time_that_is_not_finite_and_non_negative_is_refused(time: object) -> None:
    with refuse('time of operation "a"'):
        op("a", "", "x", time)


@pytest.mark.parametrize("count", [-1, 1.0, True, "8", None])
def test_a_workspace_that_is_not_an_int_of_at_least_0_is_refused(count: object) -> None:
    with refuse('workspace_bytes of operation "a"'):
        op("a", "", "x", workspace_bytes=count)


def test_an_unknown_phase_is_refused() -> None:
    with refuse('phase of operation "a"'):
        op("a", "", "x", phase="sideways")


def test_repeatable_is_a_bool() -> None:
    with refuse('repeatable of operation "a"'):
        op("a", "", "x", repeatable=1)


def test_a_signature_is_text() -> None:
    with refuse('signature of operation "a"'):
        op("a", "", "x", signature=None)


def test_a_repeatable_operation_that_produces_nothing_is_refused() -> None:
    with refuse("produces nothing"):
        op("a", "x", "")
    assert op("a", "x", "", repeatable=False).outputs == ()


# Graphs.


CHAIN = Graph(
    [op("f", "w", "x", signature="mm"), op("g", "x", "y"), op("h", "x y", "z", phase="backward")],
    tensors("w x y z"),
    resident=["w"],
    results=["z"],
    required=["g"],
    name="chain",
)


def test_a_graph_cannot_be_changed() -> None:
    for instance, field in ((CHAIN, "name"), (CHAIN.operations[0], "time"), (CHAIN.tensors[0], "size_bytes")):
        with pytest.raises(FrozenInstanceError):
            setattr(instance, field, 5)


def test_lookup_by_name() -> None:
    assert CHAIN.operation("g") is CHAIN.operations[1]
    assert CHAIN.tensor("y") is CHAIN.tensors[2]
    with pytest.raises(KeyError):
        CHAIN.operation("x")
    with pytest.raises(KeyError):
        CHAIN.tensor("f")


def test_repeated_names_in_resident_results_and_required_count_once() -> None:
    graph = Graph([op("f", "w", "x")], tensors("w x"), resident=["w", "w"], results=["x", "x"], required=["f", "f"])
    assert (graph.resident, graph.results, graph.required) == (("w",), ("x",), ("f",))


def test_resident_bytes_count_each_storage_once_with_its_largest_tensor() -> None:
    graph = Graph(
        [op("f", "w", "x")],
        [Tensor("w", 3), Tensor("v", 5, "w"), Tensor("b", 7), Tensor("x", 11, "w")],
        resident=["w", "v", "b"],
        results=["x"],
    )
    assert graph.resident_bytes == 11 + 7


def test_a_graph_without_operations_is_refused() -> None:
    with refuse("at least one operation"):
        Graph([], tensors("x"), resident=["x"])


def test_entries_of_another_type_are_refused() -> None:
    with refuse("operations must be Operation values"):
        Graph(["f"], [])
    with refuse("tensors must be Tensor values"):
        Graph([op("f", "", "x")], ["x"])
    with refuse("operations must be a sequence"):
        Graph(None, [])


@pytest.mark.parametrize("field", ["resident", "results", "required"])
@pytest.mark.parametrize("value", ["x", 3, [3], None])
def test_name_lists_of_another_type_are_refused(field: str, value: object) -> None:
    with refuse(f"{field} of the graph"):
        Graph([op("f", "", "x")], tensors("x"), **{field: value})


@pytest.mark.parametrize("field", ["time_unit", "name"])
def test_text_fields_are_text(field: str) -> None:
    with refuse(f"{field} of the graph must be text"):
        Graph([op("f", "", "x")], tensors("x"), **{field: None})


def test_repeated_names_are_refused() -> None:
    with refuse('two operations are called "f"'):
        Graph([op("f", "", "x"), op("f", "", "y")], tensors("x y"))
    with refuse('two tensors are called "x"'):
        Graph([op("f", "", "x")], tensors("x x"))


def test_unknown_tensors_are_refused() -> None:
    with refuse('operation "f" names an unknown tensor "y"'):
        Graph([op("f", "y", "x")], tensors("x"))
    with refuse('operation "f" names an unknown tensor "y"'):
        Graph([op("f", "", "x y")], tensors("x"))
    with refuse('resident names an unknown tensor "y"'):
        Graph([op("f", "", "x")], tensors("x"), resident=["y"])
    with refuse('results names an unknown tensor "y"'):
        Graph([op("f", "", "x")], tensors("x"), results=["y"])


def test_an_unknown_required_operation_is_refused() -> None:
    with refuse('required names an unknown operation "g"'):
        Graph([op("f", "", "x")], tensors("x"), required=["g"])


def test_a_resident_tensor_that_an_operation_produces_is_refused() -> None:
    with refuse('resident tensor "x"'):
        Graph([op("f", "", "x")], tensors("x"), resident=["x"])


def test_a_tensor_that_comes_from_nowhere_is_refused() -> None:
    with refuse('tensor "y" is neither resident nor produced'):
        Graph([op("f", "", "x")], tensors("x y"))


def test_an_order_that_is_not_topological_is_refused() -> None:
    with refuse('operation "g" reads "x" before "f" produces it') as refused:
        Graph([op("g", "x", "y"), op("f", "", "x")], tensors("x y"))
    assert "cycle" not in str(refused.value)


def test_a_cycle_is_refused_and_shown() -> None:
    with refuse("cycle: f <- h <- g <- f"):
        Graph([op("f", "z", "x"), op("g", "x", "y"), op("h", "y", "z")], tensors("x y z"))


def test_more_bytes_than_can_be_counted_are_refused() -> None:
    with refuse("at most 2\\^60"):
        Graph([op("f", "", "x y")], [Tensor("x", 2**59), Tensor("y", 2**59 + 1)])
    with refuse("at most 2\\^60"):
        Graph([op("f", "", "x", workspace_bytes=2**60)], tensors("x"))
    assert Graph([op("f", "", "x y")], [Tensor("x", 2**59), Tensor("y", 2**59)]).tensors[0].size_bytes == 2**59


# Tasks.


def test_operations_linked_by_shared_outputs_form_one_task() -> None:
    graph = Graph(
        [op("a", "", "x y"), op("b", "", "z"), op("c", "", "y s"), op("d", "", "s"), op("e", "x z", "r")],
        tensors("x y z s r"),
        results=["r"],
    )
    assert graph.index.tasks == ((0, 2, 3), (1,), (4,))
    assert graph.index.task_of == (0, 1, 0, 0, 2)
    assert graph.index.defaults == (0, 1, 4)


def test_defaults_are_only_those_that_results_and_required_operations_need() -> None:
    operations = [op("a", "", "x"), op("b", "", "y"), op("c", "y", "z"), op("d", "", "u"), op("e", "x", "r")]
    graph = Graph(operations, tensors("x y z u r"), results=["r"])
    assert graph.index.defaults == (0, 4)
    assert replace(graph, required=("c",)).index.defaults == (0, 1, 2, 4)


def test_non_repeatable_operations_are_required() -> None:
    graph = Graph(
        [op("a", "", "x"), op("b", "x", "", repeatable=False), op("c", "", "y")], tensors("x y"), results=["y"]
    )
    assert graph.index.required == {1}
    assert graph.index.defaults == (0, 1, 2)


def test_forward_tasks_are_those_that_the_forward_results_need() -> None:
    graph = Graph(
        [
            op("a", "", "x"),
            op("l", "x", "loss"),
            op("m", "", "mask"),
            op("b", "mask x", "g", phase="backward"),
        ],
        tensors("x loss mask g"),
        results=["loss", "g"],
    )
    assert graph.index.forward_tasks == (0, 1)
    assert replace(graph, results=("g",)).index.forward_tasks == ()


def test_a_non_repeatable_operation_with_an_alternative_is_refused() -> None:
    with refuse('"b" is not repeatable and shares an output with "a"'):
        Graph([op("a", "", "x"), op("b", "", "x", repeatable=False)], tensors("x"), results=["x"])


def test_defaults_that_do_not_produce_a_result_are_refused() -> None:
    with refuse('do not produce the result "y"'):
        Graph([op("a", "", "x"), op("b", "", "x y")], tensors("x y"), results=["y"])


def test_defaults_that_do_not_produce_the_input_of_a_default_are_refused() -> None:
    with refuse('do not produce "y", which "c" needs'):
        Graph([op("a", "", "x"), op("b", "", "x y"), op("c", "y", "z")], tensors("x y z"), results=["z"])


def test_an_alternative_may_read_what_no_default_makes() -> None:
    graph = Graph(
        [op("a", "", "x"), op("b", "", "x s"), op("c", "x", "z"), op("d", "s", "z")], tensors("x s z"), results=["z"]
    )
    assert graph.index.defaults == (0, 2)


def test_a_tensor_may_be_made_again_from_what_was_made_of_it() -> None:
    # A copy to the host, and back.
    graph = Graph([op("a", "", "x"), op("out", "x", "h"), op("back", "h", "x")], tensors("x h"), results=["x"])
    assert graph.index.tasks == ((0, 2), (1,))


@given(graphs() | joint_graphs())
def test_tasks_agree_with_the_oracle(graph: Graph) -> None:
    plain, index = oracle.read(graph.to_dict()), graph.index
    assert tuple(index.tasks[task][0] for task in index.task_of) == plain.task
    assert {index.tasks[task][0] for task in index.forward_tasks} == plain.forward_tasks
    assert index.required == plain.required
    assert index.resident_bytes == plain.resident_bytes


# Digests.


def changed(graph: Graph, operation: int, **fields: object) -> Graph:
    operations = list(graph.operations)
    operations[operation] = replace(operations[operation], **fields)
    return replace(graph, operations=tuple(operations))


def renamed(graph: Graph) -> Graph:
    """Rename every operation, tensor and storage."""
    data = json.loads(json.dumps(graph.to_dict()))
    for entry in data["tensors"]:
        entry["storage"] = "s " + entry.get("storage", entry["name"])
        entry["name"] = "t " + entry["name"]
    for entry in data["operations"]:
        entry["name"] = "o " + entry["name"]
        for field in ("inputs", "outputs"):
            entry[field] = ["t " + name for name in entry[field]]
    data["resident"] = ["t " + name for name in data["resident"]]
    data["results"] = ["t " + name for name in data["results"]]
    data["required"] = ["o " + name for name in data["required"]]
    return Graph.from_dict(data)


ONLY_DIGEST = {
    "times": changed(CHAIN, 0, time=2),
    "workspaces": changed(CHAIN, 0, workspace_bytes=2),
    "the graph's name": replace(CHAIN, name="other"),
    "the unit": replace(CHAIN, time_unit="FLOP"),
    "all names": renamed(CHAIN),
}
BOTH_DIGESTS = {
    "signature": changed(CHAIN, 0, signature="mv"),
    "phase": changed(CHAIN, 1, phase="backward"),
    "repeatable": changed(CHAIN, 0, repeatable=False),
    "edge": changed(CHAIN, 1, inputs=("w",)),
    "order of inputs": changed(CHAIN, 2, inputs=("y", "x")),
    "bytes": replace(CHAIN, tensors=(*CHAIN.tensors[:3], Tensor("z", 2))),
    "storages": replace(CHAIN, tensors=(*CHAIN.tensors[:3], Tensor("z", 1, "y"))),
    "results": replace(CHAIN, results=("z", "y")),
    "required": replace(CHAIN, required=("f",)),
    "resident": replace(CHAIN, tensors=(*CHAIN.tensors, Tensor("v", 1)), resident=("w", "v")),
}


@pytest.mark.parametrize("what", ONLY_DIGEST)
def test_the_digest_covers_what_the_structure_digest_leaves_out(what: str) -> None:
    assert ONLY_DIGEST[what].digest != CHAIN.digest
    assert ONLY_DIGEST[what].structure_digest == CHAIN.structure_digest


@pytest.mark.parametrize("what", BOTH_DIGESTS)
def test_both_digests_cover_the_structure(what: str) -> None:
    assert BOTH_DIGESTS[what].digest != CHAIN.digest
    assert BOTH_DIGESTS[what].structure_digest != CHAIN.structure_digest


def test_both_digests_cover_the_order_of_operations() -> None:
    first = Graph([op("a", "", "x", signature="p"), op("b", "", "y", signature="q")], tensors("x y"))
    second = Graph(first.operations[::-1], first.tensors)
    assert first.digest != second.digest
    assert first.structure_digest != second.structure_digest


def test_the_structure_digest_does_not_see_in_which_order_tensors_are_listed() -> None:
    assert replace(CHAIN, tensors=CHAIN.tensors[::-1]).structure_digest == CHAIN.structure_digest


def test_equal_graphs_have_equal_digests_and_hashes() -> None:
    same = Graph.from_dict(CHAIN.to_dict())
    assert same == CHAIN
    assert same is not CHAIN
    assert (hash(same), same.digest) == (hash(CHAIN), CHAIN.digest)
    assert len({same, CHAIN}) == 1


@given(graphs() | joint_graphs())
def test_new_names_leave_the_structure_digest(graph: Graph) -> None:
    assert renamed(graph).structure_digest == graph.structure_digest


# Plain data.


@given(graphs() | joint_graphs())
def test_plain_data_reads_back(graph: Graph) -> None:
    back = Graph.from_dict(json.loads(json.dumps(graph.to_dict())))
    assert back == graph
    assert back.digest == graph.digest
    assert pickle.loads(pickle.dumps(graph)) == graph


def test_a_graph_is_shown_in_one_line_and_summarized() -> None:
    graph = Graph(
        [op("f", "w i", "x", 2.0), op("f2", "w i", "x", 1.0), op("b", "x", "g", 3.0, phase="backward")],
        [
            Tensor("w", 100, role="parameter"),
            Tensor("transposed", 80, "w", role="parameter"),
            Tensor("i", 2048, role="input"),
            Tensor("x", 5),
            Tensor("g", 7, role="gradient"),
        ],
        resident=["w", "transposed", "i"],
        results=["g"],
        time_unit="ms",
        name="step",
    )
    assert repr(graph) == "Graph('step', 3 operations, 5 tensors, 2.10 KiB resident)"
    assert graph.summary() == "\n".join(
        [
            "graph       step",
            "operations  2 forward, 1 backward, 1 of them alternatives",
            "tensors     5 in 4 storages",
            "resident    2.10 KiB: parameter 100 B, input 2.00 KiB",
            "results     7 B in 1 storages",
            "time        5 ms if nothing is recomputed",
        ]
    )


def test_plain_data_keeps_every_field() -> None:
    graph = Graph(
        [
            op(
                "f",
                "w",
                "x",
                0.1,
                workspace_bytes=3,
                phase="backward",
                repeatable=False,
                signature="s",
                layer="l",
                kind="k",
            )
        ],
        [Tensor("w", 1, role="parameter"), Tensor("x", 2, "w")],
        resident=["w"],
        results=["x"],
        required=["f"],
        time_unit="ms",
        name="n",
    )
    assert graph.to_dict() == {
        "format": "scheduler-graph",
        "version": 2,
        "name": "n",
        "time_unit": "ms",
        "tensors": [
            {"name": "w", "size_bytes": 1, "role": "parameter"},
            {"name": "x", "size_bytes": 2, "storage": "w"},
        ],
        "operations": [
            {
                "name": "f",
                "inputs": ["w"],
                "outputs": ["x"],
                "time": 0.1,
                "workspace_bytes": 3,
                "phase": "backward",
                "repeatable": False,
                "signature": "s",
                "layer": "l",
                "kind": "k",
            }
        ],
        "resident": ["w"],
        "results": ["x"],
        "required": ["f"],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format must be"),
        ({"version": 3}, "version 3"),
        ({"version": 1}, "version 1 are no longer read.* again with"),
        ({"version": None}, "version None"),
        ({"color": "red"}, "unknown field 'color'"),
        ({"operations": None}, '"operations" of the graph must be a JSON list'),
        ({"operations": [3]}, "an operation must be a JSON object"),
        ({"operations": [{"name": "f"}]}, "lacks a field"),
        ({"operations": [{"name": "f", "inputs": [], "outputs": ["x"], "time": 1, "cost": 1}]}, "unknown field 'cost'"),
        ({"tensors": {}}, '"tensors" of the graph must be a JSON list'),
        ({"tensors": [{"name": "x"}]}, "lacks a field"),
        ({"resident": None}, "resident of the graph"),
        ({"results": "z"}, "results of the graph"),
        ({"name": 3}, "name of the graph must be text"),
    ],
)
def test_plain_data_of_another_form_is_refused(changes: dict, message: str) -> None:
    with refuse(message):
        Graph.from_dict(CHAIN.to_dict() | changes)


@pytest.mark.parametrize("data", [None, 3, [], "graph"])
def test_data_that_is_not_an_object_is_refused(data: object) -> None:
    with refuse("a graph must be a JSON object"):
        Graph.from_dict(data)
