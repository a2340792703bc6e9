"""Run a planned chain of layers: any schedule of its lowered graph, without capturing the model.

The forward runs the schedule up to the loss, and then makes one autograd node per layer. In
the backward each node runs the schedule on to the end of its own layer's last backward and
returns the gradients of that layer's parameters: they are accumulated layer by layer, and
hooks on them run, as under plain autograd.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scheduler.api import SolveOptions, make_plan
from scheduler.errors import ExecutionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.arguments import Position, Signature
from scheduler.pytorch.capture.device_memory import NOTHING_BESIDE, DeviceMemory
from scheduler.pytorch.execute.guards import tensor_key
from scheduler.pytorch.execute.module import PLANNING, CheckpointedModule, OnMismatch
from scheduler.pytorch.layerwise.groups import Gradients, Link, Moment, Saved, State
from scheduler.pytorch.layerwise.profiling import Profile, kind_of, profile
from scheduler.pytorch.layerwise.program import LayerProgram, Step, translate_layers
from scheduler.pytorch.layerwise.survey import Layers, name_parts


def checkpointed_layers(
    layers: Layers,
    plan_or_budget: Plan | int | str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    on_mismatch: OnMismatch = "error",
    memory: DeviceMemory = NOTHING_BESIDE,
    **options: Unpack[SolveOptions],
) -> LayeredModule:
    """Return a module that trains these layers within a memory budget.

    A given plan is matched by the structure digest of a fresh profile, which covers what
    each layer outputs, saves and keeps, to the byte, and no times and workspaces. Make plan
    and module under the autocast that the training runs under.

    Parameters
    ----------
    layers : nn.Sequential or sequence of callable
    plan_or_budget, args, kwargs, loss, on_mismatch, **options
        As for `checkpointed`.
    memory : DeviceMemory
        What stands beside the step.

    Raises
    ------
    CaptureError, ExecutionError, InvalidOptionError
        As `profile_layers`.
    PlanMismatchError
        If the plan belongs to other layers, or to arguments of other shapes.
    BudgetTooSmallError
        If no schedule fits the budget, or none is known.
    """
    is_budget = isinstance(plan_or_budget, (int, str))
    profiled = profile(layers, args, kwargs, loss, timed=is_budget, memory=memory)
    if isinstance(plan_or_budget, (int, str)):
        plan = make_plan(profiled.chain, plan_or_budget, **(PLANNING | options))
    else:
        plan = plan_or_budget
    return LayeredModule(layers, plan, profiled, args, kwargs or {}, loss, on_mismatch)


class LayeredModule(CheckpointedModule):
    """A module that runs its layers as a plan says; made by `checkpointed`.

    Attributes
    ----------
    module : nn.Module
        The original, or an `nn.Sequential` of the modules in a list of layers.
    loss : callable or None
    plan : Plan
    """

    def __init__(
        self,
        layers: Layers,
        plan: Plan,
        profiled: Profile,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        loss: Callable[..., Tensor] | None,
        on_mismatch: OnMismatch,
    ) -> None:
        super().__init__(_container(layers), args, kwargs, loss, on_mismatch)
        self.plan = plan
        program = translate_layers(plan.schedule, plan.graph, profiled.chain.lowered)
        self._runner: _LayerRunner = _LayerRunner(
            layers, loss, self._key.signature, program, profiled, self._modes.kinds
        )

    def _plain(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        (_, first), *others = name_parts(self._runner.layers, self.loss)
        value = first(*args, **kwargs)
        for _, part in others:
            value = part(value)
        return value


def _container(layers: Layers) -> nn.Sequential:
    if isinstance(layers, nn.Sequential):
        return layers
    parts = name_parts(layers, None)
    modules = {str(number): part for number, (_, part) in enumerate(parts) if isinstance(part, nn.Module)}
    container = nn.Sequential(OrderedDict(modules))
    container.training = any(module.training for module in modules.values())
    return container


class _LayerRunner:
    """The layers with their program."""

    def __init__(
        self,
        layers: Layers,
        loss: Callable[..., Tensor] | None,
        signature: Signature,
        program: LayerProgram,
        profiled: Profile,
        kinds: Sequence[str],
    ) -> None:
        self.layers = layers
        self.kinds = kinds
        self.loss = loss
        self.signature = signature
        self.program = program
        self.links = profiled.links
        self.boundaries = profiled.boundaries
        self.extras = profiled.extras
        self.parts = [part for link in self.links for part in link.parts]
        self.tensors = [self._tensor_keys(link) for link in self.links]
        takes_gradient = any(self.boundaries[0].differentiable)
        with_roots = [
            position
            for position, (i, _) in enumerate(program.backward, 1)
            if self.trained(i) or (i == 0 and takes_gradient)
        ]
        self.backward = program.backward[: max(with_roots)]

    def trained(self, i: int) -> list[Tensor]:
        """Return the parameters that get a gradient in the backward of a link."""
        return [*dict.fromkeys([*self.links[i].trainable(), *self.extras[i]])]

    def difference(self) -> str:
        """Return what differs in the layers, "" if nothing does."""
        parts = name_parts(self.layers, self.loss)
        if len(parts) != len(self.parts):
            return f"there are {len(parts)} layers, loss included, planned were {len(self.parts)}"
        for (name, part), planned_part in zip(parts, self.parts, strict=True):
            if part is not planned_part:
                return f'layer "{name}" is another object than when the plan was made'
        for link, planned in zip(self.links, self.tensors, strict=True):
            if link.modules != link.current_modules():
                return f'a module in layer "{link.name}" is another one than when the plan was made'
            now = self._tensor_keys(link)
            for (name, key), (then_name, then) in zip(now, planned, strict=False):
                if (name, key) != (then_name, then):
                    return f'"{name}" of layer "{link.name}" is {key}, planned was {then} for "{then_name}"'
            if len(now) != len(planned):
                return f'layer "{link.name}" has {len(now)} parameters and buffers, planned were {len(planned)}'
        return ""

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on these inputs and return the last output."""
        leaves = [inputs[leaf.number] if isinstance(leaf, Position) else leaf for leaf in self.signature.leaves]
        run = _Run(self, State(tuple(map(_detached, leaves)), self.signature.spec))
        with torch.no_grad():
            run.execute(self.program.forward)
        output = run.states.pop(len(self.links))
        differentiable = self.boundaries[-1].differentiable
        returned = tuple(leaf for leaf, flag in zip(output.leaves, differentiable, strict=True) if flag)
        token: object = None
        for position, (i, _) in reversed([*enumerate(self.backward)]):
            roots = self.trained(i)
            if i == 0:
                roots += [leaf for leaf, flag in zip(leaves, self.boundaries[0].differentiable, strict=True) if flag]  # type: ignore[misc]
            token = _LayerNode.apply(run, position, () if position else returned, token, *roots)  # type: ignore[no-untyped-call]
        with_graph = iter(token)  # type: ignore[call-overload]
        values = [next(with_graph) if flag else leaf for leaf, flag in zip(output.leaves, differentiable, strict=True)]
        return pytree.tree_unflatten(values, output.spec)

    @staticmethod
    def _tensor_keys(link: Link) -> list[tuple[str, tuple[object, ...]]]:
        return [
            (name, tensor_key(tensor))
            for module in link.modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]


class _Run:
    """One step: what is live of it, between its forward and the end of its backward."""

    def __init__(self, runner: _LayerRunner, arguments: State) -> None:
        self.runner = runner
        self.states = {0: arguments}
        self.saved: dict[int, Saved] = {}
        self.gradients: dict[int, Gradients] = {}
        self.next_position = 0
        self._found: Gradients = []
        self._ran: set[int] = set()
        self._moments: dict[int, Moment] = {}
        self._last_moment: Moment | None = None
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}
        self._autocast = _read_autocast(runner.kinds)
        self._in_backward = False

    def execute(self, steps: Sequence[Step]) -> None:
        """Do these steps."""
        for step in steps:
            if step.action == "backward":
                self._backward(step)
            elif step.action == "drop state":
                self.states.pop(step.link, None)
            elif step.action == "drop saved":
                self.saved.pop(step.link, None)
            elif step.action == "drop gradient":
                self.gradients.pop(step.link, None)
            else:
                self._forward(step.link, saving=step.action == "save")

    def backward(self, position: int, incoming: Sequence[Tensor | None]) -> Gradients:
        """Go on to the end of one part of the backward, and return the gradients of its link's roots."""
        runner = self.runner
        if position != self.next_position:
            raise ExecutionError(
                "the backward of a planned step runs once, and what it needs is gone: run the forward again"
            )
        self.next_position += 1
        self._in_backward = True
        if position == 0:
            given = iter(incoming)
            differentiable = runner.boundaries[-1].differentiable
            self.gradients[len(runner.links)] = [next(given) if flag else None for flag in differentiable]
        link, steps = runner.backward[position]
        self.execute(steps)
        found, self._found = self._found, []
        if link == 0:
            pairs = zip(self.gradients[0], runner.boundaries[0].differentiable, strict=True)
            found += [gradient for gradient, flag in pairs if flag]
        if self.next_position == len(runner.backward):
            self.states.clear()
            self.saved.clear()
            self.gradients.clear()
            self._moments.clear()
            self._versions.clear()
        return found

    def _forward(self, i: int, *, saving: bool) -> None:
        link = self.runner.links[i]
        first = i not in self._ran
        with contextlib.ExitStack() as stack:
            if first:
                self._note(i)
            else:
                self._check_versions(i)
                stack.enter_context(link.replay(self._moments[i]))
            if self._in_backward:
                for kind, dtype, enabled, cached in self._autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if saving:
                output, saved = link.forward_saving(self.states[i])
                self.saved.setdefault(i, saved)
            else:
                output = link.forward(self.states[i])
        after = self.runner.boundaries[i + 1]
        if first and (output.spec != after.spec or tuple(map(kind_of, output.leaves)) != after.kinds):
            raise ExecutionError(
                f'layer "{link.name}" returns {[kind_of(leaf) for leaf in output.leaves]}, planned was'
                f" {list(after.kinds)}: make a plan for this model"
            )
        if saving and tuple(edge is not None for edge in saved.outputs) != after.differentiable:
            raise ExecutionError(
                f'what layer "{link.name}" returns requires gradients elsewhere than when the plan was made:'
                " make a plan for this model"
            )
        self.states.setdefault(i + 1, output)

    def _backward(self, step: Step) -> None:
        i = step.link
        found, parameters = self.runner.links[i].backward(
            self.saved[i],
            self.gradients[i + 1],
            self.runner.trained(i),  # also where they are not the last: so it was measured
            keep_saved=step.keeps_saved,
        )
        by_leaf = iter(found)
        differentiable = self.runner.boundaries[i].differentiable
        self.gradients.setdefault(i, [next(by_leaf) if flag else None for flag in differentiable])
        if step.is_last:
            self._found = parameters

    def _note(self, i: int) -> None:
        """Note what a later run of a link must find as the first one did."""
        self._ran.add(i)
        if i in self.runner.program.repeated:
            link = self.runner.links[i]
            self._moments[i] = self._last_moment = link.remember(self._last_moment)
            tensors = [*link.fixed_tensors(), *self.runner.extras[i], *self.states[0].tensors]
            self._versions[i] = [(tensor, _version(tensor)) for tensor in tensors]

    def _check_versions(self, i: int) -> None:
        if any(_version(tensor) != version for tensor, version in self._versions[i]):
            raise ExecutionError(
                f'a parameter or buffer of layer "{self.runner.links[i].name}", or an argument of the call, was changed'
                " in place between forward and backward, and the layer must run again: change it after the backward"
            )


class _LayerNode(torch.autograd.Function):
    """The autograd node of one layer.

    The order of the nodes passes from one to the next as an empty tensor, on the device of the
    gradients: there autograd accumulates those of one layer before it begins the next.
    """

    @staticmethod
    def forward(ctx, run, position, outputs, token, *roots):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.run, ctx.position = run, position
        return outputs or torch.empty(0, device=(roots[0] if token is None else token).device)

    @staticmethod
    def backward(ctx, *incoming):  # type: ignore[no-untyped-def]
        if torch.is_grad_enabled():
            raise ExecutionError("a planned step has no second derivative: call backward without create_graph=True")
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise ExecutionError(
                "the backward of a planned step runs once, freeing what it saved as it goes:"
                " call backward without retain_graph=True, or run the plain module"
            )
        return (None, None, None, None, *ctx.run.backward(ctx.position, incoming))


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _read_autocast(kinds: Sequence[str]) -> list[tuple[str, torch.dtype, bool, bool]]:
    cached = torch.is_autocast_cache_enabled()
    return [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cached) for kind in kinds]
