"""The instructions that the operations of a captured step run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from scheduler.graph import Graph
from scheduler.pytorch.capture.operators import BatchNorm
from scheduler.pytorch.torch_private.operators import OpOverload


@dataclass(frozen=True)
class Ref:
    """A reference to a tensor of the graph, among the arguments of a call."""

    tensor: str


@dataclass(frozen=True)
class Call:
    """Run an ATen operator.

    Attributes
    ----------
    node : Node
    target : OpOverload
    args, kwargs
        Arguments with a `Ref` in place of each tensor.
    outputs : tuple of str or None
        The tensor of each output; None for an output that is not a tensor.
    has_several : bool
        Whether the operator returns a tuple.
    state : str or None
        Tensor with the generator's state, if the operator is random.
    generator : torch.Generator or None
        That generator: the default one of the device, or one of the user's.
    batch_norm : BatchNorm or None
        If set, the first run updates running statistics in place and later runs do not.
    """

    node: fx.Node
    target: OpOverload
    args: tuple[object, ...]
    kwargs: dict[str, object]
    outputs: tuple[str | None, ...]
    has_several: bool
    state: str | None = None
    generator: torch.Generator | None = None
    batch_norm: BatchNorm | None = None


@dataclass(frozen=True)
class SaveState:
    """Save the state of a generator: the default one of a device, or one of the user's."""

    tensor: str
    generator: torch.Generator


@dataclass(frozen=True)
class Snapshot:
    """Copy the old value of a resident tensor that will change."""

    source: str
    tensor: str


@dataclass(frozen=True)
class Update:
    """Write a new value into a resident tensor."""

    target: str
    value: str


@dataclass(frozen=True)
class Return:
    """Hand outputs to the caller.

    Attributes
    ----------
    values, results : tuple of str
        The tensors, and the tensors that the caller holds on their storages.
    """

    values: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Tangents:
    """Receive the gradients of outputs.

    Attributes
    ----------
    outputs : tuple of int
        The output that each gradient belongs to.
    tensors : tuple of str
    strides : tuple of tuple of int
        The strides that the backward expects.
    """

    outputs: tuple[int, ...]
    tensors: tuple[str, ...]
    strides: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Accumulate:
    """Hand gradients to autograd, which adds them to existing ones.

    Attributes
    ----------
    gradients : tuple of int
        Positions among the gradients of the joint graph.
    """

    gradients: tuple[int, ...]


Instruction = Call | SaveState | Snapshot | Update | Return | Tangents | Accumulate


@dataclass(frozen=True)
class Lowered:
    """A graph with the instruction of each operation and the node of each resident tensor.

    Attributes
    ----------
    graph : Graph
    instructions : tuple of Instruction
        One per operation of the graph, in its order.
    resident : dict of str to Node
        Placeholder of each resident tensor.
    output_tensors, gradient_tensors : tuple of str
        The tensor of each output and of each gradient, in the order of the joint graph.
    """

    graph: Graph
    instructions: tuple[Instruction, ...]
    resident: dict[str, fx.Node]
    output_tensors: tuple[str, ...]
    gradient_tensors: tuple[str, ...]
