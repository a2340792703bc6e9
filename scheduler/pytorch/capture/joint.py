"""The joint graph: forward, loss and backward of a module as one fx graph of ATen operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor, fx

from scheduler.pytorch.capture.arguments import Signature
from scheduler.pytorch.torch_private import pytree

SourceKind = Literal["parameter", "buffer", "constant", "input"]
Route = Literal["direct", "dynamo"]

TENSOR = "<tensor>"
"""Placeholder for a tensor among the leaves of the outputs."""


@dataclass(frozen=True)
class Source:
    """Where a resident tensor comes from when the step runs.

    Attributes
    ----------
    kind : "parameter", "buffer", "constant" or "input"
        A constant is a tensor attribute of a module that is neither parameter nor buffer, a
        tensor that forward or the loss finds in closures, globals, containers or objects, or
        one that forward creates from numbers.
    names : tuple of str
        Qualified names of all attributes that hold it; for an input its path in the arguments.
    paths : tuple of str
        The same names seen from the pair of model (`module`) and loss (`loss`).
    position : int
        For an input its position among the distinct tensors in the arguments, else -1.
    reads : tuple of callable
        Find the tensor in places other than the registered names; all must find the same one.
    """

    kind: SourceKind
    names: tuple[str, ...]
    paths: tuple[str, ...] = ()
    position: int = -1
    reads: tuple[Callable[[], Tensor], ...] = ()


class Condition(Protocol):
    """What the code of a step found out about the values of its arguments."""

    def difference(self, inputs: Sequence[Tensor]) -> str:
        """Return how the distinct tensors of a call differ from those of the captured one, "" if they do not."""


@dataclass(frozen=True)
class Joint:
    """A joint graph and the meaning of its inputs and outputs.

    Attributes
    ----------
    module : GraphModule
        Nodes are placeholders, calls of ATen overloads, getitems, and one output.
    sources : dict of Node to Source
        Placeholders of resident tensors.
    tangents : dict of Node to int
        Placeholders of incoming gradients, with the output that each belongs to.
    outputs : tuple of Node
        The tensors among the module's outputs.
    output_spec, output_leaves
        Structure of the outputs, and their leaves with `TENSOR` for each tensor.
    mutations : tuple of (Node, Node)
        Placeholder of a tensor that is changed in place, and its new value.
    gradients : tuple of (Node, Node)
        Placeholder of a tensor that requires a gradient, and the gradient.
    signature : Signature
        The structure of the arguments.
    route : "direct" or "dynamo"
        "dynamo" if TorchDynamo captured the module first.
    functional : bool
        Whether calls must stay as they are: none writes over its input, updates running
        statistics, or draws random numbers a second time.
    as_eager : bool
        Whether calls of the backward write over an input only where eager PyTorch does: its peak
        is then that of the save-everything schedule.
    counters : tuple of str
        Qualified names of attributes that forward changes and that have no effect.
    conditions : tuple of Condition
        On the values of arguments: the step is that of calls for which they hold.
    """

    module: fx.GraphModule
    sources: dict[fx.Node, Source]
    tangents: dict[fx.Node, int]
    outputs: tuple[fx.Node, ...]
    output_spec: pytree.TreeSpec
    output_leaves: tuple[object, ...]
    mutations: tuple[tuple[fx.Node, fx.Node], ...]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]
    signature: Signature
    route: Route
    functional: bool = False
    as_eager: bool = False
    counters: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
