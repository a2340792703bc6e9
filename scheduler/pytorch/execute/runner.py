"""Run a planned step: a module that computes what the original does, in the plan's memory.

The forward runs as generated code inside an autograd function; the backward is a list of
segments, each one autograd node. What the forward saves goes through autograd's saved
tensors, so a parameter changed in place between forward and backward is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.utils import _pytree as pytree

from scheduler.errors import ExecutionError
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.joint import TENSOR, Source
from scheduler.pytorch.execute.codegen import generate
from scheduler.pytorch.execute.guards import tensor_key
from scheduler.pytorch.execute.module import CheckpointedModule, OnMismatch
from scheduler.pytorch.execute.program import Program, Segment
from scheduler.schedule import Schedule


def build(
    model: nn.Module,
    captured: Capture,
    schedule: Schedule,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    on_mismatch: OnMismatch = "error",
) -> CapturedModule:
    """Return the module that runs a captured step as a schedule says.

    Parameters
    ----------
    model : nn.Module
    captured : Capture
        Of this model with these arguments and this loss.
    schedule : Schedule
        A valid schedule of `captured.graph`.
    args, kwargs, loss, on_mismatch
        As for `checkpointed`.
    """
    return CapturedModule(model, captured, generate(captured, schedule), args, kwargs or {}, loss, on_mismatch)


class CapturedModule(CheckpointedModule):
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
        loss: Callable[..., Tensor] | None,
        on_mismatch: OnMismatch,
    ) -> None:
        super().__init__(module, args, kwargs, loss, on_mismatch)
        self.program = program
        self._runner: _Runner = _Runner(self, captured, program)


class _Runner:
    """The generated code with the module's own tensors."""

    def __init__(self, module: nn.Module, captured: Capture, program: Program) -> None:
        self.program = program
        joint = captured.joint
        nodes = captured.lowered.resident
        self.places = [_Place(module, joint.sources[nodes[name]]) for name in program.forward.resident]
        needed = {name: i for i, name in enumerate(program.forward.resident)}
        self.expected: list[tuple[_Place, tuple[object, ...]]] = []
        for name, node in nodes.items():
            source = joint.sources[node]
            if source.kind != "input":
                place = self.places[needed[name]] if name in needed else _Place(module, source)
                self.expected.append((place, tensor_key(place.find(()))))
        self.segments = [_SegmentPlaces(module, captured, segment) for segment in program.backward]
        self.outputs = program.outputs
        self.output_places = [
            _Place(module, joint.sources[nodes[name]]) if name in nodes else None for name in program.outputs
        ]
        self.with_tangent = set(program.tangents.outputs)
        self.spec = joint.output_spec
        self.leaves = joint.output_leaves

    def difference(self) -> str:
        """Return what differs in parameters, buffers and constants, "" if nothing does."""
        for place, key in self.expected:
            tensor = place.find(())
            if tensor_key(tensor) != key:
                return f'{place.source.kind} "{place.source.names[0]}" is {tensor_key(tensor)}, planned was {key}'
            if not place.is_shared(tensor):
                return f"{', '.join(place.source.names)} were one tensor when the plan was made"
        return ""

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on these inputs and return the module's outputs."""
        values = self._forward(inputs)
        tensors = iter(
            value if i in self.with_tangent else _without_gradient(value if place is None else place.find(inputs))
            for i, (value, place) in enumerate(zip(values, self.output_places, strict=True))
        )
        leaves = [next(tensors) if leaf is TENSOR else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def _forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, behind one autograd node per segment of the backward."""
        resident = [place.find(inputs) for place in self.places]
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            outputs, saved = self.program.forward.run(resident)
        step = _Step(self)
        token: object = None
        for position in range(len(self.segments) - 1, 0, -1):
            places = self.segments[position]
            read = [place.find(inputs) for place in places.resident]
            roots = [place.find(inputs) for place in places.roots]
            token = _SegmentNode.apply(step, position, [], read, token, *roots)  # type: ignore[no-untyped-call]
        roots = [place.find(inputs) for place in self.segments[0].roots]
        return _SegmentNode.apply(step, 0, outputs, saved, token, *roots)  # type: ignore[no-any-return, no-untyped-call]


class _SegmentPlaces:
    """Where a segment of the backward finds resident tensors, and those whose gradients it returns."""

    def __init__(self, module: nn.Module, captured: Capture, segment: Segment) -> None:
        joint, nodes = captured.joint, captured.lowered.resident
        self.resident = [_Place(module, joint.sources[nodes[name]]) for name in segment.resident]
        self.roots = [_Place(module, joint.sources[joint.gradients[i][0]]) for i in segment.gradients]


class _Place:
    """Where a resident tensor is found at run time."""

    def __init__(self, pair: nn.Module, source: Source) -> None:
        self.source = source
        self.holders: list[tuple[dict[str, Tensor], str]] = []
        if source.kind == "input" or source.read is not None:
            return
        for name in source.paths:
            path, _, key = name.rpartition(".")
            owner = pair.get_submodule(path)
            holder = {"parameter": owner._parameters, "buffer": owner._buffers, "constant": vars(owner)}
            self.holders.append((holder[source.kind], key))  # type: ignore[arg-type]

    def find(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the tensor."""
        if self.source.kind == "input":
            return inputs[self.source.position]
        if self.source.read is not None:
            return self.source.read()
        holder, key = self.holders[0]
        return holder[key]

    def is_shared(self, tensor: Tensor) -> bool:
        """Return whether all names still hold the same tensor."""
        return len(self.holders) < 2 or all(holder[key] is tensor for holder, key in self.holders)


class _Step:
    """One step between its forward and the end of its backward: what a segment hands to the next."""

    def __init__(self, runner: _Runner) -> None:
        self.runner = runner
        self.carried: list[Tensor] = []


class _SegmentNode(torch.autograd.Function):
    """A segment of the backward.

    The first returns the outputs. The order of the others passes from one to the next as an
    empty tensor, on the device of the gradients: there autograd accumulates the gradients of
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
        with_tangent = step.runner.with_tangent
        ctx.mark_non_differentiable(*(output for i, output in enumerate(outputs) if i not in with_tangent))
        return tuple(outputs)

    @staticmethod
    @_disable_dynamo
    def backward(ctx, incoming):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            raise ExecutionError("a planned step has no second derivative: call backward without create_graph=True")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise ExecutionError(
                "the backward of a planned step runs once, freeing what it saved as it goes:"
                " call backward without retain_graph=True, or run the plain module"
            )
        step, position = ctx.step, ctx.position
        saved = [*step.carried, *ctx.saved_tensors]
        step.carried = []
        ctx.maybe_clear_saved_tensors()
        program = step.runner.program
        received = [] if position else [incoming[output] for output in program.tangents.outputs]
        incoming.clear()
        with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
            gradients, step.carried = program.backward[position].run(saved, received)
        return (None, None, None, None, None, *gradients)


def _without_gradient(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it requires no gradient; a view of an output that does, detached."""
    return tensor.detach() if tensor.requires_grad else tensor
