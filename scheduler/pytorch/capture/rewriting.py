"""Rewrites of a captured joint graph, before it is planned.

None changes any value by a single bit. All run before planning, because merging nodes
afterwards would undo recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx

from scheduler.pytorch.capture.kernels import LSTM_LAYER
from scheduler.pytorch.capture.operators import (
    aten,
    check_call,
    ignores_running_statistics,
    is_getitem,
    is_random,
    returns_nothing,
    storage_key,
)
from scheduler.pytorch.torch_private.aot import GradAOTOutput
from scheduler.pytorch.torch_private.operators import OpOverload


def rewrite(module: fx.GraphModule) -> None:
    """Rewrite a joint graph in place.

    Drop profiler marks; refuse calls that cannot be planned; merge views of the same elements
    of the same storage; drop arguments that are never read; give every gradient memory of its
    own; remove calls whose outputs are unused.

    Raises
    ------
    CaptureError
        If the graph has a call that cannot be planned.
    """
    graph = module.graph
    _drop_profiler_marks(graph)
    _keep_workspaces(graph)
    for node in graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            check_call(node)
    _merge_views(graph)
    _drop_unread_statistics(graph)
    _give_gradients_own_memory(graph)
    _remove_unused(graph)
    graph.lint()
    module.recompile()


def _drop_profiler_marks(graph: fx.Graph) -> None:
    """Remove the calls of `torch.profiler.record_function`: they compute nothing, and a plan has its own order."""
    for node in reversed(graph.nodes):
        if getattr(node.target, "namespace", "") == "profiler" and not node.users:
            graph.erase_node(node)


def _keep_workspaces(graph: fx.Graph) -> None:
    """Replace LSTM layers by calls that return what their backward needs also where gradients are off."""
    for node in graph.find_nodes(op="call_function", target=aten.mkldnn_rnn_layer.default):
        node.target = LSTM_LAYER


def _merge_views(graph: fx.Graph) -> None:
    """Replace a node by an earlier one for the same elements of the same storage.

    The graph is functional, so equal storage, offset, sizes and strides mean equal values:
    detach, a transpose of a transpose, the second transpose of one weight.
    """
    known: dict[tuple[object, ...], fx.Node] = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op not in ("placeholder", "call_function") or not isinstance(value, Tensor):
            continue
        if value.layout != torch.strided or value.is_conj() or value.is_neg():
            continue
        key = (
            storage_key(value),
            value.storage_offset(),
            tuple(value.shape),
            value.stride(),
            value.dtype,
        )
        first = known.setdefault(key, node)
        if first is not node and node.op == "call_function" and not is_random(node):
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _drop_unread_statistics(graph: fx.Graph) -> None:
    """Do not pass running statistics to a batch-norm backward that uses batch statistics."""
    for node in graph.nodes:
        if node.op == "call_function" and ignores_running_statistics(node):
            node.args = (*node.args[:3], None, None, *node.args[5:])


def _give_gradients_own_memory(graph: fx.Graph) -> None:
    """Copy gradients that autograd's engine would copy, and those that overlap another result.

    The engine takes over a gradient without a copy if nothing else refers to it and its
    strides are those of the parameter. Copies inside the graph are part of the plan.
    """
    (returned,) = graph.find_nodes(op="output")
    values, descriptions = list(returned.args[0]), returned.meta["desc"]
    placeholders = graph.find_nodes(op="placeholder")
    primals = {node.meta["desc"]: node for node in placeholders}
    is_gradient = [isinstance(description, GradAOTOutput) for description in descriptions]
    taken: defaultdict[int, list[Tensor]] = defaultdict(list)
    for node in (*placeholders, *(v for v, own in zip(values, is_gradient, strict=True) if not own)):
        if isinstance(node, fx.Node) and isinstance(node.meta["val"], Tensor):
            taken[storage_key(node.meta["val"])].append(node.meta["val"])
    for i, (value, description) in enumerate(zip(values, descriptions, strict=True)):
        if not is_gradient[i] or value is None:
            continue
        wanted, gradient = primals[description.grad_of].meta["val"], value.meta["val"]
        others = taken[storage_key(gradient)]
        if not _engine_takes(gradient, wanted) or any(overlap(gradient, other) for other in others):
            value = values[i] = _insert_copy(graph, returned, value, wanted)
        taken[storage_key(value.meta["val"])].append(value.meta["val"])
    returned.args = (values,)


def _engine_takes(gradient: Tensor, parameter: Tensor) -> bool:
    if gradient.dtype != parameter.dtype or gradient.shape != parameter.shape:
        return True  # the engine converts it anyway
    if _dense_order(parameter) is not None:
        return all(
            a == b
            for size, a, b in zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
            if size != 1
        )
    return gradient.is_contiguous()


def _dense_order(tensor: Tensor) -> list[int] | None:
    """Return the dimensions from outermost to innermost if the tensor fills its memory, else None."""
    order = sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]), reverse=True)
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1:
            if tensor.stride(dim) != expected:
                return None
            expected *= tensor.shape[dim]
    return order


def overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether the memory of two tensors overlaps, from the first element of each to its last."""
    if storage_key(a) != storage_key(b) or not a.numel() or not b.numel():
        return False

    def span(tensor: Tensor) -> tuple[int, int]:
        extent: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        start = int(tensor.storage_offset()) * tensor.element_size()
        return start, start + (extent + 1) * tensor.element_size()

    (first, last), (other_first, other_last) = span(a), span(b)
    return first < other_last and other_first < last


def _insert_copy(graph: fx.Graph, returned: fx.Node, value: fx.Node, like: Tensor) -> fx.Node:
    """Return a new node that copies `value` into the strides of `like`."""
    order = _dense_order(like)
    with graph.inserting_before(returned):
        if order is not None and not like.is_contiguous():
            inverse = [order.index(dim) for dim in range(like.dim())]
            parts: list[_Part] = [(aten.permute.default, (order,), {}), _CLONE, (aten.permute.default, (inverse,), {})]
        else:
            parts = [_CLONE]
        for target, rest, options in parts:
            fake = value.meta["val"]
            with fake.fake_mode:
                result = target(fake, *rest, **options)
            value = graph.call_function(target, (value, *rest), options)
            value.meta = {"val": result, "partitioner_tag": "is_backward"}
    return value


_Part = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
"""An operator, and its arguments after the first."""
_CLONE: _Part = (aten.clone.default, (), {"memory_format": torch.contiguous_format})


def _remove_unused(graph: fx.Graph) -> None:
    """Remove calls whose outputs are unused, except checks and random draws, on which later draws depend."""
    for node in reversed(list(graph.nodes)):
        is_kept = node.op != "call_function" or is_random(node) or returns_nothing(node)
        if not node.users and not is_kept:
            graph.erase_node(node)
