"""Capture a training step as a graph of operations with storages and times."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor as TorchTensor
from torch import fx, nn
from torch.optim import Optimizer

from scheduler.devices import Device
from scheduler.errors import CaptureError
from scheduler.graph import Graph
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.device_memory import NO_OTHER_MEMORY, DeviceMemory, read_device_memory
from scheduler.pytorch.capture.exporting import export_graph, export_joint
from scheduler.pytorch.capture.exporting.device_kernels import kernels_of
from scheduler.pytorch.capture.exporting.eager_kernels import masks_of_eager
from scheduler.pytorch.capture.instructions import Lowered
from scheduler.pytorch.capture.joint import Joint
from scheduler.pytorch.capture.lowering import lower
from scheduler.pytorch.capture.lowering.storages import StorageSizes
from scheduler.pytorch.costs.operators import Costs, with_costs
from scheduler.pytorch.costs.progress import Progress, TracingProgress, ignore
from scheduler.pytorch.costs.storages import can_run_on, find_storage_sizes
from scheduler.pytorch.guards.environment import recorded_variables
from scheduler.pytorch.guards.watch import Watch
from scheduler.pytorch.measurement.memory import resident_tensors


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
    progress: Progress | None = None,
) -> Graph:
    """Return the graph of one training step of a model: forward, loss and backward.

    Nothing is computed with the model's weights, and the model is left as it was. The model's
    `training` flags decide whether dropout and batch norm are in training mode. Where an output
    could hold more memory than its shape shows (a reduced `mse_loss` does), the call is run
    once, on data of its own.

    A model built under `torch.device("meta")` or `FakeTensorMode`, with arguments of the same
    kind, has the graph of the real one: what is on device "meta" is captured as if it was on the
    CPU. Unless `workspaces` is True, no call of it is run: times are estimated from FLOPs and
    bytes, and there are no workspaces. A plan made so trains the real model.

    Parameters
    ----------
    model : nn.Module
    args, kwargs
        The arguments of one call. Another batch of the same shapes gives the same graph, unless
        the code branches on its values.
    loss : callable, optional
        Computes the scalar loss from the model's outputs. Without it, the graph includes the
        outputs and their incoming gradients, but not what the caller computes from them.
    costs : "measured", "measured-again", "flops" or Device
        The cost model of operations. "measured": times on this machine in seconds. Measuring
        takes a few seconds; what is known from an earlier trace, of any model, is taken from a
        file that `scheduler doctor` names, unless it is measured again. "flops": the same on
        every machine; operators that multiply cost their FLOPs, and for all others moved bytes
        only break ties, which is not the time that they take. A device (`scheduler.device("h100-80gb")`,
        say) that need not be there: times are estimated by a roofline, attention is the kernel
        that torch runs on that device, operations keep their inputs as in eager PyTorch, and the
        graph's `assumptions` say what this rests on.
        Regions of `torch.autocast("cuda")` in the model or the loss have their effect; one around
        the call must be `torch.autocast("cpu")`, and casts as on the device.
    workspaces : bool, optional
        Whether to measure the memory that operators allocate internally. With it, the peak,
        and so the budget, is the allocator's; without it, that of live storages. By default
        True if costs are measured.
    reserve : int or str
        Bytes of the device that the step must leave free: an int, or text such as "1GiB".
    optimizer : torch.optim.Optimizer, optional
        Its state counts as resident, also before its first step. What its step allocates
        temporarily does not count, because it runs after the backward.
    accumulate_gradients : bool
        Whether the step adds to existing gradients (gradient accumulation). These count as
        resident; new gradients are added to them in groups and then freed. Gradients of
        arguments remain results.
    progress : callable, optional
        Called with a `TracingProgress` at each stage, and often while operations are measured.

    Returns
    -------
    Graph
        Parameters, buffers and inputs are resident; outputs and gradients are results.

    Raises
    ------
    CaptureError
        If nothing requires a gradient or the model cannot be captured; the message says why
        and what to use instead.
    InvalidOptionError
        If `costs` is unknown, is a device of unknown speed, or the size of the optimizer's state cannot be determined.
    InvalidBudgetError
        If `reserve` cannot be parsed.

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
    elsewhere = costs if isinstance(costs, Device) and costs.platform != "cpu" else None
    with kernels_of(elsewhere):
        captured = capture(
            model,
            args,
            kwargs,
            loss,
            costs=costs,
            workspaces=workspaces,
            memory=memory,
            as_eager=elsewhere is not None,
            progress=progress or ignore,
        )
    return captured.graph


def trace_eager(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., TorchTensor] | None = None,
    costs: Costs = "measured",
    workspaces: bool | None = None,
) -> Graph:
    """Return the graph of a training step as eager PyTorch runs it on the CPU, which no plan can follow.

    Its save-everything schedule has the peak of the plain step: dropout keeps a mask in the dtype
    of its input, and operators of the backward keep their inputs, where a plan writes over them.

    Parameters
    ----------
    model, args, kwargs, loss, costs, workspaces
        As for `trace`.

    Raises
    ------
    CaptureError, InvalidOptionError
        As for `trace`.
    """
    with masks_of_eager():
        return capture(model, args, kwargs, loss, costs=costs, workspaces=workspaces, as_eager=True).graph


def capture(
    model: nn.Module,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    loss: Callable[..., TorchTensor] | None = None,
    *,
    costs: Costs = "flops",
    workspaces: bool | None = None,
    memory: DeviceMemory = NO_OTHER_MEMORY,
    as_eager: bool = False,
    progress: Progress = ignore,
) -> Capture:
    """Return the captured step of a model; `trace` returns its graph.

    Parameters
    ----------
    model, args, kwargs, loss, costs, workspaces, progress
        As for `trace`. Times do not affect how a plan is executed.
    memory : DeviceMemory
        The memory that the device holds in addition to the step.
    as_eager : bool
        As of `Joint`; a plan is executed by a capture without it.

    Raises
    ------
    CaptureError, InvalidOptionError
        As for `trace`.
    """
    with _collector_disabled():
        progress(TracingProgress("capturing the step"))
        joint = replace(export_joint(model, tuple(args), dict(kwargs or {}), loss), as_eager=as_eager)
        return capture_at(
            model, joint, args, kwargs or {}, costs=costs, workspaces=workspaces, memory=memory, progress=progress
        )


def capture_at(
    model: nn.Module,
    joint: Joint,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    costs: Costs,
    workspaces: bool | None = None,
    memory: DeviceMemory,
    like: Lowered | None = None,
    progress: Progress = ignore,
) -> Capture:
    """Return the captured step of a model whose joint graph is known.

    Parameters
    ----------
    model : nn.Module
    joint : Joint
        Of this model for these arguments.
    args, kwargs, costs, workspaces, memory, progress
        As for `capture`.
    like : Lowered, optional
        As for `with_costs`.
    """
    progress(TracingProgress("asking what the outputs of calls hold"))
    may_run = not isinstance(costs, Device) and (
        bool(workspaces) or can_run_on(resident_tensors(model, (args, kwargs)))
    )
    sizes = find_storage_sizes(joint, may_run=may_run)
    return capture_joint(
        joint,
        type(model).__name__,
        costs=costs,
        memory=memory,
        workspaces=workspaces,
        sizes=sizes,
        may_run=may_run,
        like=like,
        progress=progress,
    )


def capture_watched(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    loss: Callable[..., TorchTensor] | None,
    *,
    costs: Costs,
    memory: DeviceMemory,
    progress: Progress = ignore,
) -> tuple[Capture, Watch]:
    """Return the captured step of a model, and the watch on what it read from Python.

    Parameters
    ----------
    model, args, kwargs, loss, costs, memory, progress
        As for `capture`.

    Raises
    ------
    CaptureError, InvalidOptionError
        As for `trace`; and if forward or the loss changes a value that it reads.
    """
    found = ""
    for _ in range(2):  # what is filled once, such as a cache, differs after the first capture only
        watch = Watch(model, loss)
        with recorded_variables() as variables:
            captured = capture(model, args, kwargs, loss, costs=costs, memory=memory, progress=progress)
        watch.ignore(captured.joint.counters)
        watch.environment.add(variables)
        found = watch.difference()
        if not found:
            return captured, watch
    raise CaptureError(
        f"forward or the loss changes a value that it reads, so each step would be another one: {found}. Change it"
        " in the training loop, or pass it as an argument; a number that changes at every step may be a tensor"
    )


def capture_graph(
    module: fx.GraphModule, args: Sequence[object], *, costs: Costs, memory: DeviceMemory = NO_OTHER_MEMORY
) -> Capture:
    """Return the captured step of a graph that TorchDynamo captured.

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
        If the graph cannot be planned; the message says why.
    """
    with _collector_disabled():
        joint = export_graph(module, args)
        sizes = find_storage_sizes(joint, may_run=can_run_on(args))
        return capture_joint(joint, "compiled", costs=costs, memory=memory, sizes=sizes)


def capture_joint(
    joint: Joint,
    name: str,
    *,
    costs: Costs,
    memory: DeviceMemory,
    workspaces: bool | None = None,
    sizes: StorageSizes | None = None,
    may_run: bool = True,
    like: Lowered | None = None,
    progress: Progress = ignore,
) -> Capture:
    """Return the captured step of a joint graph.

    Parameters
    ----------
    joint : Joint
    name : str
        Name of the graph to plan.
    costs, memory, workspaces, progress
        As for `capture`.
    sizes : StorageSizes, optional
        What its storages hold at run time; by default what the fake tensors show.
    may_run, like
        As for `with_costs`.

    Raises
    ------
    CaptureError, InvalidOptionError
        As for `trace`.
    """
    lowered = lower(joint, memory, sizes or StorageSizes(), name=name)
    lowered = with_costs(lowered, costs, workspaces=workspaces, may_run=may_run, like=like, progress=progress)
    return Capture(joint, lowered)


@contextlib.contextmanager
def _collector_disabled() -> Iterator[None]:
    """Disable the collector of reference cycles: tracing creates many objects, and each collection visits all."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
