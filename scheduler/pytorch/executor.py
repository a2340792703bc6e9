"""Run a planned step: a module that computes what the original does, in the plan's memory.

The forward runs as generated code inside an autograd function; the backward is a list of
segments, each one autograd node. What the forward saves goes through autograd's saved
tensors, so a parameter changed in place between forward and backward is noticed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Unpack, get_args

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from scheduler.api import SolveOptions, make_plan
from scheduler.errors import CaptureError, ExecutionError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch.codegen import Program, Segment, generate, translate_schedule
from scheduler.pytorch.costs import Costs
from scheduler.pytorch.device_memory import memory_beside, read_device_memory
from scheduler.pytorch.joint import TENSOR, Signature, Source, read_arguments
from scheduler.pytorch.tracing import Capture, capture
from scheduler.schedule import Schedule

OnMismatch = Literal["error", "plain", "plan"]
Granularity = Literal["auto", "operations", "layers"]

PLANNING: SolveOptions = {"time_limit": 20.0}
"""What planning before training takes by default; `solve` by itself takes longer."""

MOST_OTHER_PLANS = 8
"""Plans for other calls than the first that are kept; the one not used for longest goes first."""


def checkpointed(
    model: nn.Module | Sequence[Callable[..., object]],
    plan_or_budget: Plan | int | str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    granularity: str = "auto",
    on_mismatch: OnMismatch = "error",
    costs: Costs = "measured",
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    existing_gradients: bool = False,
    **options: Unpack[SolveOptions],
) -> CheckpointedModule:
    """Return a module that trains `model` within a memory budget.

    It shares the parameters and buffers of `model`: give its `parameters()` or the model's
    to the optimizer. With `loss`, calling it returns the loss; without, what the model
    returns. Gradients, buffers and random state are those of the model itself.

    Parameters
    ----------
    model : nn.Module or list of callable
        A list of layers, each taking what the one before returns, is for granularity "layers".
    plan_or_budget : Plan, int or str
        A plan for this model and these arguments, or a budget in bytes, "8GiB" or "60%".
    args, kwargs
        The arguments of one call, as examples: calls with the same structure, shapes,
        strides, dtypes and devices follow the plan.
    loss : callable, optional
        Makes the scalar loss of the model's outputs.
    granularity : "auto", "operations" or "layers"
        Layers: those of an `nn.Sequential` or a list run as they are, without being captured
        (see `profile_layers`; `costs` plays no part). Auto: what the plan says; for a budget
        operations, or layers for a list and for an `nn.Sequential` that cannot be captured.
    on_mismatch : "error", "plain" or "plan"
        What a call does that the plan does not cover: raise, run the model plainly, or make
        a plan for it, within the same budget (other shapes, training flags, autocast). The
        last `MOST_OTHER_PLANS` are kept: pad to a few lengths if there are many.
        Without gradients, and in `eval()`, the model runs plainly in any case.
    costs : "measured" or "flops"
        As for `trace`; counts only if a budget is given.
    reserve, optimizer, existing_gradients
        As for `trace`, with a budget; a plan holds them. A plan for existing gradients may run
        without, and needs less then; another plan with existing gradients needs as much more
        as they have bytes.
    **options
        For `make_plan`, if a budget is given: `solver`, `time_limit` (20 s by default here),
        `order`, `seed`.

    Returns
    -------
    CheckpointedModule

    Raises
    ------
    CaptureError
        If the model cannot be captured, or nothing in it is trainable.
    PlanMismatchError
        If the plan belongs to another model, or to arguments of other shapes.
    BudgetTooSmallError
        If no schedule fits the budget, or none is known.
    InvalidOptionError
        If `granularity` or `on_mismatch` is unknown, or options or `on_mismatch="plan"` come
        with a finished plan, or the size of the optimizer's state cannot be found.
    """
    if granularity not in get_args(Granularity):
        raise InvalidOptionError(f'granularity is "auto", "operations" or "layers", not {granularity!r}')
    if on_mismatch not in get_args(OnMismatch):
        raise InvalidOptionError(f'on_mismatch is "error", "plain" or "plan", not {on_mismatch!r}')
    is_budget = isinstance(plan_or_budget, (int, str))
    if not is_budget and not isinstance(plan_or_budget, Plan):
        raise InvalidOptionError(f"give a plan or a budget, not {type(plan_or_budget).__name__}")
    beside = {"reserve": reserve, "optimizer": optimizer, "existing_gradients": existing_gradients}
    given = sorted([*options, *(name for name, value in beside.items() if value)])
    if given and not is_budget:
        raise InvalidOptionError(f"options {given} are for making a plan, and a finished plan was given")
    if on_mismatch == "plan":
        if not is_budget:
            raise InvalidOptionError('on_mismatch="plan" makes plans within a budget, and a finished plan was given')
        make = functools.partial(
            checkpointed,
            model,
            plan_or_budget,
            loss=loss,
            granularity=granularity,
            costs=costs,
            reserve=reserve,
            optimizer=optimizer,
            existing_gradients=existing_gradients,
            **options,
        )
        module = make(args, kwargs)
        module.on_mismatch = on_mismatch
        module.others = OtherPlans(make)
        return module
    if isinstance(plan_or_budget, Plan):
        memory = memory_beside(plan_or_budget.graph)
    else:
        memory = read_device_memory(model, reserve, optimizer, existing_gradients)

    def by_layers() -> CheckpointedModule:
        from scheduler.pytorch.layers import checkpointed_layers  # it builds on this module

        return checkpointed_layers(
            model, plan_or_budget, args, kwargs, loss=loss, on_mismatch=on_mismatch, memory=memory, **options
        )

    route, *others = _routes(model, plan_or_budget, granularity)
    if route == "layers":
        return by_layers()
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(f'granularity "operations" is for an nn.Module, not {type(model).__name__}')
    try:
        captured = capture(model, args, kwargs, loss, costs=costs if is_budget else "flops", memory=memory)
    except CaptureError:
        if not others:
            raise
        return by_layers()
    if isinstance(plan_or_budget, (int, str)):
        plan = make_plan(captured.graph, plan_or_budget, **(PLANNING | options))
    else:
        plan = plan_or_budget
    schedule = translate_schedule(plan.schedule, plan.graph, captured.graph)
    module = build(model, captured, schedule, args, kwargs, loss=loss, on_mismatch=on_mismatch)
    module.plan = plan
    return module


def _routes(model: object, plan_or_budget: Plan | int | str, granularity: str) -> tuple[str, ...]:
    """Return the granularities to try, in that order."""
    if granularity != "auto":
        return (granularity,)
    if isinstance(plan_or_budget, Plan):
        return (plan_or_budget.granularity,)
    if not isinstance(model, nn.Module):
        return ("layers",)
    return ("operations", "layers") if isinstance(model, nn.Sequential) else ("operations",)


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


class StepRunner(Protocol):
    """What runs the forward of a planned step."""

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on the distinct tensors of a call."""

    def difference(self) -> str:
        """Return what differs in the model since the plan was made, "" if nothing does."""


class CheckpointedModule(nn.Module):
    """A module that follows a plan; made by `checkpointed`.

    Its parameters and buffers are the original module's, under the same names, also in
    `state_dict`.

    Attributes
    ----------
    module : nn.Module
        The original.
    loss : callable or None
    plan : Plan or None
    others : OtherPlans or None
        The plans for other calls, with `on_mismatch="plan"`.
    """

    _runner: StepRunner

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        loss: Callable[..., Tensor] | None,
        on_mismatch: OnMismatch,
    ) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.plan: Plan | None = None
        self.on_mismatch = on_mismatch
        self.others: OtherPlans | None = None
        self.training = module.training
        self._key = _call_key(*read_arguments(args, kwargs))
        self._modes = _Modes(module)
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the forward of the plan; the backward of what it returns follows the plan too.

        Raises
        ------
        ExecutionError
            If the call differs from what was planned and `on_mismatch="error"`.
        CaptureError, BudgetTooSmallError
            If it differs and with `on_mismatch="plan"` no plan can be made for it.
        """
        if not torch.is_grad_enabled() or (not self.module.training and self._modes.root_trains):
            return self._plain(args, kwargs)
        signature, tensors = read_arguments(args, kwargs)
        difference = self._difference(signature, tensors)
        if difference:
            if self.on_mismatch == "plain":
                return self._plain(args, kwargs)
            if self.others is not None:
                return self.others.find(args, kwargs)._runner.run(tensors)
            raise ExecutionError(
                f"this call is not the one that was planned: {difference}. Make a plan for it with"
                ' on_mismatch="plan", or pass on_mismatch="plain" to run the model without a plan.'
            )
        return self._runner.run(tensors)

    def _plain(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        outputs = self.module(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)

    def _difference(self, signature: Signature, tensors: list[Tensor]) -> str:
        key = _call_key(signature, tensors)
        if key != self._key:
            return _describe_difference(key, self._key)
        return self._modes.difference() or self._runner.difference()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under their names in the original module."""
        for name, parameter in super().named_parameters("", recurse, remove_duplicate):
            yield _joined(prefix, name), parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers under their names in the original module."""
        for name, buffer in super().named_buffers("", recurse, remove_duplicate):
            yield _joined(prefix, name), buffer


class OtherPlans:
    """Plans of one model and budget for calls that the first plan does not cover.

    Attributes
    ----------
    modules : list of CheckpointedModule
        One for each plan, the one used last at the end.
    """

    def __init__(self, make: Callable[..., CheckpointedModule]) -> None:
        self.modules: list[CheckpointedModule] = []
        self._make = make

    def find(self, args: tuple[object, ...], kwargs: dict[str, object]) -> CheckpointedModule:
        """Return the module that covers a call, made now if there is none."""
        call = read_arguments(args, kwargs)
        found = next((module for module in self.modules if not module._difference(*call)), None)
        if found is None:
            found = self._make(args, kwargs)
        else:
            self.modules.remove(found)
        self.modules = [*self.modules, found][-MOST_OTHER_PLANS:]
        return found


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


def _joined(prefix: str, name: str) -> str:
    short = name.removeprefix("module.")
    return f"{prefix}.{short}" if prefix else short


def _drop_prefix(module: nn.Module, state: dict[str, object], prefix: str, metadata: object) -> None:
    """Name the entries of a state as the original module does."""
    inner = f"{prefix}module."
    for name in [name for name in state if name.startswith(inner)]:
        state[prefix + name.removeprefix(inner)] = state.pop(name)


def _add_prefix(module: nn.Module, state: dict[str, object], prefix: str, *_: object) -> None:
    """Find the entries of the original module's state."""
    for name in [name for name in state if name.startswith(prefix)]:
        if not name.startswith(f"{prefix}loss."):
            state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)


@dataclass(frozen=True)
class _CallKey:
    """What must be equal between a call and the plan."""

    signature: Signature
    tensors: tuple[tuple[object, ...], ...]


def _call_key(signature: Signature, tensors: Sequence[Tensor]) -> _CallKey:
    return _CallKey(
        signature,
        tuple(
            (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in tensors
        ),
    )


def _describe_difference(key: _CallKey, planned: _CallKey) -> str:
    if key.signature.spec != planned.signature.spec:
        return f"its arguments are {key.signature.spec}, planned were {planned.signature.spec}"
    if key.signature.leaves != planned.signature.leaves:
        return f"its constants are {key.signature.leaves}, planned were {planned.signature.leaves}"
    names = ("shape", "strides", "dtype", "device", "requires_grad")
    for number, (now, then) in enumerate(zip(key.tensors, planned.tensors, strict=True)):
        for name, a, b in zip(names, now, then, strict=True):
            if a != b:
                return f"{name} of input tensor {number} is {a}, planned was {b}"
    return "its tensors differ in number"


class _Modes:
    """Training flags and autocast state when the plan was made."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.named_modules())
        self.flags = [part.training for _, part in self.modules]
        self.root_trains = module.training
        kinds = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} | {"cpu"}
        self.kinds = sorted(kinds - {"meta"})
        self.autocast = self._autocast()

    def _autocast(self) -> list[torch.dtype | None]:
        return [torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in self.kinds]

    def difference(self) -> str:
        """Return what differs now, "" if nothing does."""
        if [part.training for _, part in self.modules] != self.flags:
            name, part = next(
                pair for pair, flag in zip(self.modules, self.flags, strict=True) if pair[1].training != flag
            )
            return f'training of module "{name}" is {part.training}, planned was {not part.training}'
        autocast = self._autocast()
        if autocast != self.autocast:
            return f"autocast of {self.kinds} is {autocast}, planned was {self.autocast}"
        return ""


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


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what must stay of a parameter, buffer or constant while its values change."""
    return (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


def _without_gradient(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it requires no gradient; a view of an output that does, detached."""
    return tensor.detach() if tensor.requires_grad else tensor
