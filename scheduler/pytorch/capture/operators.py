"""Facts about single ATen operators: randomness, batch norm, in-place variants, signatures."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from scheduler.errors import CaptureError
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.operators import OpOverload, schema_of
from scheduler.pytorch.torch_private.tensors import storage_id

aten = torch.ops.aten


@dataclass(frozen=True)
class BatchNorm:
    """The ways to run one functional batch norm that updates running statistics.

    Attributes
    ----------
    update : OpOverload
        Updates the statistics in place; takes the same arguments.
    replay : OpOverload
        Produces the same outputs and leaves the statistics as they are.
    statistics : tuple of int
        Positions of the running statistics among the arguments.
    updated : tuple of int
        Positions of the new statistics among the outputs of the functional operator.
    momentum : int or None
        Position of the argument that is 0 for `replay`, if it takes the statistics too.
    """

    update: OpOverload
    replay: OpOverload
    statistics: tuple[int, ...]
    updated: tuple[int, ...]
    momentum: int | None = None


BATCH_NORMS = {
    aten._native_batch_norm_legit_functional.default: BatchNorm(
        update=aten._native_batch_norm_legit.default,
        replay=aten._native_batch_norm_legit.no_stats,
        statistics=(3, 4),
        updated=(3, 4),
    ),
    aten._batch_norm_with_update_functional.default: BatchNorm(
        update=aten._batch_norm_with_update.default,
        replay=aten._batch_norm_with_update.default,
        statistics=(3, 4),
        updated=(4, 5),
        momentum=5,
    ),
}

_BATCH_NORM_BACKWARDS = {
    # Position of the argument that tells whether batch statistics were used; None if they always are.
    aten.native_batch_norm_backward.default: 7,
    aten.cudnn_batch_norm_backward.default: None,
    aten.batch_norm_backward.default: 7,
}


IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.relu6.default: aten.relu6_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.clamp.default: aten.clamp_.default,
    aten.clamp_min.default: aten.clamp_min_.default,
}
"""In-place variants of idempotent operators: a recomputation may find its input overwritten already."""


UPDATES = {aten.add.Tensor: aten.add_.Tensor, aten.mul.Tensor: aten.mul_.Tensor}
"""In-place variants of the operators that change a counter."""


def may_overwrite_input(node: fx.Node, bytes_of: Callable[[Tensor], int]) -> bool:
    """Return whether a call can write its output over its input, whatever is recomputed.

    Nothing else may read the input, and no other tensor may share its storage.

    Parameters
    ----------
    node : Node
    bytes_of : callable
        Returns the bytes that the storage of a fake tensor holds at run time.
    """
    if node.target not in IN_PLACE or not isinstance(node.args[0], fx.Node):
        return False
    source = node.args[0]
    before, after = source.meta["val"], node.meta["val"]
    if source.op != "call_function" or len(source.users) != 1 or source in node.args[1:]:
        return False
    maker = source.args[0] if is_getitem(source) else source
    shared = {storage_key(value) for value in _tensors_around(maker) if value is not before}
    return (
        storage_key(before) not in shared
        and bytes_of(before) == bytes_of(after)
        and (before.shape, before.stride(), before.dtype) == (after.shape, after.stride(), after.dtype)
    )


def _tensors_around(node: object) -> list[Tensor]:
    """Return the fake tensors that a call reads and produces."""
    assert isinstance(node, fx.Node)
    values = [argument.meta["val"] for argument in nodes_in((node.args, node.kwargs))]
    if node.op == "call_function" and isinstance(node.meta["val"], (tuple, list)):
        getitems = {user.args[1]: user.meta["val"] for user in node.users if is_getitem(user)}
        values += [getitems.get(i, value) for i, value in enumerate(node.meta["val"])]
    return [value for value in values if isinstance(value, Tensor)]


def ignores_running_statistics(node: fx.Node) -> bool:
    """Return whether a batch-norm backward is given running statistics (3 and 4) that it does not read."""
    if node.target not in _BATCH_NORM_BACKWARDS:
        return False
    flag = _BATCH_NORM_BACKWARDS[node.target]
    return flag is None or node.args[flag] is True


def is_random(node: fx.Node) -> bool:
    """Return whether a call draws from a generator."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = dict(zip((a.name for a in schema_of(target).arguments), node.args, strict=False)) | dict(node.kwargs)
    probability = given.get("dropout_p", 0.0 if _has_argument(target, "dropout_p") else None)
    return probability is None or probability not in (0, 0.0)


def given_generator(node: fx.Node) -> torch.Generator | None:
    """Return the generator that a call is given, None if it draws from the default one of its device."""
    values = (argument.meta["val"] for argument in nodes_in((node.args, node.kwargs)))
    return next((value for value in values if isinstance(value, torch.Generator)), None)


def is_collective(node: fx.Node) -> bool:
    """Return whether a call communicates with other processes; it must run once, in the same order on all."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES


NEEDS_COMPILER = (
    "which cannot be planned: PyTorch runs it only compiled, and compiles nothing in a step that is captured or"
    " measured. Use scaled_dot_product_attention in its place, or plan the modules beside it one by one"
)
"""Why FlexAttention and the like are refused."""
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem")


def _has_argument(target: OpOverload, name: str) -> bool:
    return any(argument.name == name for argument in schema_of(target).arguments)


def returns_nothing(node: fx.Node) -> bool:
    """Return whether a call only checks its arguments: it raises an error, or has no effect."""
    return isinstance(node.target, OpOverload) and not schema_of(node.target).returns


def is_getitem(node: fx.Node) -> bool:
    """Return whether a node takes one output of an operator with several."""
    return node.op == "call_function" and node.target is operator.getitem


def owner(node: fx.Node) -> fx.Node:
    """Return the call that produces a node's value."""
    return cast("fx.Node", node.args[0]) if is_getitem(node) else node


def output_values(node: fx.Node) -> list[object]:
    """Return the fake values that a call returns, one per output."""
    if returns_nothing(node):
        return []
    value = node.meta["val"]
    return list(value) if isinstance(value, (tuple, list)) else [value]


def nodes_in(arguments: object) -> Iterator[fx.Node]:
    """Yield the nodes in nested arguments."""
    for leaf in pytree.tree_leaves(arguments):
        if isinstance(leaf, fx.Node):
            yield leaf


def storage_key(value: Tensor) -> int:
    """Return the identity of the storage of a fake tensor."""
    return storage_id(value.untyped_storage())


def describe_call(node: fx.Node) -> str:
    """Return the signature of a call: operator, shapes, strides and dtypes, other arguments."""

    def text(value: object) -> str:
        if isinstance(value, fx.Node):
            return _describe_value(value.meta["val"])
        if isinstance(value, (tuple, list)):
            return "[" + ", ".join(text(entry) for entry in value) + "]"
        return repr(value)

    parts = [text(argument) for argument in node.args]
    parts += [f"{key}={text(value)}" for key, value in sorted(node.kwargs.items())]
    return f"{node.target}({', '.join(parts)})"


def _describe_value(value: object) -> str:
    if isinstance(value, torch.Generator):
        return "generator"
    if not isinstance(value, Tensor):
        return repr(value)
    shape, stride = "x".join(map(str, value.shape)), ",".join(map(str, value.stride()))
    return f"{str(value.dtype).removeprefix('torch.')}[{shape}|{stride}]"


def check_call(node: fx.Node) -> None:
    """Refuse a call that cannot be planned.

    Raises
    ------
    CaptureError
        If the node is not a call of an ATen overload (or getitem) with static shapes,
        changes an input in place, or is a recurrent kernel.
    """
    target = node.target
    if target is torch.ops.higher_order.with_effects:
        called = str(node.args[1])
        advice = (
            "use the functional form in torch.distributed._functional_collectives, which runs exactly once"
            if called.startswith("c10d")
            else 'leave out what checks or prints values, or use compiler="eager", with which checks are planned'
        )
        raise CaptureError(f'the graph calls "{called}" for its side effects, which cannot be planned: {advice}')
    if str(target).startswith("flex_attention"):
        raise CaptureError(f"the step calls FlexAttention, {NEEDS_COMPILER}")
    if not isinstance(target, OpOverload):
        raise CaptureError(
            f'the graph calls "{target}", which is not an ATen operator: plan without it, or use granularity="modules"'
        )
    if "rnn" in str(target) and target is not aten.mkldnn_rnn_layer_backward.default:
        raise CaptureError(
            f'"{target}" saves a tensor for its backward whose size is known only when it runs under autograd:'
            ' plan by modules, with granularity="modules"'
        )
    if schema_of(target).is_mutable:
        raise CaptureError(f'operator "{target}" changes its input in place and could not be made functional')
    for value in output_values(node):
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            raise CaptureError(
                f'operator "{target}" returns a size or number that depends on data; shapes must be static'
            )
