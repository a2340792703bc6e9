"""Capture a training step as a graph of operations, with storages, times and FLOPs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor as TorchTensor
from torch import fx, nn
from torch.optim import Optimizer

from scheduler.graph import Graph
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.device_memory import NOTHING_BESIDE, DeviceMemory, read_device_memory
from scheduler.pytorch.capture.exporting import export_graph, export_joint
from scheduler.pytorch.capture.lowering import lower
from scheduler.pytorch.costs.operators import Costs, with_costs


def trace(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., TorchTensor] | None = None,
    costs: Costs = "measured",
    workspaces: bool | None = None,
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    accumulate_gradients: bool = False,
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
        Measured: on this machine, in seconds; this takes a few seconds. FLOPs: the same on
        every machine, moved bytes only break ties.
    workspaces : bool, optional
        Whether to measure what operators allocate inside themselves, so that the peak, and
        with it the budget, is the allocator's; without, it is that of live storages. By
        default if costs are measured.
    reserve : int or str
        Bytes of the device that the step must leave to others: an int, or text such as "1GiB".
    optimizer : torch.optim.Optimizer, optional
        Its state counts as resident, also before its first step. What its step allocates
        meanwhile does not: that comes after the backward.
    accumulate_gradients : bool
        Whether the step adds to gradients that exist already (gradient accumulation). They
        count as resident; new ones are added to them in groups, and do not stay. Gradients of
        arguments stay results.

    Returns
    -------
    Graph
        Parameters, buffers and inputs are resident; outputs and gradients are results.

    Raises
    ------
    CaptureError
        If nothing requires a gradient or the model cannot be captured: says why, and what
        else to use.
    InvalidOptionError
        If `costs` is neither, or the size of the optimizer's state cannot be found.
    InvalidBudgetError
        If `reserve` cannot be understood.

    Examples
    --------
    >>> import torch
    >>> from torch import fx, nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> graph = trace(model, (torch.zeros(2, 4),), loss=lambda y: y.sum(), costs="flops")
    >>> graph.resident_bytes == 4 * (4 * 8 + 8 + 8 + 1 + 2 * 4)
    True
    """
    memory = read_device_memory(model, reserve, optimizer, accumulate_gradients)
    return capture(model, args, kwargs, loss, costs=costs, workspaces=workspaces, memory=memory).graph


@contextlib.contextmanager
def _garbage_left() -> Iterator[None]:
    """Do not look for reference cycles: tracing makes many objects that stay, and each search goes through all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_garbage_left()
def capture(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    loss: Callable[..., TorchTensor] | None = None,
    *,
    costs: Costs = "flops",
    workspaces: bool | None = None,
    memory: DeviceMemory = NOTHING_BESIDE,
) -> Capture:
    """Return the captured step of a model, which `trace` returns the graph of.

    Parameters
    ----------
    model, args, kwargs, loss, costs, workspaces
        As for `trace`. Times play no part in executing a plan.
    memory : DeviceMemory
        What stands beside the step.

    Raises
    ------
    CaptureError, InvalidOptionError
        As `trace`.
    """
    joint = export_joint(model, tuple(args), dict(kwargs or {}), loss)
    lowered = lower(joint, memory, name=type(model).__name__)
    return Capture(joint, with_costs(lowered, costs, workspaces=workspaces))


@_garbage_left()
def capture_graph(
    module: fx.GraphModule, args: Sequence[object], *, costs: Costs, memory: DeviceMemory = NOTHING_BESIDE
) -> Capture:
    """Return the captured step of a graph that TorchDynamo made.

    Parameters
    ----------
    module : GraphModule
        Takes parameters and buffers as arguments.
    args
        Its arguments.
    costs, memory
        As for `capture`.

    Raises
    ------
    CaptureError
        If the graph cannot be planned: says why.
    """
    joint = export_graph(module, args)
    return Capture(joint, with_costs(lower(joint, memory, name="compiled"), costs))
