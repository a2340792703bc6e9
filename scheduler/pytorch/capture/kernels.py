"""Operators of ours that compute, bit by bit, what eager PyTorch computes on the CPU.

They replace operators of ATen that a captured graph cannot run: one that rounds otherwise than
what eager runs, and one that keeps what its backward needs only where autograd is on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from scheduler.pytorch.torch_private.autograd import below_autograd
from scheduler.pytorch.torch_private.operators import schema_of

aten = torch.ops.aten
_Result = TypeVar("_Result")

_LIBRARY = torch.library.Library("scheduler", "FRAGMENT")
_LIBRARY.define(
    "dropout(Tensor input, float p, float scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_LIBRARY.define(
    str(schema_of(aten.mkldnn_rnn_layer.default)).replace("aten::mkldnn_rnn_layer", "lstm_layer"),
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _dropout(value: Tensor, p: float, scale: float) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p)
    return value.mul(mask).mul_(scale), mask


def _fake_dropout(value: Tensor, p: float, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value), torch.empty_like(value, dtype=torch.bool)


def _save_mask(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.scale = inputs[2]


def _dropout_backward(ctx: Any, gradient: Tensor, _: None) -> tuple[object, ...]:
    (mask,) = ctx.saved_tensors
    return aten.native_dropout_backward(gradient, mask, ctx.scale), None, None


def _lstm_layer(*args: object) -> tuple[Tensor, ...]:
    """Run an LSTM layer as eager does: it returns what its backward needs only where gradients are on."""
    with torch.enable_grad(), below_autograd():
        found: tuple[Tensor, ...] = aten.mkldnn_rnn_layer.default(*args)
        return found


_LIBRARY.impl("dropout", _dropout, "CPU")
_LIBRARY.impl("lstm_layer", _lstm_layer, "CPU")
torch.library.register_fake("scheduler::dropout", _fake_dropout, lib=_LIBRARY)
torch.library.register_autograd("scheduler::dropout", _dropout_backward, setup_context=_save_mask, lib=_LIBRARY)

DROPOUT = torch.ops.scheduler.dropout.default
"""Dropout with a given scale of what it keeps; returns the mask, as `aten.native_dropout` does."""

LSTM_LAYER = torch.ops.scheduler.lstm_layer.default
"""`aten.mkldnn_rnn_layer`, one LSTM layer in one direction, with its workspace also where gradients are off."""


@functools.cache
def dropout_scale(p: float, dtype: torch.dtype) -> float | None:
    """Return the scale that eager dropout rounds to on the CPU, None if `aten.native_dropout` uses the same.

    Eager divides a tensor of ones and zeros by 1 - p, so the scale is rounded to its dtype;
    `aten.native_dropout` multiplies by 1 / (1 - p) in the precision in which the product is computed.
    """

    def rounded() -> tuple[float, float]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        scale = torch.ones(1, dtype=dtype, device="cpu").div_(1 - p)
        return float(scale), float(torch.tensor(1 / (1 - p), dtype=wide, device="cpu"))

    scale, unrounded = _outside_of_tracing(rounded)
    return None if scale == unrounded else scale


@functools.cache
def lstm_workspace_bytes(shape: tuple[int, ...], hidden: int, dtype: torch.dtype) -> int:
    """Return the size of the workspace of an LSTM layer, which oneDNN shows only when it runs.

    Parameters
    ----------
    shape : tuple of int
        Of the input: steps, batch, features.
    hidden : int
        Features of the state.
    dtype : torch.dtype
    """

    def run() -> int:
        _, batch, features = shape
        zeros = functools.partial(torch.zeros, dtype=dtype, device="cpu")
        weights = zeros(4 * hidden, features), zeros(4 * hidden, hidden), zeros(4 * hidden), zeros(4 * hidden)
        states = zeros(batch, hidden), zeros(batch, hidden)
        options: tuple[object, ...] = (False, [], 2, hidden, 1, True, False, False, True)
        return int(_lstm_layer(zeros(shape), *weights, *states, *options)[3].numel())

    return _outside_of_tracing(run)


def _outside_of_tracing(function: Callable[[], _Result]) -> _Result:
    """Run a function in a thread of its own, where no mode, autocast or transform of the caller is active."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()
