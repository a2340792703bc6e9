"""Whether a model can be trained on a device, found without the device and without the model's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from scheduler.devices import Device
from scheduler.devices import device as find_device
from scheduler.errors import CaptureError, InvalidOptionError, OutOfTimeError
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.planning.batch_scaling import Growth
from scheduler.planning.device_plans import find_plan
from scheduler.planning.fit_answers import Fit, Lever, Need, Reach
from scheduler.planning.graph_variants import gradient_bytes
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
    shorter,
)
from scheduler.planning.peak_contents import KINDS, Part, peak_contents
from scheduler.planning.reach import Growths, ReachSearch
from scheduler.problem import Problem
from scheduler.pytorch.dataless_steps import DatalessSteps, MakeBatch
from scheduler.pytorch.largest_batch import plan_of_schedule
from scheduler.pytorch.measurement.optimizer_memory import LIGHT_OPTIMIZERS, MakeOptimizer
from scheduler.schedule import Schedule
from scheduler.solvers.deadline import Deadline
from scheduler.validation import time_of

_REACH_SHARE = 0.5
"""Share of the remaining time for the largest batch, and then for the longest length."""
MOST_SAMPLES = 2**16
"""The largest batch that is tried."""


def fit(
    make_model: Callable[[], nn.Module],
    make_batch: MakeBatch,
    device: Device | str,
    *,
    batch_size: int = 1,
    length: int | None = None,
    longest: int | None = None,
    loss: Callable[..., Tensor] | None = None,
    optimizer: str | MakeOptimizer = "adamw",
    dtype: str | None = None,
    autocast: str | None = None,
    name: str = "",
    time_limit: float = 45.0,
    progress: Callable[[str], None] = lambda message: None,
) -> Fit:
    """Return whether a training step fits a device, what fills the memory, and what helps.

    Neither the device nor the memory for the model is needed: the model is built on device
    "meta", and captured there.

    Parameters
    ----------
    make_model : callable
        Returns the model; called under `torch.device("meta")`.
    make_batch : callable
        Takes a batch size, and a length if `length` is given, and returns the arguments of one
        call, as `(args, kwargs)`; called under `torch.device("meta")`.
    device : Device or str
        A device, or the name of one, such as "h100-80gb", or "this machine".
    batch_size : int
    length : int, optional
        Length of the sequences.
    longest : int, optional
        Longest length that the model takes; by default 16 times the length.
    loss : callable, optional
        As for `trace`.
    optimizer : str or callable
        "adamw", "adam", "adafactor", "sgd-momentum" or "sgd", or a function from parameters to an
        optimizer. Its state is resident, and its step may need more memory than the backward.
    dtype : "float32", "bfloat16" or "float16", optional
        What parameters and inputs are converted to.
    autocast : "bfloat16" or "float16", optional
        The step runs under autocast to this dtype.
    name : str
        Of the model, to show.
    time_limit : float
        Seconds. What is not found by then is left out, and a note says so.
    progress : callable
        Called with a message at each stage.

    Returns
    -------
    Fit

    Raises
    ------
    CaptureError
        As for `trace`.
    InvalidOptionError
        If an argument is out of range, or the optimizer cannot step on tensors without data.
    UnknownDeviceError
        If no device has this name.

    Examples
    --------
    >>> from torch import nn
    >>> def make_batch(size):
    ...     return (torch.zeros(size, 1024),), {}
    >>> found = fit(lambda: nn.Linear(1024, 1024), make_batch, "t4", batch_size=8, loss=torch.sum)
    >>> found.fits, sum(part.size_bytes for part in found.parts) == found.plain.peak_bytes
    (True, True)
    """
    where = find_device(device) if isinstance(device, str) else device
    _check_options(batch_size, length, time_limit)
    deadline = Deadline(time_limit)
    steps = DatalessSteps(
        make_model,
        make_batch,
        where,
        loss=loss,
        optimizer=optimizer,
        autocast=_dtype_of(autocast),
        dtype=_dtype_of(dtype),
        progress=progress,
    )
    step = steps.plain(batch_size, length)
    graph = step.held if steps.is_plain_plannable else steps.graph(batch_size, length)
    progress("planning")
    plan, planned = find_plan(graph, step, deadline)
    search = _Search(steps, step, graph, plan, deadline, batch_size, length, longest or 16 * (length or 1))
    batches, lengths = search.batches(), search.lengths()
    if planned is not None and not planned.fits and search.schedule is not None:
        plan = plan_of_schedule(graph, search.schedule)
        planned = Need.of(graph, plan.schedule, where, step.temporary_bytes)
    return Fit(
        model=name or steps.name,
        device=where,
        batch_size=batch_size,
        length=length,
        dtype=steps.dtype_text,
        optimizer=optimizer if isinstance(optimizer, str) else "given optimizer",
        plain=step.need,
        planned=planned if planned is not None and planned.fits else None,
        plan=plan if planned is not None and planned.fits else None,
        parts=_parts(step),
        floor_bytes=max(Problem(graph, 0).floor.bytes, step.need.optimizer_step_bytes),
        batches=batches,
        lengths=lengths,
        levers=ranked(search.levers(plan, planned)),
        time_unit=graph.time_unit,
        assumptions=tuple(graph.assumptions),
        notes=tuple(search.notes),
    )


def _dtype_of(name: str | None) -> torch.dtype | None:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name is not None and name not in known:
        raise InvalidOptionError(f"a dtype must be one of {', '.join(known)}, got {name!r}")
    return None if name is None else known[name]


def _check_options(batch_size: int, length: int | None, time_limit: float) -> None:
    time_of(time_limit, "time_limit", error=InvalidOptionError)
    for name, value in (("batch_size", batch_size), ("length", length)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_count and not (name == "length" and value is None):
            raise InvalidOptionError(f"{name} must be an int >= 1, got {value!r}")


def _parts(step: PlainStep) -> tuple[Part, ...]:
    """Return what fills the memory at the plain peak, which may be that of the optimizer's step."""
    graph = step.held
    if not step.need.is_optimizer_bound:
        return peak_contents(graph, Problem(graph, 0).save_everything)
    held = [Part(role, "", size) for role, size in graph.resident_bytes_by_role().items()]
    parts = [*held, Part("gradient", "", gradient_bytes(graph)), Part("optimizer step", "", step.temporary_bytes)]
    order = list(KINDS)
    return tuple(sorted((part for part in parts if part.size_bytes), key=lambda part: order.index(part.kind)))


class _Search:
    """What else fits, and what helps."""

    def __init__(
        self,
        steps: DatalessSteps,
        step: PlainStep,
        graph: Graph,
        plan: Plan | None,
        deadline: Deadline,
        batch_size: int,
        length: int | None,
        longest: int,
    ) -> None:
        self._steps, self._step, self._graph, self._plan = steps, step, graph, plan
        self._deadline, self._batch_size, self._length, self._longest = deadline, batch_size, length, longest
        self.notes: list[str] = []
        self.schedule: Schedule | None = None
        """A schedule of the step that fits, if the search came across one."""
        self._unit = _unit_of(length or 1)
        self._by_batch = self._growths(lambda size: (size, length), batch_size)
        self._by_length = self._growths(lambda size: (batch_size, size), length or 1)

    def _growths(self, sizes: Callable[[int], tuple[int, int | None]], start: int) -> Growths:
        """Return the graphs by one dimension of the step, in both forms."""

        def growth(graph_at: Callable[[int, int | None], Graph], graph: Graph) -> Growth:
            found = Growth(lambda size: self._in_time(graph_at, *sizes(size)))
            found.traced[start] = graph
            return found

        plannable = growth(self._steps.graph, self._graph)
        if self._steps.is_plain_plannable:
            return Growths(plannable, plannable)
        return Growths(growth(self._steps.held_plain_graph, self._step.held), plannable)

    def _in_time(self, graph_at: Callable[[int, int | None], Graph], batch_size: int, length: int | None) -> Graph:
        if self._deadline.passed:
            size = f"a batch of {batch_size}" + ("" if length is None else f" and a length of {length}")
            raise OutOfTimeError(f"no time was left to trace {size}")
        return graph_at(batch_size, length)

    def batches(self) -> Reach | None:
        """Return the largest batches of this length."""
        return self._reach(self._by_batch, self._batch_size, MOST_SAMPLES, 1, "the largest batch")

    def lengths(self) -> Reach | None:
        """Return the longest lengths of this batch."""
        if self._length is None:
            return None
        return self._reach(self._by_length, self._length, self._longest, self._unit, "the longest length")

    def _reach(self, growths: Growths, start: int, limit: int, unit: int, what: str) -> Reach | None:
        def need(graph: Graph, schedule: Schedule) -> Need:
            return Need.of(graph, schedule, self._step.device, self._step.temporary_bytes)

        deadline = self._deadline.within(_REACH_SHARE * self._deadline.remaining)
        usable = self._step.need.usable_bytes
        search = ReachSearch(growths, need, usable, start=start, limit=limit, unit=unit, deadline=deadline)
        if self._plan is not None:
            search.know(self._graph, self._plan.schedule)
        try:
            found = search.reach()
            self.schedule = self.schedule or search.schedule_at_start()
            return found
        except (CaptureError, OutOfTimeError) as error:
            self.notes.append(f"{what} is not known: {error}")
            return None

    def levers(self, plan: Plan | None, planned: Need | None) -> Iterator[Lever]:
        """Yield what helps; what cannot be found in the time that is left is noted."""
        step, steps = self._step, self._steps
        if plan is not None and planned is not None:
            yield recomputation(step, planned)
        yield handed_over_gradients(step)
        for devices in SHARDS:
            yield sharding(step, devices)
        own = steps.memory(steps.dtype, steps.optimizer)
        for name in LIGHT_OPTIMIZERS:
            memory = steps.memory(steps.dtype, name)
            if memory.state_bytes < own.state_bytes:
                yield other_optimizer(step, name, memory.state_bytes, memory.temporary_bytes)
        for make in (self._accumulation, self._shorter, self._bfloat16):
            try:
                yield from make()
            except (CaptureError, OutOfTimeError) as error:
                self.notes.append(f"what a change saves is not known: {error}")

    def _accumulation(self) -> Iterator[Lever]:
        growth = self._by_batch.plain

        def graph_at(size: int) -> Graph:
            graph = growth.estimate(size)
            if size == 1 and 1 not in growth.traced:
                self.notes.append("what a batch of 1 needs is estimated from larger batches")
            return _without_state(graph)

        if self._batch_size > 1:
            yield accumulation(self._step, graph_at, self._batch_size)

    def _shorter(self) -> Iterator[Lever]:
        if self._length is not None and self._length // self._unit >= 2:
            length = self._length // self._unit // 2 * self._unit
            yield shorter(self._step, _without_state(self._by_length.plain.at(length)), length, self._length)

    def _bfloat16(self) -> Iterator[Lever]:
        steps = self._steps
        if steps.dtype_text == "float32":
            if self._deadline.passed:
                raise OutOfTimeError("no time was left to trace the step in bfloat16")
            memory = steps.memory(torch.bfloat16, steps.optimizer)
            graph = steps.plain_graph(self._batch_size, self._length, torch.bfloat16)
            yield other_dtype(self._step, graph, memory.state_bytes, memory.temporary_bytes)


def _without_state(graph: Graph) -> Graph:
    """Return the graph of a step without the optimizer's state."""
    if "optimizer" not in graph.resident:
        return graph
    return replace(graph, tensors=graph.tensors[:-1], resident=graph.resident[:-1])


def _unit_of(length: int) -> int:
    """Return the step in which lengths are tried."""
    return next((unit for unit in (256, 64, 16) if length % unit == 0 and length > unit), 1)
