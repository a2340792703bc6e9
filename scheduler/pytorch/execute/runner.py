"""Run a planned step: a module that computes what the original does, in the plan's memory.

The forward runs as generated code inside an autograd function; the backward is a list of
segments, each one autograd node. Tensors saved by the forward go through autograd's saved
tensors, so a parameter changed in place between forward and backward is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.joint import TENSOR
from scheduler.pytorch.execute.codegen import generate
from scheduler.pytorch.execute.guards import check_single_backward
from scheduler.pytorch.execute.module import ModuleSettings, RunnerModule
from scheduler.pytorch.execute.places import Place, TensorKeys, places_of
from scheduler.pytorch.execute.program import Program, Segment
from scheduler.pytorch.guards.settings import Settings
from scheduler.pytorch.guards.watch import Watch
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.autograd import autocast_disabled, below_autograd, not_compiled
from scheduler.schedule import Schedule


def build(
    model: nn.Module,
    captured: Capture,
    schedule: Schedule,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    **settings: Unpack[ModuleSettings],
) -> CapturedModule:
    """Return the module that runs a captured step as a schedule says.

    Parameters
    ----------
    model : nn.Module
    captured : Capture
        Of this model with these arguments and this loss.
    schedule : Schedule
        Valid for `captured.graph`.
    args, kwargs
        As for `checkpointed`.
    **settings
        See `ModuleSettings`.
    """
    return CapturedModule(model, captured, generate(captured, schedule), args, kwargs or {}, **settings)


class CapturedModule(RunnerModule):
    """A module that runs generated code.

    Attributes
    ----------
    program : Program
        The generated code.
    """

    def __init__(
        self,
        module: nn.Module,
        captured: Capture,
        program: Program,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        watch: Watch | None = None,
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__(module, args, kwargs, **settings)
        self.program = program
        self.conditions = captured.joint.conditions
        if watch is None:
            watch = Watch(module, self.loss, ignore=captured.joint.counters)
        self.runner = _ProgramRunner(self, captured, program, watch)


class _ProgramRunner:
    """Runs the generated code on the module's own tensors.

    Attributes
    ----------
    program : Program
    differentiable : set of int
        Positions of the outputs that receive a gradient.
    """

    def __init__(self, module: RunnerModule, captured: Capture, program: Program, watch: Watch) -> None:
        self.program = program
        self.differentiable = set(program.tangents.outputs)
        resident = captured.lowered.resident
        self._places = dict(zip(resident, places_of(module, captured, [*resident]), strict=True))
        self._forward_places = [self._places[name] for name in program.forward.resident]
        self._output_places = [self._places.get(name) for name in program.outputs]
        self._segments = [_SegmentPlaces(module, captured, segment) for segment in program.backward]
        self._watch = watch
        self._settings = Settings()
        kept = [place for place in self._places.values() if place.source.kind != "input"]
        self._registered = TensorKeys([place for place in kept if not place.source.reads])
        self._held = TensorKeys([place for place in kept if place.source.reads])
        self._renewals = self._watch.renewals
        self._output_spec = captured.joint.output_spec
        self._output_leaves = captured.joint.output_leaves

    def difference(self) -> str:
        """Return what differs in the model, its tensors, or the settings of torch; "" if nothing does."""
        if found := self._watch.difference() or self._settings.difference():
            return found
        if self._watch.renewals == self._renewals and self._registered.are_untouched():
            return self._held.difference()
        self._renewals = self._watch.renewals
        return self._registered.difference() or self._held.difference()

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors that the step reads and that are neither arguments nor registered, by name."""
        places = [place for place in self._places.values() if place.source.kind == "constant"]
        return {place.source.names[0]: place.find(()) for place in places}

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on these inputs and return the module's outputs."""
        values = self._forward(inputs)
        tensors = iter(
            value if i in self.differentiable else _without_gradient(value if place is None else place.find(inputs))
            for i, (value, place) in enumerate(zip(values, self._output_places, strict=True))
        )
        leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in self._output_leaves]
        return pytree.tree_unflatten(leaves, self._output_spec)

    def _forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, behind one autograd node per segment of the backward."""
        resident = [place.find(inputs) for place in self._forward_places]
        with torch.no_grad(), below_autograd(), autocast_disabled():
            outputs, saved = self.program.forward.run(resident)
        step = _Step(self)
        token: object = None
        for position in range(len(self._segments) - 1, 0, -1):
            places = self._segments[position]
            read = [place.find(inputs) for place in places.resident]
            roots = [place.find(inputs) for place in places.roots]
            token = _SegmentNode.apply(step, position, [], read, token, *roots)  # type: ignore[no-untyped-call]
        roots = [place.find(inputs) for place in self._segments[0].roots]
        return _SegmentNode.apply(step, 0, outputs, saved, token, *roots)  # type: ignore[no-any-return, no-untyped-call]


class _SegmentPlaces:
    """Where a segment of the backward finds resident tensors, and the tensors whose gradients it returns."""

    def __init__(self, module: nn.Module, captured: Capture, segment: Segment) -> None:
        joint = captured.joint
        self.resident = places_of(module, captured, segment.resident)
        self.roots = [Place(module, joint.sources[joint.gradients[i][0]]) for i in segment.gradients]


class _Step:
    """One step between its forward and the end of its backward.

    Attributes
    ----------
    runner : _ProgramRunner
    carried : list of Tensor
        Tensors that the last segment to run hands to the next.
    """

    def __init__(self, runner: _ProgramRunner) -> None:
        self.runner = runner
        self.carried: list[Tensor] = []


class _SegmentNode(torch.autograd.Function):
    """A segment of the backward.

    The first returns the outputs. The order of the others passes from one to the next as an
    empty tensor on the device of the gradients: there, autograd accumulates the gradients of
    one segment before it begins the next.
    """

    boxed_grads_call = True

    @staticmethod
    def forward(ctx, step, position, outputs, saved, token, *roots):  # type: ignore[no-untyped-def]
        ctx.step, ctx.position = step, position
        ctx.save_for_backward(*saved)
        if position:
            ctx.set_materialize_grads(False)
            return torch.empty(0, device=roots[0].device if roots else None)
        differentiable = step.runner.differentiable
        ctx.mark_non_differentiable(*(output for i, output in enumerate(outputs) if i not in differentiable))
        return tuple(outputs)

    @staticmethod
    @not_compiled
    def backward(ctx, incoming):  # type: ignore[no-untyped-def]
        check_single_backward()
        step, position = ctx.step, ctx.position
        saved = [*step.carried, *ctx.saved_tensors]
        step.carried = []
        ctx.maybe_clear_saved_tensors()
        program = step.runner.program
        received = [] if position else [incoming[output] for output in program.tangents.outputs]
        incoming.clear()
        with below_autograd(), autocast_disabled():
            gradients, step.carried = program.backward[position].run(saved, received)
        return (None, None, None, None, None, *gradients)


def _without_gradient(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it requires no gradient; a view of an output that does, detached."""
    return tensor.detach() if tensor.requires_grad else tensor
