"""Operations of the backward that write their output over an input.

If only one operation reads a gradient, its output can take over the gradient's memory. Such
an operation must run exactly once, because a second run would find its input overwritten. All
these operators read each element (softmax: each row) before they write it, so every bit of the
result is the same as with an output of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, fx
from torch.fx.node import Argument

from scheduler.pytorch.capture.lowering.storages import StorageSizes
from scheduler.pytorch.capture.operators import aten, nodes_in, owner, storage_key
from scheduler.pytorch.torch_private.operators import OpOverload, schema_of

OVER_FIRST = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.div.Scalar: aten.div_.Scalar,
    aten.div.Tensor: aten.div_.Tensor,
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.mul.Scalar: aten.mul_.Tensor,  # mul_.Scalar rounds the number first
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.neg.default: aten.neg_.default,
    aten.sigmoid_backward.default: aten.sigmoid_backward.grad_input,
    aten.silu_backward.default: aten.silu_backward.grad_input,
    aten.sub.Tensor: aten.sub_.Tensor,
    aten.tanh_backward.default: aten.tanh_backward.grad_input,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
}
"""The variants of operators that write over their first argument: in place, or with it as their `out` argument."""

OVER_FIRST_ON_CPU = {
    aten._log_softmax_backward_data.default: aten._log_softmax_backward_data.out,
    aten._softmax_backward_data.default: aten._softmax_backward_data.out,
}
"""The same for operators of which only the CPU kernels are known to read a row before they write it."""

REUSING = {*OVER_FIRST.values(), *OVER_FIRST_ON_CPU.values()}

COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)


@dataclass(frozen=True)
class Reuse:
    """How a call writes over one of its inputs.

    Attributes
    ----------
    source : Node
        The input.
    target : OpOverload
    args, kwargs
        Arguments of the target.
    """

    source: fx.Node
    target: OpOverload
    args: tuple[Argument, ...]
    kwargs: dict[str, Argument]


def find_reuses(
    graph: fx.Graph, backward: Collection[fx.Node], sizes: StorageSizes, *, as_eager: bool = False
) -> dict[fx.Node, Reuse]:
    """Return the calls of the backward that can write over an input, with the way to do so.

    Parameters
    ----------
    graph : Graph
        Functional, that is, no call changes its inputs.
    backward : collection of Node
        The calls of the backward.
    sizes : StorageSizes
        An input is written over only if its storage is as large as that of the output.
    as_eager : bool
        Whether only sums write over an input: autograd adds up gradients in place, too.
    """
    storages: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "output" and isinstance(node.meta.get("val"), Tensor):
            storages.setdefault(storage_key(node.meta["val"]), []).append(node)
    found = {}
    for node in graph.nodes:
        is_candidate = node in backward and (not as_eager or node.target is aten.add.Tensor)
        for reuse in _candidates(node, sizes) if is_candidate else ():
            if _is_spent(reuse.source, node, storages[storage_key(reuse.source.meta["val"])], backward):
                found[node] = reuse
                break
    return found


def _candidates(node: fx.Node, sizes: StorageSizes) -> Iterator[Reuse]:
    """Yield the ways in which a call could write over an input with the layout of its output."""
    target = _target_over_first(node)
    if target is None:
        return
    orders = [node.args]
    if node.target in COMMUTATIVE and not node.kwargs:
        orders.append(node.args[::-1])
    for args in orders:
        source = args[0]
        if isinstance(source, fx.Node) and _layout(source, sizes) == _layout(node, sizes):
            into: dict[str, Argument] = {a.name: source for a in schema_of(target).arguments if a.is_out}
            yield Reuse(source, target, args, node.kwargs | into)


def _target_over_first(node: fx.Node) -> OpOverload | None:
    if not isinstance(node.target, OpOverload):
        return None
    found = OVER_FIRST.get(node.target)
    if found is None and node.target in OVER_FIRST_ON_CPU and node.meta["val"].device.type == "cpu":
        return OVER_FIRST_ON_CPU[node.target]
    return found


def _layout(node: fx.Node, sizes: StorageSizes) -> tuple[object, ...]:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return (value,)
    return value.shape, value.stride(), value.dtype, value.device, sizes.of(value)


def _is_spent(source: fx.Node, node: fx.Node, sharing: Sequence[fx.Node], backward: Collection[fx.Node]) -> bool:
    """Return whether the backward allocated the storage of `source` and, apart from views, only `node` reads it."""
    if any(other.op != "call_function" or owner(other) not in backward for other in sharing):
        return False
    readers = {user for other in sharing for user in other.users}
    if not readers <= {node, *sharing} or set(source.users) != {node}:
        return False
    return [argument for argument in nodes_in((node.args, node.kwargs)) if argument in sharing] == [source]
