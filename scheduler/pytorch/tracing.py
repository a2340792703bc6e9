"""Capture a training step as a graph of operations, with storages, times and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor as TorchTensor
from torch import fx, nn

from scheduler.graph import Graph
from scheduler.pytorch.costs import Costs, time_function
from scheduler.pytorch.joint import Joint, Signature, export_joint
from scheduler.pytorch.lowering import Instruction, Lowered, lower
from scheduler.pytorch.operators import is_getitem


@dataclass(frozen=True)
class Capture:
    """A captured training step: the graph to plan, and what each of its operations runs.

    Attributes
    ----------
    graph : Graph
        Its results are the outputs, the gradients of what is trainable, and incoming
        gradients as small as a number.
    joint : Joint
        The joint fx graph behind it.
    lowered : Lowered
        Instruction of each operation, node of each resident tensor.
    """

    joint: Joint
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        """The graph to plan."""
        return self.lowered.graph

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """What each operation runs, in the order of the graph's operations."""
        return self.lowered.instructions

    @property
    def signature(self) -> Signature:
        """The structure of the arguments."""
        return self.joint.signature


def trace(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., TorchTensor] | None = None,
    costs: Costs = "measured",
) -> Graph:
    """Return the graph of one training step of a model: forward, loss and backward.

    Nothing is computed with the model's weights, and the model is left as it was. Whether
    dropout and batch norm train is as the model's `training` flags say.

    Parameters
    ----------
    model : nn.Module
    args, kwargs
        The arguments of one call. Another batch of the same shapes gives the same graph.
    loss : callable, optional
        Makes the scalar loss of the model's outputs. Without it the outputs and their
        incoming gradients are part of the graph; what the caller makes of them is not.
    costs : "measured" or "flops"
        Times in seconds, measured on this machine, or FLOPs with what moving bytes is worth.

    Returns
    -------
    Graph
        Parameters, buffers and inputs are resident; outputs and gradients are results.

    Raises
    ------
    CaptureError
        If nothing requires a gradient or the model cannot be captured: says why, and what
        else to use.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> graph = trace(model, (torch.zeros(2, 4),), loss=lambda y: y.sum(), costs="flops")
    >>> graph.resident_bytes == 4 * (4 * 8 + 8 + 8 + 1 + 2 * 4)
    True
    """
    return capture(model, args, kwargs, loss, costs=costs).graph


def capture(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    loss: Callable[..., TorchTensor] | None = None,
    *,
    costs: Costs = "flops",
) -> Capture:
    """Return the captured step of a model, which `trace` returns the graph of.

    Parameters
    ----------
    model, args, kwargs, loss, costs
        As for `trace`. Times play no part in executing a plan.

    Raises
    ------
    CaptureError
        As `trace`.
    """
    joint = export_joint(model, tuple(args), dict(kwargs or {}), loss)
    calls: list[fx.Node] = [
        node for node in joint.module.graph.nodes if node.op == "call_function" and not is_getitem(node)
    ]
    time_of, unit = time_function(costs, calls)
    return Capture(joint, lower(joint, time_of, time_unit=unit, name=type(model).__name__))
