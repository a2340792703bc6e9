"""Trace the attention that another device runs.

A step is traced on the CPU, whose attention saves other tensors than that of a GPU. For a GPU,
the kernel that torch chooses there is traced instead: flash attention, memory-efficient attention,
or plain products. The choice follows ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from scheduler.devices import Device
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.torch_private.operators import DispatchKey, replaced_kernels

_HALF = (torch.float16, torch.bfloat16)


@contextlib.contextmanager
def kernels_of(device: Device | None) -> Iterator[None]:
    """Let AOTAutograd trace the attention that torch runs on a device; on CPUs, and if None, nothing changes."""
    if device is None or device.platform == "cpu":
        yield
        return
    keys = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)
    kernel = functools.partial(attention_of, device)
    with replaced_kernels({aten.scaled_dot_product_attention.default: dict.fromkeys(keys, kernel)}):
        yield


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
    is_enabled = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
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
    is_enabled = torch.backends.cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
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
