"""Capture calls that differ from a planned one in sizes only, all from one trace with symbolic sizes.

The first call of another shape pays for that trace, which takes a few times as long as a
common capture; every further one takes a fraction of it. A trace is used only if it gives the
planned step again, operation by operation. Times are scaled from those of the planned step,
which were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from scheduler.pytorch.capture.arguments import read_arguments
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.capture.exporting import Varying, VaryingStep, export_varying
from scheduler.pytorch.capture.instructions import Lowered
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.execute.guards import CallKey, TensorKey, call_key
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.guards.watch import Watch
from scheduler.pytorch.tracing import capture_at

MOST_BASES = 4
"""Number of captured steps that others are derived from: there may be one for each dtype, flag and structure."""


class ShapeVariants:
    """Captures further calls of one model and loss.

    Parameters
    ----------
    model : nn.Module
    loss : callable or None
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor] | None) -> None:
        self._model, self._loss = model, loss
        self._bases: list[_Base] = []

    def add(self, module: CheckpointedModule, captured: Capture, watch: Watch) -> None:
        """Let further captures be derived from the step of a module, which was captured by itself."""
        self._bases = [*self._bases, _Base(module, captured.lowered, watch)][-MOST_BASES:]

    def capture(
        self, args: Sequence[object], kwargs: Mapping[str, object], *, costs: Costs, memory: DeviceMemory
    ) -> tuple[Capture, Watch] | None:
        """Return the captured step of a call, and the watch on what it read from Python.

        None if the call differs from all planned ones in more than sizes, or has to be captured
        by itself for another reason.

        Parameters
        ----------
        args, kwargs, costs, memory
            As for `capture`.
        """
        signature, inputs = read_arguments(args, kwargs)
        call = call_key(signature, inputs)
        for base in self._bases:
            varying = varying_dimensions(base.module.planned_call, call)
            if not varying or base.module.state_difference():
                continue
            try:
                step = base.step(varying) or self._trace(base, varying, args, kwargs, memory)
                if step is not None:
                    joint = step.at([key.shape for key in call.tensors])
                    if any(condition.difference(inputs) for condition in joint.conditions):
                        continue
                    captured = capture_at(
                        self._model, joint, args, kwargs, costs=costs, memory=memory, like=base.lowered
                    )
                    return captured, base.watch
            except Exception:  # torch raises errors of many kinds; the call is captured by itself
                continue
        return None

    def _trace(
        self,
        base: _Base,
        varying: Varying,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        memory: DeviceMemory,
    ) -> VaryingStep | None:
        """Return the step with symbolic sizes, None if it was tried before or does not give the planned step."""
        if varying in base.tried:
            return None
        base.tried.append(varying)
        step = export_varying(self._model, args, kwargs, self._loss, varying)
        again = step.at([key.shape for key in base.module.planned_call.tensors])
        captured = capture_at(self._model, again, args, kwargs, costs="flops", memory=memory)
        plan = base.module.plan
        if plan is None or captured.graph.structure_digest != plan.graph.structure_digest:
            return None
        if base.module.state_difference():
            return None
        base.steps.append(step)
        return step


@dataclass
class _Base:
    """A module whose step was captured by itself, and what was traced for calls of other sizes."""

    module: CheckpointedModule
    lowered: Lowered
    watch: Watch
    steps: list[VaryingStep] = field(default_factory=list)
    tried: list[Varying] = field(default_factory=list)

    def step(self, varying: Varying) -> VaryingStep | None:
        """Return a step that was traced for these dimensions, or for more."""
        for step in self.steps:
            if all(step.varying.get(position, frozenset()) >= dims for position, dims in varying.items()):
                return step
        return None


def varying_dimensions(planned: CallKey, call: CallKey) -> Varying | None:
    """Return the dimensions in which the tensors of a call have other sizes than those of the planned one.

    None if the calls differ in anything else, or in sizes that torch does not make symbolic: 0
    and 1.
    """
    if call.signature != planned.signature:
        return None
    varying: dict[int, frozenset[int]] = {}
    for position, (now, then) in enumerate(zip(call.tensors, planned.tensors, strict=True)):
        if now._replace(shape=then.shape, strides=then.strides) != then or len(now.shape) != len(then.shape):
            return None
        if now == then:
            continue
        sizes = [(i, a, b) for i, (a, b) in enumerate(zip(now.shape, then.shape, strict=True)) if a != b]
        if not sizes or any(min(a, b) < 2 for _, a, b in sizes) or not (_is_contiguous(now) and _is_contiguous(then)):
            return None
        varying[position] = frozenset(i for i, _, _ in sizes)
    return varying


def _is_contiguous(key: TensorKey) -> bool:
    expected = 1
    for size, stride in zip(reversed(key.shape), reversed(key.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
