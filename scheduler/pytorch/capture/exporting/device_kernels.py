"""Trace the attention and the autocast of another device.

A step is traced on the CPU, whose attention saves other tensors than that of a GPU. For a GPU,
the kernel that torch chooses there is traced instead: flash attention, memory-efficient attention,
or plain products. The choice follows ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp.
Autocast on a GPU computes more operators in float32 than on the CPU, such as normalizations and
softmax (ATen/autocast_mode.h): these cast their arguments here too.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from scheduler.devices import Device
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.torch_private.operators import DispatchKey, Kernels, OpOverload, replaced_kernels

_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def kernels_of(device: Device | None) -> Iterator[None]:
    """Let AOTAutograd trace what torch runs on a device; for CPUs, and if None, nothing changes.

    Regions of `torch.autocast("cuda")` that are entered meanwhile are those of the CPU, with the
    casts of the GPU.
    """
    if device is None or device.platform == "cpu":
        yield
        return
    attention = functools.partial(attention_of, device)
    kernels: dict[OpOverload, Kernels] = {operator: dict.fromkeys(_KEYS, _widened(operator)) for operator in _WIDENED}
    kernels[aten.scaled_dot_product_attention.default] = dict.fromkeys(_KEYS, attention)
    with replaced_kernels(kernels), _autocast_on_cpu():
        yield


_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)

_WIDENED = (
    aten.binary_cross_entropy_with_logits.default,
    aten.cumsum.default,
    aten.exp.default,
    aten.group_norm.default,
    aten.huber_loss.default,
    aten.kl_div.default,
    aten.l1_loss.default,
    aten.layer_norm.default,
    aten.log.default,
    aten.log_softmax.int,
    aten.logsumexp.default,
    aten.mse_loss.default,
    aten.nll_loss.default,
    aten.nll_loss2d.default,
    aten.pow.Tensor_Scalar,
    aten.prod.default,
    aten.rsqrt.default,
    aten.smooth_l1_loss.default,
    aten.softmax.int,
    aten.softplus.default,
    aten.sum.default,
    aten.sum.dim_IntList,
)
"""Operators that autocast computes in float32 on a GPU, those that networks use often."""


def _widened(operator: OpOverload) -> Callable[..., object]:
    """Return a kernel that casts arguments of two bytes to float32 where autocast is on."""
    own = {key: cast("Callable[..., object] | None", operator.py_kernels.get(key)) for key in _KEYS}

    def widen(value: object) -> object:
        return value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value

    def run(*args: object, **kwargs: object) -> object:
        if torch.is_autocast_enabled("cpu"):
            args, kwargs = tuple(map(widen, args)), {name: widen(value) for name, value in kwargs.items()}
        with replaced_kernels({operator: own}):
            return operator(*args, **kwargs)

    return run


@contextlib.contextmanager
def _autocast_on_cpu() -> Iterator[None]:
    """Let regions of autocast that name a GPU have their effect on the CPU, where the step is traced."""
    initialize = torch.autocast.__init__

    def on_cpu(self: torch.autocast, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kw: Any) -> None:
        if device_type == "cuda" and not torch.cuda.is_available():
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        initialize(self, device_type, dtype, *args, **kw)

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = initialize  # type: ignore[method-assign]


def attention_of(
    device: Device,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Run `scaled_dot_product_attention` by the kernel of a device.

    Parameters
    ----------
    device : Device
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
        As for `scaled_dot_product_attention`.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        additive = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = additive.masked_fill_(attn_mask.logical_not(), -math.inf)
    if _runs_flash(device, query, key, value, attn_mask, dropout_p, is_causal):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if _runs_efficient(device, query, key, value):
        return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
    outputs = aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )
    return cast("Tensor", outputs[0])


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """Run flash attention on heads that are padded to a multiple of 8 numbers."""
    size = query.shape[-1]
    scale = 1 / math.sqrt(size) if scale is None else scale
    if padding := -size % 8:
        query, key, value = (F.pad(x, (0, padding)) for x in (query, key, value))
    output = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return cast("Tensor", output[..., :size] if padding else output)


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Run memory-efficient attention; a mask is padded to a multiple of 16 numbers and expanded."""
    if mask is not None:
        length = mask.shape[-1]
        if padding := -length % 16:
            mask = F.pad(mask, (0, padding))[..., :length]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    outputs = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, is_trained, dropout_p, is_causal, scale=scale
    )
    return cast("Tensor", outputs[0])


def _runs_flash(
    device: Device,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """Return whether flash attention, or cuDNN's, which saves as much, can run (`use_flash_attention`)."""
    is_enabled = torch.backends.cuda.flash_sdp_enabled()
    if mask is not None or not is_enabled or not _is_dense(query, key, value):
        return False
    size = query.shape[-1]
    if not size == key.shape[-1] == value.shape[-1] or (is_causal and query.shape[-2] != key.shape[-2]):
        return False
    if not query.shape[-3] % key.shape[-3] == query.shape[-3] % value.shape[-3] == 0:
        return False
    if query.dtype not in _HALF:
        return False
    if device.platform == "rocm":
        return size <= 512
    # In training, these devices lack shared memory for large heads.
    is_limited = (8, 6) <= device.capability <= (8, 9) or device.capability >= (12, 0)
    has_limit = is_limited and not (size <= 192 or (not dropout_p and size > 224))
    return device.capability >= (8, 0) and size <= 256 and not has_limit


def _runs_efficient(device: Device, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether memory-efficient attention can run (`use_mem_efficient_attention`)."""
    is_enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
    if not is_enabled or not _is_dense(query, key, value):
        return False
    if not query.shape[-3] == key.shape[-3] == value.shape[-3]:
        return False
    is_recent = device.platform == "rocm" or device.capability >= (8, 0)
    if query.dtype not in (torch.float16, torch.float32, *((torch.bfloat16,) if is_recent else ())):
        return False
    is_half = query.dtype in _HALF
    alignment = 8 if is_half else 4 if is_recent else 1
    size = query.shape[-1]
    return size == key.shape[-1] and size % alignment == 0 and value.shape[-1] % alignment == 0


def _is_dense(*tensors: Tensor) -> bool:
    """Return whether tensors have a batch, heads, a length and numbers in a row, none of them empty."""
    return all(x.dim() == 4 and x.numel() and (x.stride(-1) == 1 or x.shape[-1] == 1) for x in tensors)
