"""Run a planned chain of layers: any schedule of its lowered graph, without capturing the model.

The forward runs the schedule up to the loss, and then creates one autograd node per layer. In
the backward, each node runs the schedule on to the end of its own layer's last backward and
returns the gradients of that layer's parameters: they are accumulated layer by layer, and
hooks on them run, as in plain autograd.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from scheduler.pytorch.capture.arguments import Position, Signature
from scheduler.pytorch.execute.guards import check_single_backward, tensor_key
from scheduler.pytorch.execute.module import ModuleSettings, RunnerModule
from scheduler.pytorch.layerwise.groups import Link, State
from scheduler.pytorch.layerwise.layer_run import LayerRun, PlannedLayers
from scheduler.pytorch.layerwise.profiling import Profile
from scheduler.pytorch.layerwise.program import LayerProgram
from scheduler.pytorch.layerwise.survey import Layers, name_parts, run_in_turn
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.modules import buffers_of, parameters_of


class LayeredModule(RunnerModule):
    """A module that runs its layers as a plan says; returned by `checkpointed`.

    Attributes
    ----------
    module : nn.Module
        The original, or an `nn.Sequential` of the modules in a list of layers.
    """

    runner: _LayerRunner

    def __init__(
        self,
        layers: Layers,
        profiled: Profile,
        program: LayerProgram,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        **settings: Unpack[ModuleSettings],
    ) -> None:
        super().__init__(_container(layers), args, kwargs, **settings)
        planned = PlannedLayers(profiled.links, profiled.boundaries, profiled.extras, program, self.modes.device_types)
        self.runner = _LayerRunner(layers, self.loss, self.planned_call.signature, planned)

    def run_plain(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Run the layers and the loss without a plan."""
        return run_in_turn(name_parts(self.runner.layers, self.loss), args, kwargs)


def _container(layers: Layers) -> nn.Sequential:
    if isinstance(layers, nn.Sequential):
        return layers
    parts = name_parts(layers, None)
    modules = {str(number): part for number, (_, part) in enumerate(parts) if isinstance(part, nn.Module)}
    container = nn.Sequential(OrderedDict(modules))
    container.training = any(module.training for module in modules.values())
    return container


class _LayerRunner:
    """Starts a `LayerRun` for each call, and joins its backward to autograd's graph."""

    def __init__(
        self, layers: Layers, loss: Callable[..., Tensor] | None, signature: Signature, planned: PlannedLayers
    ) -> None:
        self.layers = layers  # not in the module, which would register them
        self._loss = loss
        self._signature = signature
        self._planned = planned
        self._backward = planned.backward
        self._parts = [part for link in planned.links for part in link.parts]
        self._flags = _training_flags(planned.links)
        self._tensors = [_tensor_keys(link) for link in planned.links]

    def difference(self) -> str:
        """Return what differs in the layers since the plan was made, "" if nothing does."""
        parts = name_parts(self.layers, self._loss)
        if len(parts) != len(self._parts):
            return f"there are {len(parts)} layers, including the loss, but the plan has {len(self._parts)}"
        for (name, part), planned_part in zip(parts, self._parts, strict=True):
            if part is not planned_part:
                return f'layer "{name}" is another object than when the plan was made'
        for link, planned in zip(self._planned.links, self._tensors, strict=True):
            if link.modules != link.current_modules():
                return f'a module in layer "{link.name}" is another one than when the plan was made'
            now = _tensor_keys(link)
            for (name, key), (then_name, then) in zip(now, planned, strict=False):
                if (name, key) != (then_name, then):
                    return f'"{name}" of layer "{link.name}" is {key}, but the plan has {then} for "{then_name}"'
            if len(now) != len(planned):
                return f'layer "{link.name}" has {len(now)} parameters and buffers, but the plan has {len(planned)}'
        for (name, now_trains), (_, then_trained) in zip(
            _training_flags(self._planned.links), self._flags, strict=True
        ):
            if now_trains != then_trained:
                return (
                    f'training of a module in layer "{name}" was {then_trained} when the plan was made, is {now_trains}'
                )
        return ""

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors that get a gradient and are neither arguments nor registered, by name."""
        extras = zip(self._planned.links, self._planned.extras, strict=True)
        return {f"tensor {i} of {link.name}": x for link, found in extras for i, x in enumerate(found)}

    def run(self, inputs: Sequence[Tensor]) -> object:
        """Run the forward on these inputs and return the last output."""
        planned = self._planned
        leaves = [inputs[leaf.number] if isinstance(leaf, Position) else leaf for leaf in self._signature.leaves]
        run = LayerRun(planned, self._backward, State(tuple(map(_detached, leaves)), self._signature.spec))
        with torch.no_grad():
            run.execute(planned.program.forward)
        output = run.states.pop(len(planned.links))
        differentiable = planned.boundaries[-1].differentiable
        returned = tuple(leaf for leaf, flag in zip(output.leaves, differentiable, strict=True) if flag)
        arguments = zip(leaves, planned.boundaries[0].differentiable, strict=True)
        trained_arguments = [leaf for leaf, flag in arguments if flag]
        token: object = None
        for position, (i, _) in reversed([*enumerate(self._backward)]):
            roots: list[object] = [*planned.trained(i), *(trained_arguments if i == 0 else [])]
            token = _LayerNode.apply(run, position, () if position else returned, token, *roots)  # type: ignore[no-untyped-call]
        with_graph = iter(token)  # type: ignore[call-overload]
        values = [next(with_graph) if flag else leaf for leaf, flag in zip(output.leaves, differentiable, strict=True)]
        return pytree.tree_unflatten(values, output.spec)


def _tensor_keys(link: Link) -> list[tuple[str, tuple[object, ...]]]:
    return [
        (name, tensor_key(tensor))
        for module in link.modules
        for held in (parameters_of(module), buffers_of(module))
        for name, tensor in held.items()
        if tensor is not None
    ]


def _training_flags(links: Sequence[Link]) -> list[tuple[str, bool]]:
    return [(link.name, module.training) for link in links for module in link.modules]


class _LayerNode(torch.autograd.Function):
    """The autograd node of one layer.

    The order of the nodes passes from one to the next as an empty tensor on the device of the
    gradients: there, autograd accumulates the gradients of one layer before it begins the next.
    """

    @staticmethod
    def forward(ctx, run, position, outputs, token, *roots):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.run, ctx.position = run, position
        return outputs or torch.empty(0, device=(roots[0] if token is None else token).device)

    @staticmethod
    def backward(ctx, *incoming):  # type: ignore[no-untyped-def]
        check_single_backward()
        return (None, None, None, None, *ctx.run.backward(ctx.position, incoming))


def _detached(leaf: object) -> object:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
