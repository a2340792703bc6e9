"""Out of memory, after the fact: what filled the memory, and what would have made room."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.api import make_plan
from scheduler.errors import BudgetTooSmallError, SchedulerError
from scheduler.graph import Graph
from scheduler.problem import save_everything
from scheduler.pytorch.capture.device_memory import read_device_memory
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
from scheduler.pytorch.torch_private.autograd import modes_disabled
from scheduler.pytorch.torch_private.pytree import tree_leaves
from scheduler.pytorch.torch_private.tensors import FakeTensorMode
from scheduler.pytorch.tracing import capture_joint
from scheduler.simulator import simulate
from scheduler.units import format_bytes, format_percent, parse_bytes, text_table

_MODULES_SHOWN = 8
_MOST_DEVICES = 64
_PLAN_GAP = 0.05


@dataclass(frozen=True)
class Lever:
    """A change of the step, and whether it makes the step fit.

    Attributes
    ----------
    name : str
    peak_bytes : int or None
        Predicted or estimated peak of the whole step with it; None if it is unknown.
    suffices : bool
    advice : str
        How to apply it, and what it costs.
    """

    name: str
    peak_bytes: int | None
    suffices: bool
    advice: str


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
        Predicted peak of the whole step without recomputation; None if it cannot be captured.
    levers : tuple of Lever
        Those that suffice first.
    note : str
        Why nothing is predicted, "" if it is.
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
        for lever in self.levers:
            peak = "" if lever.peak_bytes is None else f" ({format_bytes(lever.peak_bytes)})"
            rows.append((lever.name, f"{'suffices' if lever.suffices else 'is not enough'}{peak}: {lever.advice}"))
        return text_table(rows)

    def _needed(self) -> str:
        if self.peak_bytes is None:
            return f"unknown: {self.note}"
        more = " for its tensors; workspaces and rounding come on top" if self.peak_bytes <= self.capacity_bytes else ""
        return format_bytes(self.peak_bytes) + more

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
    which changes of the step make it fit: recomputation, by a plan for the shapes of the last call
    of the model; and by estimates from it a smaller batch, bfloat16, another optimizer, and shards
    on several devices.

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
    step, note = _graphs_of(model, optimizer, watch)
    return MemoryReport(
        operator=failure.operator,
        module=failure.module,
        live_bytes=live,
        activation_bytes=activations_by_module(failure, (tensor for kind in kinds.values() for tensor in kind)),
        cached_bytes=cached,
        capacity_bytes=capacity,
        peak_bytes=None if step is None else _plain_peak(step.plain),
        levers=() if step is None else _levers(step, capacity, _batch_size(watch), time_limit),
        note=note,
    )


@dataclass(frozen=True)
class _Step:
    """The graphs of a step: as eager PyTorch runs it, and as a plan does, which writes over some inputs."""

    plain: Graph
    captured: Graph


def _graphs_of(model: nn.Module, optimizer: Optimizer | None, watch: LiveMemory) -> tuple[_Step | None, str]:
    """Return the graphs of the model's last call, traced without its data, or why there are none."""
    if watch.arguments is None:
        return None, "the model was not called"
    args, kwargs = watch.arguments
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):  # the state of a first step is asked for without memory
            memory = read_device_memory(model, 0, optimizer, watch.had_gradients)
        with masks_of_eager():
            eager = replace(export_joint(model, args, kwargs, None), as_eager=True)
        plain, captured = (
            capture_joint(joint, type(model).__name__, costs="flops", memory=memory).graph
            for joint in (eager, export_joint(model, args, kwargs, None))
        )
    except SchedulerError as error:
        return None, str(error)
    return _Step(plain, captured), ""


def _plain_peak(graph: Graph) -> int:
    return simulate(graph, save_everything(graph)).peak_bytes


def _levers(step: _Step, capacity: int, batch: int, time_limit: float) -> tuple[Lever, ...]:
    """Return the changes that could make a step fit, those that suffice first."""
    graph, plain = step.plain, _plain_peak(step.plain)
    sizes = graph.resident_bytes_by_role()
    gradients = sum(graph.tensor(name).size_bytes for name in graph.results if graph.tensor(name).role == "gradient")
    state = sizes["optimizer state"]
    # Whatever the batch, these are there; the rest grows in proportion to it.
    fixed = min(plain, sizes["parameter"] + sizes["buffer"] + sizes["gradient"] + state + gradients)
    growing = plain - fixed
    levers = [_recomputation(step.captured, capacity, time_limit)]
    if batch > 1:
        most = max(1, min(batch - 1, math.floor(batch * (capacity - fixed) / max(1, growing))))
        peak = fixed + math.ceil(growing * most / batch)
        levers.append(
            Lever(
                "smaller batch",
                peak,
                peak <= capacity,
                f"{most} of {batch} examples at a time, with the gradients of {math.ceil(batch / most)} steps added"
                " (estimated in proportion)",
            )
        )
    half = plain // 2
    if _has_only_float32(graph):
        levers.append(Lever("bfloat16", half, half <= capacity, "model, inputs and optimizer state in half the bytes"))
    if state:
        levers.append(
            Lever(
                "another optimizer",
                plain - state,
                plain - state <= capacity,
                f"SGD without momentum has no state ({format_bytes(state)} now); 8-bit states have a quarter",
            )
        )
    devices = next((n for n in range(2, _MOST_DEVICES + 1) if growing + fixed / n <= capacity), _MOST_DEVICES)
    peak = growing + math.ceil(fixed / devices)
    levers.append(
        Lever("FSDP", peak, peak <= capacity, f"parameters, gradients and state in shards on {devices} devices")
    )
    return tuple(sorted(levers, key=lambda lever: not lever.suffices))


def _recomputation(graph: Graph, capacity: int, time_limit: float) -> Lever:
    """Return what a plan makes of the step."""
    try:
        plan = make_plan(graph, capacity, time_limit=time_limit, gap=_PLAN_GAP)
    except BudgetTooSmallError as error:
        return Lever("recomputation", None, False, str(error).partition(": ")[0])
    except SchedulerError as error:
        return Lever("recomputation", None, False, str(error))
    return Lever(
        "recomputation",
        plan.peak_bytes,
        True,
        f'checkpointed(model, "{capacity}B", ...) runs {format_percent(plan.overhead)} more FLOPs; live storages,'
        " so leave some room for workspaces",
    )


def _has_only_float32(graph: Graph) -> bool:
    """Return whether no operation of a graph computes in a dtype of two bytes."""
    return not any("bfloat16[" in o.signature or "float16[" in o.signature for o in graph.operations)


def _batch_size(watch: LiveMemory) -> int:
    """Return the first size of the model's first argument that is a tensor, 1 if there is none."""
    return next((int(tensor.shape[0]) for tensor in _tensors(watch.arguments) if tensor.dim()), 1)


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
