"""The work of one operator call: its floating-point operations, and the bytes that it moves."""

from __future__ import annotations

from torch import Tensor, fx

from scheduler.pytorch.capture.operators import aten, nodes_in, output_values, storage_key
from scheduler.pytorch.measurement.flop_formulas import count_flops

_GATHERING = frozenset({aten.embedding.default, aten.gather.default, aten.index.Tensor, aten.index_select.default})
"""Operators that read as much of their first argument as they write."""


def flops_of(node: fx.Node) -> float:
    """Return the floating-point operations of a call, 0 if no formula is known."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    return float(count_flops(node.target, args, kwargs, node.meta.get("val")))


def is_view(node: fx.Node) -> bool:
    """Return whether every output of a call is on the storage of an input."""
    inputs = {storage_key(a.meta["val"]) for a in tensor_inputs(node)}
    outputs = _tensor_outputs(node)
    return bool(outputs) and all(storage_key(value) in inputs for value in outputs)


def moved_bytes(node: fx.Node) -> int:
    """Return the bytes of the elements that a call reads and writes."""
    tensors = [argument.meta["val"] for argument in tensor_inputs(node)] + _tensor_outputs(node)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def memory_traffic(node: fx.Node) -> int:
    """Return the bytes that a call reads from memory and writes to it.

    What an expanded tensor repeats is read once, and of a table only what is looked up.
    """
    read, written = tensor_inputs(node), sum(_dense_bytes(value) for value in _tensor_outputs(node))
    if node.target in _GATHERING:
        return 2 * written + sum(_dense_bytes(argument.meta["val"]) for argument in read[1:])
    values: list[Tensor] = [argument.meta["val"] for argument in read]
    return written + sum(min(_dense_bytes(value), value.untyped_storage().nbytes()) for value in values)


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the arguments of a call that are tensors."""
    arguments = nodes_in((node.args, node.kwargs))
    return [argument for argument in arguments if isinstance(argument.meta["val"], Tensor)]


def _tensor_outputs(node: fx.Node) -> list[Tensor]:
    return [value for value in output_values(node) if isinstance(value, Tensor)]


def _dense_bytes(value: Tensor) -> int:
    return int(value.numel()) * value.element_size()
