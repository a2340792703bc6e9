"""Out of memory, after the fact: what filled the memory, and what would have made room."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.devices import THIS_MACHINE, Device, Platform
from scheduler.errors import SchedulerError
from scheduler.graph import Graph
from scheduler.graph.operations import Role
from scheduler.planning.device_plans import find_plan
from scheduler.planning.fit_answers import Lever, lever_rows
from scheduler.planning.graph_variants import in_proportion, with_resident
from scheduler.planning.levers import (
    SHARDS,
    PlainStep,
    accumulation,
    handed_over_gradients,
    other_dtype,
    other_optimizer,
    ranked,
    recomputation,
    sharding,
)
from scheduler.pytorch.capture.device_memory import DeviceMemory, read_device_memory
from scheduler.pytorch.capture.exporting import export_joint
from scheduler.pytorch.capture.exporting.eager_kernels import masks_of_eager
from scheduler.pytorch.measurement.free_memory import free_bytes
from scheduler.pytorch.measurement.live_memory import (
    ACTIVATIONS,
    Failure,
    LiveMemory,
    activations_by_module,
    bytes_by_kind,
)
from scheduler.pytorch.measurement.optimizer_memory import LIGHT_OPTIMIZERS, optimizer_memory
from scheduler.pytorch.torch_private.autograd import modes_disabled
from scheduler.pytorch.torch_private.pytree import tree_leaves
from scheduler.pytorch.torch_private.tensors import FakeTensorMode
from scheduler.pytorch.tracing import capture_joint
from scheduler.solvers.deadline import Deadline
from scheduler.units import format_bytes, parse_bytes, text_table

_MODULES_SHOWN = 8
_OF_ANY_BATCH: tuple[Role, ...] = ("parameter", "buffer", "gradient", "optimizer state", "constant")


@dataclass(frozen=True)
class MemoryReport:
    """What filled the memory when a step ran out of it.

    Attributes
    ----------
    operator, module : str
        What asked for more, and the module that ran it; "" if that was outside of torch's operators.
    live_bytes : mapping of str to int
        Bytes by kind: parameters, gradients, optimizer state, inputs, activations, ...
    activation_bytes : mapping of str to int
        Bytes of the activations by the module that allocated them, the most first.
    cached_bytes : int
        What the allocator held beyond them, on CUDA.
    capacity_bytes : int
        What was there for the step, or on the CPU without a limit, what was live: the step had
        at least as much.
    peak_bytes : int or None
        Predicted peak of the tensors of the whole step without recomputation; None if it cannot be captured.
    levers : tuple of Lever
        Changes of the step that need less, with time in FLOPs. Those that suffice come first.
    note : str
        What is not predicted, and why; "" if all is.
    """

    operator: str
    module: str
    live_bytes: Mapping[str, int]
    activation_bytes: Mapping[str, int]
    cached_bytes: int
    capacity_bytes: int
    peak_bytes: int | None
    levers: tuple[Lever, ...]
    note: str = ""

    def summary(self) -> str:
        """Return what was live, and what suffices, as text."""
        where = f"{self.operator} in {self.module}" if self.operator else "outside of an operator"
        rows = [("ran out in", where), ("live", format_bytes(sum(self.live_bytes.values())))]
        for kind, size in self.live_bytes.items():
            rows.append((f"  {kind}", format_bytes(size)))
            if kind == ACTIVATIONS:
                rows += self._module_rows()
        if self.cached_bytes:
            rows.append(("cached", f"{format_bytes(self.cached_bytes)} that the allocator kept beyond it"))
        rows.append(("capacity", format_bytes(self.capacity_bytes)))
        rows.append(("the step needs", self._needed()))
        text = text_table(rows)
        if self.levers:
            header = ("change", "saves", "peak", "FLOPs", "suffices", "how")
            text += f"\n\nWhat each change saves and costs:\n{text_table([header, *lever_rows(self.levers)])}"
        return f"{text}\n- {self.note}" if self.note else text

    def _needed(self) -> str:
        if self.peak_bytes is None:
            return "unknown"
        return f"{format_bytes(self.peak_bytes)} for its tensors; workspaces come on top"

    def _module_rows(self) -> list[tuple[str, str]]:
        shown = [*self.activation_bytes.items()][:_MODULES_SHOWN]
        rest = sum(self.activation_bytes.values()) - sum(size for _, size in shown)
        rows = [(f"    {module}", format_bytes(size)) for module, size in shown]
        return [*rows, ("    other modules", format_bytes(rest))] if rest else rows


class ExplainedOutOfMemoryError(torch.OutOfMemoryError):
    """Out of memory, with what filled it.

    Attributes
    ----------
    report : MemoryReport
    """

    def __init__(self, message: str, report: MemoryReport) -> None:
        super().__init__(message)
        self.report = report


@contextlib.contextmanager
def explain_oom(
    model: nn.Module,
    *,
    optimizer: Optimizer | None = None,
    limit: int | str | None = None,
    time_limit: float = 20.0,
) -> Iterator[None]:
    """Explain torch.OutOfMemoryError in training steps of a model.

    The steps run as they are, but slower: each operator is watched, to know which module allocated
    what. When one runs out of memory, the error says what was live by kind and by module, and
    which changes of the step make it fit, for the shapes of the last call of the model:
    recomputation, smaller batches, bfloat16, another optimizer, gradients handed over in hooks, and
    shards on several devices. Nothing but the step itself is traced, so smaller batches and
    bfloat16 are estimated in proportion.

    Parameters
    ----------
    model : nn.Module
        Called in the steps.
    optimizer : torch.optim.Optimizer, optional
        Whose state is counted.
    limit : int or str, optional
        Bytes that the step may take, such as "8GiB"; by default, all of the CUDA device that
        other processes leave. On the CPU, what was live when the step failed.
    time_limit : float
        Seconds for the plan.

    Raises
    ------
    ExplainedOutOfMemoryError
        In place of a `torch.OutOfMemoryError`, which it is too; its `report` has the same as values.

    Examples
    --------
    >>> model = nn.Linear(1000, 1000)
    >>> with explain_oom(model):
    ...     model(torch.zeros(10, 1000)).sum().backward()
    """
    allowed = None if limit is None else parse_bytes(limit)
    watch = LiveMemory(model)
    try:
        with watch:
            yield
    except torch.OutOfMemoryError as error:
        failure = watch.failure or watch.now()
        watch.remove_hooks()
        with modes_disabled():
            report = _explain(model, optimizer, watch, failure, allowed, time_limit)
        raise ExplainedOutOfMemoryError(f"{error}\n\n{report.summary()}", report) from error
    finally:
        watch.remove_hooks()


def _explain(
    model: nn.Module,
    optimizer: Optimizer | None,
    watch: LiveMemory,
    failure: Failure,
    allowed: int | None,
    time_limit: float,
) -> MemoryReport:
    """Return the report of a failure."""
    trained: list[Tensor] = [*model.parameters()]
    kinds: dict[str, list[Tensor]] = {
        "parameters": trained,
        "buffers": [*model.buffers()],
        "gradients": [parameter.grad for parameter in trained if parameter.grad is not None],
        "optimizer state": _tensors(dict(optimizer.state) if optimizer else {}),
    }
    live = bytes_by_kind(failure, kinds)
    total, cached = sum(live.values()), 0
    device = trained[0].device if trained else torch.device("cpu")
    if device.type == "cuda":
        cached = max(0, torch.cuda.memory_reserved(device) - total)
        total = free_bytes(device) + torch.cuda.memory_allocated(device)
    capacity = total if allowed is None else allowed
    answer = _predict(model, optimizer, watch, _device(device, capacity), Deadline(time_limit))
    return MemoryReport(
        operator=failure.operator,
        module=failure.module,
        live_bytes=live,
        activation_bytes=activations_by_module(failure, (tensor for kind in kinds.values() for tensor in kind)),
        cached_bytes=cached,
        capacity_bytes=capacity,
        peak_bytes=answer.peak_bytes,
        levers=answer.levers,
        note=answer.note,
    )


def _device(where: torch.device, capacity: int) -> Device:
    """Return the device of a step, with the memory that the step may take."""
    if where.type != "cuda":
        return Device(name=THIS_MACHINE, platform="cpu", memory_bytes=capacity, context_bytes=0)
    platform: Platform = "rocm" if torch.version.hip else "cuda"
    return Device(name=torch.cuda.get_device_name(where), platform=platform, memory_bytes=capacity, context_bytes=0)


@dataclass(frozen=True)
class _Prediction:
    """What a step needs, and what helps: the fields of the report."""

    peak_bytes: int | None = None
    levers: tuple[Lever, ...] = ()
    note: str = ""


def _predict(
    model: nn.Module, optimizer: Optimizer | None, watch: LiveMemory, device: Device, deadline: Deadline
) -> _Prediction:
    """Return what the model's last call needs, traced without its data, and what helps; or why that is unknown."""
    if watch.arguments is None:
        return _Prediction(note="nothing is predicted: the model was not called")
    args, kwargs = watch.arguments
    memory = DeviceMemory(accumulate_gradients=watch.had_gradients)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):  # the state of a first step is asked for without memory
            state_bytes = sum(tensor.size_bytes for tensor in read_device_memory(model, 0, optimizer).tensors)
        with masks_of_eager():
            eager = replace(export_joint(model, args, kwargs, None), as_eager=True)
        plain, captured = (
            capture_joint(joint, type(model).__name__, costs="flops", memory=memory).graph
            for joint in (eager, export_joint(model, args, kwargs, None))
        )
    except SchedulerError as error:
        return _Prediction(note=f"nothing is predicted: {error}")
    step = PlainStep.of(plain, state_bytes, 0, device)
    levers, note = [*_levers(step, model, _batch_size(watch))], ""
    try:
        plan, need = find_plan(with_resident(captured, "optimizer", state_bytes, "optimizer state"), step, deadline)
        if plan is not None and need is not None:
            levers.append(recomputation(step, need, f"{plan.budget_bytes}B"))
    except SchedulerError as error:
        note = f"what recomputation saves is not known: {error}"
    helpful = ranked(lever for lever in levers if lever.saved_bytes > 0)
    return _Prediction(step.need.peak_bytes, tuple(sorted(helpful, key=lambda lever: not lever.fits)), note)


def _levers(step: PlainStep, model: nn.Module, batch: int) -> Iterator[Lever]:
    """Yield the changes of a step that need no plan; what would have to be traced is estimated."""
    yield handed_over_gradients(step)
    shards = [sharding(step, devices) for devices in SHARDS]
    yield next((lever for lever in shards if lever.fits), shards[-1])
    for name in LIGHT_OPTIMIZERS if step.state_bytes else ():
        memory = optimizer_memory(model.parameters(), name, step.device.platform.replace("rocm", "cuda"))
        yield other_optimizer(step, name, memory.state_bytes, 0)
    if batch > 1:
        lever = accumulation(step, lambda size: in_proportion(step.graph, size, batch, kept=_OF_ANY_BATCH), batch)
        yield replace(lever, how=f"{lever.how} (estimated in proportion)")
    if _has_only_float32(step.graph):
        lever = other_dtype(step, in_proportion(step.graph, 1, 2), step.state_bytes // 2, 0)
        yield replace(lever, time_factor=None, how=f"{lever.how} (estimated: half of the bytes)")


def _has_only_float32(graph: Graph) -> bool:
    """Return whether no operation of a graph computes in a dtype of two bytes."""
    return not any("bfloat16[" in o.signature or "float16[" in o.signature for o in graph.operations)


def _batch_size(watch: LiveMemory) -> int:
    """Return the first size of the model's first argument that is a tensor, 1 if there is none."""
    return next((int(tensor.shape[0]) for tensor in _tensors(watch.arguments) if tensor.dim()), 1)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
