"""Layers and chains: what is refused at birth, and the graph that they lower to."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given, settings

import scheduler as sc
from scheduler.errors import InvalidGraphError, InvalidScheduleError
from scheduler.graph.layers import Mode
from tests.support.examples import examples
from tests.support.strategies import chains
from tests.support.training_graphs import three_layers


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", True])
@pytest.mark.parametrize("field", ["forward_time", "backward_time", "forward_without_saving_time"])
def test_a_time_out_of_range_is_refused_with_its_layer(field: str, value: object) -> None:
    with pytest.raises(InvalidGraphError, match=f'{field} of layer "mlp"'):
        replace(sc.Layer("mlp", 1.0, 2.0, 4, 4), **{field: value})


@pytest.mark.parametrize("value", [-1, 1.5, math.nan, math.inf, "1", True])
@pytest.mark.parametrize(
    "field",
    [
        "output_bytes",
        "saved_bytes",
        "gradient_bytes",
        "parameter_bytes",
        "parameter_gradient_bytes",
        "forward_without_saving_workspace_bytes",
        "forward_with_saving_workspace_bytes",
        "backward_workspace_bytes",
    ],
)
def test_a_byte_count_out_of_range_is_refused_with_its_layer(field: str, value: object) -> None:
    with pytest.raises(InvalidGraphError, match=f'{field} of layer "mlp"'):
        replace(sc.Layer("mlp", 1.0, 2.0, 4, 4), **{field: value})


def test_a_mode_with_a_negative_time_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match="backward_time of a mode"):
        Mode(1.0, -1.0, 4)


def test_modes_of_another_type_are_refused_with_their_layer() -> None:
    with pytest.raises(InvalidGraphError, match='modes of layer "mlp" must be Mode values, got dict'):
        sc.Layer("mlp", 1.0, 2.0, 4, 4, modes=[{"forward_time": 1.0}])


def test_a_flag_that_is_not_a_bool_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match='keeps_input of layer "mlp" must be a bool, got 1'):
        sc.Layer("mlp", 1.0, 2.0, 4, 4, keeps_input=1)


def test_an_empty_chain_is_refused() -> None:
    with pytest.raises(InvalidGraphError, match="at least one layer"):
        sc.Chain([], input_bytes=4)


def test_two_layers_of_one_name_are_refused() -> None:
    layer = sc.Layer("mlp", 1.0, 2.0, 4, 4)
    with pytest.raises(InvalidGraphError, match='two layers are called "mlp"'):
        sc.Chain([layer, layer], input_bytes=4)


@pytest.mark.parametrize("value", [-1, 0.5, None])
def test_an_input_that_is_not_a_byte_count_is_refused(value: object) -> None:
    with pytest.raises(InvalidGraphError, match="input_bytes of the chain"):
        sc.Chain([sc.Layer("mlp", 1.0, 2.0, 4, 4)], input_bytes=value)


def test_the_gradient_is_as_large_as_the_output_unless_said_otherwise() -> None:
    assert sc.Layer("mlp", 1.0, 2.0, 4, 8).gradient_bytes == 4
    assert sc.Layer("embedding", 1.0, 2.0, 4, 8, gradient_bytes=0).gradient_bytes == 0


def test_the_forward_without_saving_takes_as_long_as_with_it_unless_said_otherwise() -> None:
    assert sc.Layer("mlp", 3.0, 2.0, 4, 8).forward_without_saving_time == 3.0
    assert sc.Layer("mlp", 3.0, 2.0, 4, 8, forward_without_saving_time=2.5).forward_without_saving_time == 2.5


def test_layers_and_chains_are_frozen_values() -> None:
    chain = three_layers()
    assert chain == three_layers()
    assert hash(chain) == hash(three_layers())
    with pytest.raises(FrozenInstanceError):
        chain.input_bytes = 3
    with pytest.raises(FrozenInstanceError):
        chain.layers[0].forward_time = 3


def test_a_chain_has_per_layer_a_forward_without_saving_and_a_pair_per_mode() -> None:
    layers = [
        sc.Layer("a", 1.0, 2.0, 4, 8, modes=[Mode(1.5, 2.5, 6)]),
        sc.Layer("b", 3.0, 4.0, 5, 9, keeps_input=False, keeps_output=True, parameter_bytes=7),
    ]
    graph = sc.Chain(layers, input_bytes=3, input_needs_gradient=True).graph
    expected = {
        "a.forward": (["input"], ["a.output", "a.saved", "a.kept_input"]),
        "a.forward[1]": (["input"], ["a.output", "a.saved[1]", "a.kept_input[1]"]),
        "a.forward_without_saving": (["input"], ["a.output"]),
        "b.forward": (["a.output", "b.parameters"], ["b.output", "b.saved", "b.kept_output"]),
        "b.forward_without_saving": (["a.output", "b.parameters"], ["b.output"]),
        "loss": (["b.output"], ["loss"]),
        "loss_backward": (["b.output"], ["b.gradient"]),
        "b.backward": (
            ["b.gradient", "b.saved", "b.kept_output", "b.parameters"],
            ["a.gradient", "b.parameter_gradient"],
        ),
        "a.backward": (["a.gradient", "a.saved", "a.kept_input"], ["input_gradient", "a.parameter_gradient"]),
        "a.backward[1]": (["a.gradient", "a.saved[1]", "a.kept_input[1]"], ["input_gradient", "a.parameter_gradient"]),
    }
    assert {op.name: (list(op.inputs), list(op.outputs)) for op in graph.operations} == expected
    assert set(graph.resident) == {"input", "b.parameters"}
    assert set(graph.results) == {"loss", "input_gradient", "a.parameter_gradient", "b.parameter_gradient"}
    assert graph.operation("a.forward[1]").time == 1.5
    assert graph.tensor("a.kept_input").storage == "input"
    assert graph.tensor("b.kept_output").storage == "b.output"


def test_a_lowered_layer_cannot_keep_what_it_saved_and_have_its_input_built_again() -> None:
    # "l1" has saved and keeps its input. Dropping the name of that input frees nothing, for
    # autograd holds the instance; making it again is a second instance that its backward
    # does not read.
    graph = three_layers().graph
    begin = ["+l0.forward", "+l1.forward", "-l0.output"]
    memory = sc.simulate(
        replace(graph, results=(), required=()), sc.Schedule.from_lines([*begin, "+l0.forward_without_saving"])
    ).memory
    # input 2; l0: output 2, saved 1; l1: output 2, saved 1; then a second output of l0.
    assert memory.tolist() == [2 + 3, 2 + 6, 2 + 6, 2 + 6 + 2]
    end = ["+l2.forward", "+loss", "+loss_backward", "+l2.backward", "+l0.forward_without_saving", "+l1.backward"]
    with pytest.raises(InvalidScheduleError, match=r'"l1\.backward" reads "l1\.kept_input", which is not live'):
        sc.simulate(graph, sc.Schedule.from_lines([*begin, "-l1.kept_input", *end]))


def test_saving_everything_in_the_worked_case_takes_what_is_counted_by_hand() -> None:
    # At the loss: input 2, three outputs 6, saved 3, gradient 2 = 13; then l2 backward: input
    # 2, outputs 6 (the last one kept), saved 3, gradients 4 = 15. Time 3 x 1 + 3 x 2.
    solution = sc.solve(three_layers(), 10**6, solver="save-all")
    assert (solution.time, solution.peak_bytes) == (9.0, 15)


@settings(max_examples=examples(50))
@given(chain=chains())
def test_a_chain_survives_being_written_and_read(chain: sc.Chain) -> None:
    again = sc.Chain.from_dict(json.loads(json.dumps(chain.to_dict())))
    assert again == chain
    assert again.graph == chain.graph


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 3}, "version 3"),
        ({"version": 1}, "version 1 are no longer read.* again with"),
        ({"format": "scheduler-graph"}, "scheduler-graph"),
        ({"color": 1}, "color"),
        ({"layers": {}}, "JSON list"),
        ({"layers": [{"name": "mlp"}]}, "lacks a field"),
        ({"layers": [3]}, "JSON object"),
    ],
)
def test_chain_data_of_another_form_is_refused(change: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidGraphError, match=why):
        sc.Chain.from_dict({**three_layers().to_dict(), **change})


def test_a_chain_is_shown_in_one_line_and_summarized() -> None:
    layer = sc.Layer("a", 1.0, 2.0, 8, 16, parameter_bytes=100, modes=[Mode(1.5, 1.5, 4)])
    chain = sc.Chain([layer], input_bytes=4, name="one")
    assert repr(chain) == "Chain('one', 1 layers, 104 B resident)"
    assert chain.summary().splitlines() == [
        "chain     one",
        "layers    1, 1 further modes",
        "resident  104 B",
        "outputs   8 B",
        "saved     16 B if nothing is recomputed",
        "time      1 s forward, 2 s backward",
    ]
