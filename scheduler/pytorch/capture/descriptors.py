"""The meaning of a joint graph's inputs and outputs, from the descriptors that AOTAutograd attaches to them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import fx

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.joint import Source
from scheduler.pytorch.torch_private.aot import (
    AOTOutput,
    DifferentiableAOTInput,
    GradAOTOutput,
    TangentAOTInput,
)


@dataclass(frozen=True)
class DescribedGraph:
    """The nodes of a joint graph by their meaning.

    Attributes
    ----------
    inputs : dict of Node to DifferentiableAOTInput
        Placeholders of parameters, buffers and arguments.
    tangents : dict of Node to TangentAOTInput
        Placeholders of incoming gradients.
    constants : dict of Node to Source
        Attributes of the graph module: tensors that forward creates from numbers.
    outputs : tuple of (Node or None, AOTOutput or None)
        All other outputs in their order: those of the forward, new values of changed inputs
        included, and (None, None) for an input that gets no gradient.
    gradients : tuple of (Node, Node)
        Placeholder of a tensor that requires a gradient, and the gradient.
    """

    inputs: dict[fx.Node, DifferentiableAOTInput]
    tangents: dict[fx.Node, TangentAOTInput]
    constants: dict[fx.Node, Source]
    outputs: tuple[tuple[fx.Node | None, AOTOutput | None], ...]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]

    def placeholder(self, description: object) -> fx.Node:
        """Return the placeholder of an input."""
        return next(node for node, found in self.inputs.items() if found == description)


def read_descriptors(module: fx.GraphModule) -> DescribedGraph:
    """Read the descriptors of a joint graph.

    Raises
    ------
    CaptureError
        If an input has no gradient by its kind, such as an effect token.
    """
    inputs: dict[fx.Node, DifferentiableAOTInput] = {}
    tangents: dict[fx.Node, TangentAOTInput] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        description = node.meta.get("desc")
        if isinstance(description, TangentAOTInput):
            tangents[node] = description
        elif isinstance(description, DifferentiableAOTInput):
            inputs[node] = description
        else:
            raise CaptureError(f"the captured graph has an input that cannot be planned: {node.name} ({description})")
    by_descriptor = {description: node for node, description in inputs.items()}
    (returned,) = module.graph.find_nodes(op="output")
    outputs: list[tuple[fx.Node | None, AOTOutput | None]] = []
    gradients: list[tuple[fx.Node, fx.Node]] = []
    for value, description in zip(returned.args[0], returned.meta["desc"], strict=True):
        if not isinstance(description, GradAOTOutput):
            outputs.append((value, description))
        elif value is not None:
            gradients.append((by_descriptor[description.grad_of], value))
    return DescribedGraph(inputs, tangents, _constants(module), tuple(outputs), tuple(gradients))


def _constants(module: fx.GraphModule) -> dict[fx.Node, Source]:
    found = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        node.meta.setdefault("val", getattr(module, name))
        found[node] = Source("constant", (name,), reads=(functools.partial(getattr, module, name),))
    return found
