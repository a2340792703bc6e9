"""Norms in mixed precision, which return other dtypes on the CPU than torch's fake tensors show."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx

from scheduler.pytorch.capture.operators import BATCH_NORMS, aten, is_getitem, nodes_in
from scheduler.pytorch.torch_private.operators import OpOverload
from scheduler.pytorch.torch_private.tensors import FakeTensor

_NORMS = {
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_group_norm.default,
    aten.native_layer_norm.default,
}
"""Operators that return a mean and a deviation after their output."""

_GRADIENTS = {aten.native_group_norm_backward.default}
"""Operators whose first output, the gradient of their second argument, has its dtype."""


def correct_norms(graph: fx.Graph) -> None:
    """Give what norms return the dtypes that it has at run time.

    The mean and deviation of an input in bfloat16 are in float32 if the parameters are, as under
    autocast, and its gradient in bfloat16; running statistics keep their dtype. Conversions to a
    dtype that a value has already are removed.
    """
    for node in list(graph.nodes):
        if node.target not in _NORMS and node.target not in _GRADIENTS:
            continue
        getitems = {user.args[1]: user for user in node.users if is_getitem(user)}
        outputs = list(node.meta["val"])
        for position, dtype in _dtypes(node).items():
            if outputs[position].dtype != dtype:
                outputs[position] = _in_dtype(outputs[position], dtype)
                if position in getitems:
                    getitems[position].meta["val"] = outputs[position]
                    _remove_conversions(graph, getitems[position])
                    _correct_views(getitems[position])
        node.meta["val"] = tuple(outputs)


def _dtypes(node: fx.Node) -> dict[int, torch.dtype]:
    """Return the dtypes of outputs of a norm, by position, as far as they are known."""
    if node.target in _GRADIENTS:
        return {0: cast("fx.Node", node.args[1]).meta["val"].dtype}
    given = [argument.meta["val"] for argument in nodes_in((node.args[1:], node.kwargs))]
    has_float32 = any(isinstance(value, Tensor) and value.dtype == torch.float32 for value in given)
    dtypes = dict.fromkeys((1, 2), torch.float32) if has_float32 else {}
    if norm := BATCH_NORMS.get(cast("OpOverload", node.target)):
        for position, statistic in zip(norm.updated, norm.statistics, strict=True):
            dtypes[position] = cast("fx.Node", node.args[statistic]).meta["val"].dtype
    return dtypes


def _in_dtype(value: FakeTensor, dtype: torch.dtype) -> Tensor:
    with value.fake_mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


def _correct_views(node: fx.Node) -> None:
    """Let what only detaches a value share its memory again."""
    for user in node.users:
        if user.target is aten.detach.default:
            value: Tensor = node.meta["val"]
            user.meta["val"] = value.detach()
            _correct_views(user)


def _remove_conversions(graph: fx.Graph, node: fx.Node) -> None:
    """Remove the conversions of a value to the dtype that it has."""
    own: Tensor = node.meta["val"]
    for user in list(node.users):
        is_copy = user.target is aten.copy.default and user.args[1] is node
        if is_copy or user.target is aten._to_copy.default:
            converted: Tensor = user.meta["val"]
            if converted.dtype == own.dtype and converted.shape == own.shape:
                user.replace_all_uses_with(node)
                graph.erase_node(user)
