"""Estimated costs of a step on a device that need not be there: a roofline, and workspaces by formula.

Estimates are for questions such as whether a model fits, and how much slower a plan is. What they
rest on is written into the graph (`Graph.assumptions`), and its `time_unit` names the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from scheduler.devices import Device
from scheduler.pytorch.capture.instructions import Call, Lowered
from scheduler.pytorch.capture.kernels import DROPOUT, LSTM_LAYER
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.costs.work import flops_of, is_view, memory_traffic, tensor_inputs
from scheduler.pytorch.torch_private.operators import schema_of
from scheduler.units import format_percent

_FLASH = (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_cudnn_attention.default)
_EFFICIENT = (aten._scaled_dot_product_efficient_attention.default,)
_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


def with_estimates(lowered: Lowered, device: Device) -> Lowered:
    """Return the same graph with the times and workspaces that are estimated for a device.

    Parameters
    ----------
    lowered : Lowered
    device : Device

    Raises
    ------
    InvalidOptionError
        If the speeds of the device are unknown.
    """
    operations = [
        replace(
            operation, time=estimated_seconds(item.node, device), workspace_bytes=estimated_workspace(item.node, device)
        )
        if isinstance(item, Call)
        else operation
        for operation, item in zip(lowered.graph.operations, lowered.instructions, strict=True)
    ]
    calls = [item.node for item in lowered.instructions if isinstance(item, Call)]
    graph = replace(
        lowered.graph,
        operations=operations,
        time_unit=device.time_unit,
        assumptions=(*lowered.graph.assumptions, *_assumptions(calls, device)),
    )
    return replace(lowered, graph=graph)


def estimated_seconds(node: fx.Node, device: Device) -> float:
    """Return the time of a call in seconds, estimated for a device.

    A view takes none, and causal attention half of the time of full attention.

    Parameters
    ----------
    node : Node
    device : Device
    """
    if is_view(node) or node.target is aten._unsafe_view.default:
        return 0.0
    flops = flops_of(node) / 2 if _is_causal(node) else flops_of(node)
    return device.seconds(flops, memory_traffic(node), _dtype_of_products(node))


def estimated_workspace(node: fx.Node, device: Device) -> int:
    """Return the bytes that a call allocates on a GPU in addition to its outputs, where a formula is known.

    Those of attention's backward: the gradient of the queries in float32, one number per row of
    scores, and gradients of keys and values per head of the queries if they share heads. Lengths
    and sizes are rounded as in flash_api.cpp and kernel_backward.h.
    """
    if device.platform == "cpu" or node.target not in _ROUNDED:
        return 0
    query, key = (argument.meta["val"] for argument in tensor_inputs(node)[1:3])
    *outer, length, size = query.shape
    steps = _ROUNDED[node.target]
    rows, columns = (-(-count // step) * step for count, step in zip((length, size), steps, strict=True))
    accumulated = outer[0] * outer[1] * rows * (columns + 1) * torch.float32.itemsize
    is_shared = outer[1] != key.shape[1]
    return int(accumulated + (2 * outer[0] * outer[1] * key.shape[2] * size * key.element_size() if is_shared else 0))


_ROUNDED = {
    aten._scaled_dot_product_flash_attention_backward.default: (128, 32),
    aten._scaled_dot_product_cudnn_attention_backward.default: (128, 32),
    aten._scaled_dot_product_efficient_attention_backward.default: (64, 64),
}
"""The multiples to which attention's backward rounds the length and the size of a head."""

_ATTENTION = (*_FLASH, *_EFFICIENT, *_ROUNDED)


def _is_causal(node: fx.Node) -> bool:
    """Return whether a call is attention that skips what lies above the diagonal."""
    if node.target not in _ATTENTION:
        return False
    names = [argument.name for argument in schema_of(node.target).arguments]
    return dict(zip(names, node.args, strict=False), **node.kwargs).get("is_causal") is True


def _dtype_of_products(node: fx.Node) -> str:
    """Return the dtype by which the rate of a call's products is known."""
    values = (argument.meta["val"] for argument in tensor_inputs(node))
    dtype = next((value.dtype for value in values if value.dtype.is_floating_point), torch.float32)
    if dtype != torch.float32:
        return str(dtype).removeprefix("torch.")
    if node.target in _CONVOLUTIONS:
        return "tf32" if torch.backends.cudnn.allow_tf32 else "float32"
    return "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _assumptions(calls: Iterable[fx.Node], device: Device) -> Iterator[str]:
    """Yield what the sizes and times of a step on a device rest on."""
    yield (
        f"times are estimated for {device.title}: {format_percent(device.compute_efficiency, 0)} of its peak FLOP/s,"
        f" {format_percent(device.memory_efficiency, 0)} of its bandwidth, {device.launch_seconds * 1e6:g} us for"
        f" each launch (peaks: {device.source})"
    )
    nodes = list(calls)
    targets = {node.target for node in nodes}
    on_device = any(value.device.type == "cuda" for value in _values(nodes))
    if device.platform == "cpu" or on_device:
        return
    found = [name for name, operators in _KERNELS.items() if not targets.isdisjoint(operators)]
    yield (
        "operators were traced on the CPU"
        + (f", and attention as on the device: {' and '.join(found)}" if found else "")
        + "; plan again from a trace on the device before you train there"
    )
    if not targets.isdisjoint(_CONVOLUTIONS):
        yield "convolutions need no workspace; cuDNN may take some, as far as memory is free"
    if LSTM_LAYER in targets:
        yield "recurrent layers save what oneDNN saves on the CPU; cuDNN saves a reserve of its own"
    if DROPOUT in targets:
        yield "dropout is that of the CPU, whose mask has as many bytes as that of CUDA"


_KERNELS = {
    "flash attention (cuDNN's, which torch prefers to it on some devices, saves as much)": _FLASH,
    "memory-efficient attention": _EFFICIENT,
}


def _values(nodes: Iterable[fx.Node]) -> Iterator[Tensor]:
    for node in nodes:
        for argument in tensor_inputs(node):
            yield argument.meta["val"]
