"""Trace the operators that eager PyTorch runs.

While AOTAutograd traces, torch prefers decompositions written in Python to the kernels of eager
PyTorch: several operators in place of one, or others, which round otherwise. Recurrent networks
even lose their dropout between layers. Here the kernels of eager come first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.kernels import DROPOUT, aten, dropout_scale, lstm_workspace_bytes
from scheduler.pytorch.torch_private.operators import (
    DispatchKey,
    Kernels,
    OpOverload,
    forget_fake_results,
    has_bfloat16_kernels,
    replaced_kernels,
    run_composite,
    without_effect_tokens,
)
from scheduler.pytorch.torch_private.tensors import is_view

_DECOMPOSED = [
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_lanczos2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "hardshrink",
    "matmul",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
    "softshrink",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
]
"""Operators whose decompositions in Python are ignored.

The others of torch are needed: batch norms but cuDNN's, to make them functional; `one_hot`, `stft`, `istft`,
`pad_sequence` and `tensor_split`, whose kernels in C++ read values.
"""

_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """Let AOTAutograd trace the operators that eager PyTorch runs."""
    removed = dict.fromkeys(_KEYS)
    kernels: dict[OpOverload, Kernels] = {
        getattr(packet, overload): removed
        for packet in (getattr(aten, name) for name in _DECOMPOSED if hasattr(aten, name))
        for overload in packet.overloads()
    }
    kernels[aten.dropout.default] = dict.fromkeys(_KEYS, _dropout)
    kernels[aten.cudnn_batch_norm.default] = {DispatchKey.Autograd: _cudnn_batch_norm()}
    for packet in (aten.gru, aten.lstm, aten.rnn_relu, aten.rnn_tanh):
        kernels[packet.input] = dict.fromkeys(_KEYS, _recurrent(packet.input))
    kernels[aten.mkldnn_rnn_layer.default] = {DispatchKey.Meta: _fake_lstm_layer}
    kernels[aten.mkldnn_rnn_layer_backward.default] = {DispatchKey.Meta: _fake_lstm_layer_backward}
    kernels[aten._grouped_mm.default] = {DispatchKey.Meta: _fake_grouped_mm}
    with _parameters_cast_once() as cast_once:
        kernels[aten._to_copy.default] = {DispatchKey.Autograd: cast_once}
        with replaced_kernels(kernels), without_effect_tokens([aten._linalg_check_errors.default]):
            yield


@contextlib.contextmanager
def _parameters_cast_once() -> Iterator[Callable[..., Tensor]]:
    """Yield a kernel of `aten._to_copy` by which autocast casts a parameter once per region, as eager does.

    Tracing turns the cache of autocast off. Without it, a parameter that is used several times is
    cast as often, and its gradients are added up in its own dtype, not in the lower one.
    """
    operator = aten._to_copy.default
    is_cached = torch.is_autocast_cache_enabled()
    casts: dict[tuple[int, torch.dtype | None], tuple[Tensor, Tensor]] = {}
    enabled = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    clear, enable = torch.clear_autocast_cache, torch.set_autocast_enabled

    def cast_once(value: Tensor, *, dtype: torch.dtype | None = None, **options: object) -> Tensor:
        key, device = (id(value), dtype), value.device.type
        # Inside the kernel that casts an operator's arguments, autocast is off.
        is_autocast = enabled.get(device, False) and not torch.is_autocast_enabled(device)
        is_kept = is_cached and is_autocast and dtype == torch.get_autocast_dtype(device)
        if is_kept and key in casts:
            return casts[key][1]
        with replaced_kernels({operator: {DispatchKey.Autograd: None}}):
            result = cast("Tensor", operator(value, dtype=dtype, **options))
        if is_kept and _is_cached_by_autocast(value):
            casts[key] = value, result
        return result

    def clear_all() -> None:  # called where the outermost region of autocast ends
        casts.clear()
        clear()

    def note_and_enable(*arguments: Any) -> None:
        device, is_enabled = arguments if len(arguments) == 2 else ("cuda", *arguments)
        enabled[device] = is_enabled
        enable(device, is_enabled)

    torch.clear_autocast_cache, torch.set_autocast_enabled = clear_all, note_and_enable  # type: ignore[assignment]
    try:
        yield cast_once
    finally:
        torch.clear_autocast_cache, torch.set_autocast_enabled = clear, enable


def _is_cached_by_autocast(value: Tensor) -> bool:
    """Return whether autocast caches casts of a tensor: of leaves in float32 that require a gradient."""
    is_leaf = value.is_leaf or type(value.grad_fn).__name__ == "Error"  # of what AOTAutograd wraps
    return value.dtype == torch.float32 and value.requires_grad and is_leaf and not is_view(value)


@contextlib.contextmanager
def masks_of_eager() -> Iterator[None]:
    """Let dropout keep the mask that eager PyTorch keeps on the CPU, in the dtype of the input.

    A plan recomputes dropout from a mask of booleans, which takes less memory.
    """
    token = _KEEPS_MASKS_OF_EAGER.set(True)
    try:
        yield
    finally:
        _KEEPS_MASKS_OF_EAGER.reset(token)


_KEEPS_MASKS_OF_EAGER: ContextVar[bool] = ContextVar("_KEEPS_MASKS_OF_EAGER", default=False)


def _dropout(value: Tensor, p: float, train: bool) -> Tensor:
    """Run `at::dropout`, with a mask of booleans where eager saves one in the dtype of the input."""
    if p == 0 or not train or value.numel() == 0:
        return value
    if p == 1:
        return value.mul(torch.zeros((), dtype=value.dtype, device=value.device))
    if _KEEPS_MASKS_OF_EAGER.get() and value.device.type == "cpu":
        return value.mul(torch.empty_like(value).bernoulli_(1 - p).div_(1 - p))
    scale = dropout_scale(p, value.dtype) if value.device.type == "cpu" else None
    if scale is not None:
        return cast("Tensor", DROPOUT(value, p, scale)[0])
    return cast("Tensor", aten.native_dropout(value, p, True)[0])


def _cudnn_batch_norm() -> Callable[..., object]:
    """Return cuDNN's batch norm as an operator that says which statistics it changes.

    torch's decomposition runs another kernel, which rounds otherwise: with TensorFloat-32, some
    gradient of a ResNet-50 then differs by half of its size.
    """
    decomposition = cast("Callable[..., object]", aten.cudnn_batch_norm.default.py_kernels[DispatchKey.Autograd])

    def run(
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        train: bool,
        momentum: float,
        epsilon: float,
    ) -> object:
        if train and mean is not None and variance is not None:
            return aten._batch_norm_with_update.default(value, weight, bias, mean, variance, momentum, epsilon)
        return decomposition(value, weight, bias, mean, variance, train, momentum, epsilon)

    return run


def _recurrent(operator: OpOverload) -> Callable[..., object]:
    """Return how eager runs a recurrent network on the CPU; elsewhere, torch's decomposition of it.

    The decompositions lose dropout between layers, and on CUDA, cuDNN draws it by itself.
    """
    decomposition = cast("Callable[..., object]", operator.py_kernels[DispatchKey.CompositeImplicitAutograd])

    def run(
        value: Tensor,
        states: Sequence[Tensor],
        parameters: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        p: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> object:
        options = (has_biases, layers, p, train, bidirectional, batch_first)
        if value.device.type == "cpu":
            if operator is aten.lstm.input and _runs_in_one_kernel(value, states, parameters):
                return _lstm(value, states, parameters, *options)
            return run_composite(operator, value, states, parameters, *options)
        if p != 0 and train and layers > 1:
            raise CaptureError(
                f"a recurrent network of {layers} layers with dropout {p} between them draws it inside one operator on"
                f" {value.device.type}, which cannot be captured: use single layers with nn.Dropout between them, or"
                ' granularity="modules"'
            )
        return decomposition(value, states, parameters, *options)

    return run


def _lstm(
    value: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    p: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run one oneDNN operator per layer and direction, as ATen/native/mkldnn/RNN.cpp does."""
    forget_fake_results()  # of the same layer without a workspace
    value = (value.transpose(0, 1) if batch_first else value).contiguous()
    hidden, cell = (state.contiguous() for state in states)
    directions, per_layer = 1 + bidirectional, 4 if has_biases else 2
    last_hidden, last_cell = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = parameters[index * per_layer : (index + 1) * per_layer]
            biases = weights[2:] if has_biases else [weight.new_zeros(weight.shape) for weight in weights]
            output, *state, _ = aten.mkldnn_rnn_layer(
                value,
                *weights[:2],
                *biases,
                hidden[index],
                cell[index],
                direction > 0,
                [],
                _LSTM,
                hidden.shape[2],
                layers,
                has_biases,
                bidirectional,
                batch_first,
                train,
            )
            outputs.append(output)
            last_hidden.append(state[0])
            last_cell.append(state[1])
        value = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if p != 0 and train and layer < layers - 1:
            value = torch.dropout(value, p, True)
    value = value.transpose(0, 1) if batch_first else value
    return value, torch.stack(last_hidden, 0), torch.stack(last_cell, 0)


_LSTM = 2
"""The number of the LSTM among oneDNN's recurrent networks (ideep::rnn_kind)."""


def _runs_in_one_kernel(value: Tensor, states: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    """Return whether eager runs an LSTM layer as one oneDNN operator (`use_mkldnn` in ATen/native/RNN.cpp)."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in (value, *states, *parameters))
    fits = value.dtype == torch.float32 or (value.dtype == torch.bfloat16 and has_bfloat16_kernels())
    has_projections = states[0].shape[2] != states[1].shape[2]
    return bool(torch.backends.mkldnn.enabled) and on_cpu and fits and value.numel() != 0 and not has_projections


def _fake_lstm_layer(
    value: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor, hidden: Tensor, cell: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs of `aten.mkldnn_rnn_layer` with the workspace that it has if gradients are on."""
    size = lstm_workspace_bytes(tuple(value.shape), hidden.shape[-1], value.dtype)
    output = value.new_empty((*value.shape[:2], hidden.shape[-1]))
    workspace = value.new_empty(size, dtype=torch.uint8)
    return output, hidden.new_empty(hidden.shape), cell.new_empty(cell.shape), workspace


def _fake_lstm_layer_backward(
    value: Tensor, w: Tensor, v: Tensor, b: Tensor, c: Tensor, hidden: Tensor, cell: Tensor, *_: object
) -> tuple[Tensor, ...]:
    """Return the gradients of `aten.mkldnn_rnn_layer`; torch's own fake ones share the storage of the biases."""
    shapes = (value.shape, w.shape, v.shape, w.shape[:1], w.shape[:1], hidden.shape, cell.shape)
    return tuple(value.new_empty(shape, dtype=torch.float32) for shape in shapes)


def _fake_grouped_mm(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, bias: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the output of `aten._grouped_mm` in every dtype; torch's own fake one refuses all but bfloat16.

    Where it is refused, transformers runs a mixture of experts with another operator.
    """
    if a.dim() == b.dim() == 2:
        assert offsets is not None
        shape = (*offsets.shape, a.shape[0], b.shape[1])
    else:
        shape = (*(a.shape[:1] if b.dim() == a.dim() else ()), a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=dtype or a.dtype)
