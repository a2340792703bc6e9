"""Check what corresponds in parts of a graph that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.solvers.anneal import repeats
from scheduler.solvers.anneal.repeats import NONE, Repeats
from tests.support.examples import examples
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import conv_net


def images(graph: sc.Graph) -> list[dict[str, str]]:
    """The images by name."""
    names = [operation.name for operation in graph.operations]
    return [
        {names[one]: names[other] for one, other in enumerate(image.tolist()) if other != NONE}
        for image in Repeats(graph).images
    ]


def test_each_block_corresponds_to_the_next_one_in_the_forward_and_in_the_backward() -> None:
    """But the first block's input is resident, so that what reads it is not like what reads others."""
    (found,) = images(conv_net(6))
    kinds = [f"{kind}{{}}{phase}" for kind in ("conv", "norm", "relu", "add") for phase in ("", "_backward")]
    expected = {kind.format(i): kind.format(i + 1) for kind in kinds for i in range(1, 5)}
    assert expected.items() <= found.items()
    assert {"norm0": "norm1", "relu0": "relu1"}.items() <= found.items()
    assert not {"conv0", "conv0_backward", "add5", "loss"} & found.keys()


def test_layers_and_steps_are_two_ways_to_repeat() -> None:
    """Layers of 8 steps are at a distance of 16 operations, a multiple of the 2 of a step."""
    found = images(recurrent_net(4, 8))
    assert [each["state1,3"] for each in found] == ["state1,4", "state2,3"]
    assert [each["back1,3"] for each in found] == ["back1,4", "back2,3"]


def recurrent_net(layers: int, steps: int) -> sc.Graph:
    """Layers with states: a step projects what the layer below has in that step, and adds it to the state before."""
    tensors, forward, backward = [sc.Tensor("loss", 1)], [], []
    for layer in range(layers):
        for step in range(steps):
            here, before, below = f"{layer},{step}", f"{layer},{step - 1}", f"{layer - 1},{step}"
            tensors += [sc.Tensor(f"{kind}{here}", 4 if kind == "p" else 2) for kind in "psg"]
            forward.append(sc.Operation(f"project{here}", [f"s{below}"] if layer else [], [f"p{here}"], 1.0))
            state = [f"p{here}", *([f"s{before}"] if step else [])]
            forward.append(sc.Operation(f"state{here}", state, [f"s{here}"], 1.0))
            gradients = [f"g{layer + 1},{step}"] * (layer + 1 < layers) + [f"g{layer},{step + 1}"] * (step + 1 < steps)
            read = [*state, *(gradients or ["loss"])]
            backward.append(sc.Operation(f"back{here}", read, [f"g{here}"], 2.0, phase="backward"))
    forward.append(sc.Operation("loss", [f"s{layers - 1},{steps - 1}"], ["loss"], 1.0))
    return sc.Graph([*forward, *reversed(backward)], tensors, results=["g0,0"])


def sizes(graph: sc.Graph, names: Sequence[str]) -> list[int]:
    """Bytes of the storages of different tensors; those of resident ones take nothing more."""
    held = {graph.tensor(name).storage for name in graph.resident}
    storages = [graph.tensor(name).storage for name in dict.fromkeys(names)]
    return [
        max(tensor.size_bytes for tensor in graph.tensors if tensor.storage == storage) if storage not in held else 0
        for storage in storages
    ]


@settings(max_examples=examples(100))
@given(graph=st.one_of(st.just(conv_net(4)), st.just(recurrent_net(3, 4)), graphs(), joint_graphs()))
def test_images_look_like_what_they_are_images_of(graph: sc.Graph) -> None:
    with patch.object(repeats, "LEAST_STRETCH", 1):  # small graphs have no long ones
        found = Repeats(graph)
    for image in found.images:
        has = np.flatnonzero(image != NONE)
        assert len(set(image[has].tolist())) == len(has)
        for one, other in zip(has.tolist(), image[has].tolist(), strict=True):
            assert one != other
            first, second = graph.operations[one], graph.operations[other]
            assert (first.phase, first.repeatable) == (second.phase, second.repeatable)
            assert sizes(graph, first.inputs) == sizes(graph, second.inputs)
            assert sizes(graph, first.outputs) == sizes(graph, second.outputs)
