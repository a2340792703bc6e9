"""One exported step for calls that differ in sizes only.

Tracing a model takes longer than anything else that a plan for another shape needs. A step
that was traced with symbolic sizes gives the step of a call by running its graph once under
fake tensors: no code of the model runs. Whatever the code found out about sizes while it was
traced must hold for the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument, map_aggregate

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.operators import storage_key
from scheduler.pytorch.torch_private.symbolic_sizes import SYMBOLIC, new_fake_mode, size_at

Conditions = Callable[[Mapping[int, int]], bool]
Varying = Mapping[int, frozenset[int]]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class VaryingGraph:
    """A joint graph with symbolic sizes.

    Attributes
    ----------
    module : GraphModule
        As exported.
    shapes : tuple of tuple of int
        The shapes of the arguments while it was traced.
    varying : dict of int to frozenset of int
        Dimensions with symbolic sizes, by position of the argument.
    conditions : tuple of callable
        Each says whether a trace holds where its sizes are replaced by others.
    """

    module: fx.GraphModule
    shapes: tuple[tuple[int, ...], ...]
    varying: Varying
    conditions: tuple[Conditions, ...]

    def at(self, shapes: Sequence[tuple[int, ...]]) -> fx.GraphModule:
        """Return the graph for arguments of these shapes.

        Raises
        ------
        CaptureError
            If the trace does not hold for them.
        """
        return _at_sizes(self.module, self.sizes(shapes))

    def sizes(self, shapes: Sequence[tuple[int, ...]]) -> dict[int, int]:
        """Return what each size of the trace is for arguments of these shapes.

        Raises
        ------
        CaptureError
            If the trace does not hold for them.
        """
        sizes: dict[int, int] = {}
        holds = True
        for position, (traced, wanted) in enumerate(zip(self.shapes, shapes, strict=True)):
            for dimension, (one, other) in enumerate(zip(traced, wanted, strict=True)):
                is_varying = dimension in self.varying.get(position, ())
                known = sizes.setdefault(one, other) if is_varying else one
                holds = holds and known == other
        if not holds or not all(hold(sizes) for hold in self.conditions):
            raise CaptureError(f"the step was traced under conditions that do not hold for the shapes {[*shapes]}")
        return sizes


def _at_sizes(module: fx.GraphModule, sizes: Mapping[int, int]) -> fx.GraphModule:
    """Return a graph with a number in place of each symbolic size, and the fake values of its nodes."""
    graph, fakes = fx.Graph(), new_fake_mode()
    copies: dict[fx.Node, Argument] = {}
    values: dict[fx.Node, Any] = {}
    storages: set[int] = set()
    with fakes, torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "output":
                copy = graph.output(_replaced(node.args[0], copies))
                copy.meta = dict(node.meta)
                continue
            if node.op == "call_function":
                args, kwargs = cast("Arguments", fx.map_arg((node.args, node.kwargs), lambda a: values[a]))
                value = cast("Callable[..., object]", node.target)(*args, **kwargs)
                if isinstance(value, (int, float)):
                    copies[node] = values[node] = value
                    continue
                if _is_backward_of_a_full_slice(node, args):
                    copies[node], values[node] = copies[node.args[0]], args[0]
                    continue
                args, kwargs = cast("Arguments", _replaced((node.args, node.kwargs), copies))
                copy = graph.create_node(node.op, node.target, args, kwargs, node.name)
            else:
                original = node.meta["val"] if "val" in node.meta else getattr(module, str(node.target))
                value = _empty_like(original, sizes, storages)
                copy = graph.create_node(node.op, node.target, (), {}, node.name)
            copies[node], values[node] = copy, value
            copy.meta = {**node.meta, "val": value}
    return fx.GraphModule(module, graph)


def _is_backward_of_a_full_slice(node: fx.Node, args: tuple[Any, ...]) -> bool:
    """Return whether a call passes its gradient on: torch leaves out a slice of all elements if sizes are numbers."""
    if node.target is not torch.ops.aten.slice_backward.default:
        return False
    gradient, shape = args[:2]
    return tuple(gradient.shape) == tuple(shape)


def _replaced(arguments: Argument, copies: Mapping[fx.Node, Argument]) -> Argument:
    def replace(entry: Argument) -> Argument:
        if isinstance(entry, SYMBOLIC):
            raise CaptureError("a symbolic size is an argument of a call")
        return copies[entry] if isinstance(entry, fx.Node) else entry

    return map_aggregate(arguments, replace)


def _empty_like(value: object, sizes: Mapping[int, int], storages: set[int]) -> object:
    """Return a new tensor with the sizes of an input; other values are kept."""
    if not isinstance(value, Tensor):
        return value
    shape = [size_at(size, sizes) for size in value.shape]
    strides = [size_at(stride, sizes) for stride in value.stride()]
    result = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    own_bytes = size_at(value.untyped_storage().nbytes(), sizes)
    if value.storage_offset() != 0 or own_bytes != result.untyped_storage().nbytes() or storage_key(value) in storages:
        raise CaptureError("an input shares its memory with others")
    storages.add(storage_key(value))
    return result.requires_grad_(value.requires_grad)
