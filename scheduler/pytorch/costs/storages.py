"""What the outputs of calls hold at run time, asked from the storages of a real run.

Some operators return a tensor on a larger storage than its fake tensor shows: a reduced
`mse_loss` is one number in memory for all of its terms, and `slice_scatter` clones the whole
storage of its input. Where a step may be run, each distinct call of an operator that could
differ is run once; where it may not (fake tensors, device "meta"), and where such a run fails,
the operators that are known to differ are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from scheduler.pytorch.capture.joint import Joint
from scheduler.pytorch.capture.lowering.storages import StorageSizes
from scheduler.pytorch.capture.operators import (
    aten,
    describe_call,
    is_collective,
    is_getitem,
    nodes_in,
    output_values,
    storage_key,
)
from scheduler.pytorch.measurement.rng import kept_generators
from scheduler.pytorch.torch_private.autograd import autocast_disabled
from scheduler.pytorch.torch_private.operators import OpOverload, call_of, schema_of
from scheduler.pytorch.torch_private.pytree import tree_leaves
from scheduler.pytorch.torch_private.tensors import has_data

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of one call."""

_PRODUCTS = ("addmm", "baddbmm", "bmm", "convolution", "convolution_backward", "mm")
_FLASH_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_SOFTMAX = ("_log_softmax", "_log_softmax_backward_data", "_safe_softmax", "_softmax", "_softmax_backward_data")
_LEGIT_BATCH_NORM = ("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training")
_BATCH_NORM = (*_LEGIT_BATCH_NORM, "native_batch_norm_backward")
_NORM = ("native_group_norm", "native_layer_norm")
_NLL = ("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward")
_POOL = ("avg_pool2d", "max_pool2d_with_indices")
_REDUCTIONS = ("amax", "amin", "logsumexp", "mean", "prod", "std", "sum", "var", "var_mean")
_INDEXING = ("embedding", "embedding_dense_backward", "gather", "index", "index_add", "index_put", "index_select")
_COPIES = ("_to_copy", "_unsafe_view", "cat", "constant_pad_nd", "select_backward", "slice_backward", "stack")
_FILLED = ("arange", "fill", "full_like", "new_ones", "new_zeros", "ones_like", "scalar_tensor", "zeros", "zeros_like")
_OTHERS = ("cumsum", "native_dropout", "scatter_add", "topk")

EXACT = frozenset(
    f"aten::{name}"
    for name in (
        *(*_PRODUCTS, *_SOFTMAX, *_BATCH_NORM, *_NLL, *_REDUCTIONS, *_INDEXING, *_COPIES, *_FILLED, *_OTHERS),
        *(name for forward in (_FLASH_ATTENTION, *_NORM, *_POOL) for name in (forward, f"{forward}_backward")),
    )
)
"""Operators that return storages as their fake tensors show, in addition to views and pointwise operators."""

CLONES_STORAGE = frozenset(
    {
        aten.as_strided_scatter.default,
        aten.copy.default,
        aten.diagonal_scatter.default,
        aten.select_scatter.default,
        aten.slice_scatter.default,
    }
)
"""Operators whose output is on a clone of the whole storage of their first argument."""


def find_storage_sizes(joint: Joint, *, may_run: bool) -> StorageSizes:
    """Return what the storages of a joint graph hold at run time.

    Parameters
    ----------
    joint : Joint
    may_run : bool
        Whether single calls may be run on data of their own, with the random state as it was.
    """
    held: dict[int, int] = {}
    sizes = StorageSizes(held)
    known: dict[str, list[int | None]] = {}
    for node in joint.module.graph.nodes:
        if node.op != "call_function" or is_getitem(node) or is_exact(node):
            continue
        signature = _signature(node, sizes)
        if signature not in known:
            found = _run(node, sizes) if may_run else None
            known[signature] = known_bytes(node, sizes) if found is None else found
        for value, size_bytes in zip(output_values(node), known[signature], strict=False):
            if isinstance(value, Tensor) and size_bytes is not None and size_bytes != sizes.of(value):
                held[storage_key(value)] = size_bytes
    return sizes


def can_run_on(tensors: Iterable[object]) -> bool:
    """Return whether calls on such tensors may be run: none is fake or on device "meta"."""
    return all(has_data(value) for value in tensors if isinstance(value, Tensor))


def is_exact(node: fx.Node) -> bool:
    """Return whether a call is of a kind that returns storages as its fake tensors show."""
    target = node.target
    if not isinstance(target, OpOverload) or target in CLONES_STORAGE:
        return False
    return target.is_view or torch.Tag.pointwise in target.tags or schema_of(target).name in EXACT


def known_bytes(node: fx.Node, sizes: StorageSizes) -> list[int | None]:
    """Return the bytes of each output's storage, None where its fake tensor is not known to show other bytes.

    Parameters
    ----------
    node : Node
    sizes : StorageSizes
        What the storages of its arguments hold.
    """
    rule = _KNOWN.get(cast("OpOverload", node.target))
    return [] if rule is None else rule(node, sizes)


def arguments_on_own_storages(node: fx.Node, bytes_of: Callable[[Tensor], int]) -> Arguments:
    """Return real arguments for a call, on storages of the captured sizes.

    Floating-point numbers are 0.5, a valid probability, variance and diagonal; all others are
    0, a valid index everywhere.

    Parameters
    ----------
    node : Node
    bytes_of : callable
        Returns the bytes that the storage of a fake tensor holds at run time.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def real(argument: fx.Node) -> Argument:
        value = argument.meta["val"]
        if isinstance(value, torch.Generator):
            return cast("Argument", torch.Generator(value.device))  # the user's own must not advance
        if not isinstance(value, Tensor):
            return cast("Argument", value)
        key = storage_key(value)
        if key not in storages:
            data = torch.zeros(bytes_of(value), dtype=torch.uint8, device=value.device)
            storages[key] = data.untyped_storage()
            if value.dtype.is_floating_point:
                torch.empty(0, dtype=value.dtype, device=value.device).set_(storages[key]).fill_(0.5)
        tensor = torch.empty(0, dtype=value.dtype, device=value.device)
        tensor.set_(storages[key], int(value.storage_offset()), value.shape, value.stride())
        return tensor

    return cast("Arguments", fx.map_arg((node.args, node.kwargs), real))


def _run(node: fx.Node, sizes: StorageSizes) -> list[int | None] | None:
    """Return the bytes of each output's storage after a run on data of its own, None if the call cannot be run."""
    if is_collective(node) or any(value.device.type == "meta" for value in (*_given(node), *_returned(node))):
        return None
    target = cast("OpOverload", node.target)
    try:
        with torch.no_grad(), autocast_disabled(), kept_generators():
            args, kwargs = arguments_on_own_storages(node, sizes.of)
            given = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
            outputs = _as_list(call_of(target)(*args, **kwargs))
    except Exception:  # operators reject data in many ways; this one then holds what is known of it
        return None
    return [
        value.untyped_storage().nbytes() if isinstance(value, Tensor) and storage_key(value) not in given else None
        for value in outputs
    ]


def _signature(node: fx.Node, sizes: StorageSizes) -> str:
    """Return the signature of a call and of the storages of its arguments."""
    number: dict[int, int] = {}
    places = [
        (number.setdefault(storage_key(value), len(number)), sizes.of(value), int(value.storage_offset()), value.device)
        for value in _given(node)
    ]
    return f"{describe_call(node)} {places}"


def _given(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors that a call reads."""
    values = [argument.meta["val"] for argument in nodes_in((node.args, node.kwargs))]
    return [value for value in values if isinstance(value, Tensor)]


def _returned(node: fx.Node) -> list[Tensor]:
    """Return the fake tensors that a call returns."""
    return [value for value in output_values(node) if isinstance(value, Tensor)]


def _as_list(result: object) -> list[object]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _dense_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _reduced_loss(node: fx.Node, _: StorageSizes) -> list[int | None]:
    """Storage of a loss that is reduced in memory for all of its terms."""
    terms = torch.broadcast_tensors(*_given(node))[0]
    return [terms.numel() * _returned(node)[0].element_size()]


def _resized_like_input(node: fx.Node, _: StorageSizes) -> list[int | None]:
    """Storage of an output that is allocated as large as the input and then resized."""
    return [max(_dense_bytes(value) for value in (_given(node)[0], *_returned(node)))]


def _cloned_storage(node: fx.Node, sizes: StorageSizes) -> list[int | None]:
    """Storage of an output on a clone of the input's storage; an input that overlaps itself is cloned densely."""
    source = _given(node)[0]
    return [None if _overlaps_itself(source) else sizes.of(source) // source.element_size() * source.element_size()]


def _overlaps_itself(value: Tensor) -> bool:
    return any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True))


def _embedding_bag(node: fx.Node, _: StorageSizes) -> list[int | None]:
    """The CPU kernel counts one more index than there are, and then resizes, unless it sums."""
    indices = _given(node)[1]
    mode = cast("int", dict(enumerate(node.args)).get(4, node.kwargs.get("mode", 0)))
    if indices.device.type != "cpu" or mode == 0:
        return [None, None, None, None]
    return [None, _dense_bytes(indices) + indices.element_size(), None, None]


def _unless_unreduced(rule: _Rule, position: int) -> _Rule:
    """Apply a rule where the argument `reduction` asks for a sum or a mean."""

    def bytes_of(node: fx.Node, sizes: StorageSizes) -> list[int | None]:
        given = dict(enumerate(node.args)).get(position, node.kwargs.get("reduction", _MEAN))
        return [None] if given == _UNREDUCED else rule(node, sizes)

    return bytes_of


_UNREDUCED, _MEAN = 0, 1
_Rule = Callable[[fx.Node, StorageSizes], list["int | None"]]

_KNOWN: dict[OpOverload, _Rule] = {
    aten.mse_loss.default: _unless_unreduced(_reduced_loss, 2),
    aten.smooth_l1_loss.default: _unless_unreduced(_reduced_loss, 2),
    aten.soft_margin_loss.default: _unless_unreduced(_reduced_loss, 2),
    aten.binary_cross_entropy.default: _unless_unreduced(_reduced_loss, 3),
    aten.col2im.default: _resized_like_input,
    aten.im2col.default: _resized_like_input,
    aten._embedding_bag.default: _embedding_bag,
    **dict.fromkeys(CLONES_STORAGE, _cloned_storage),
}
"""How to compute the storages of operators whose fake tensors show other sizes."""
