"""A kernel in Triton, for models on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="CPU builds of torch have no Triton")
tl = pytest.importorskip("triton.language")

BLOCK = 1024


@triton.jit
def _square(given, result, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(given + places, mask=places < count)
    tl.store(result + places, value * value, mask=places < count)


class Square(torch.autograd.Function):
    """The square of each element."""

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        ctx.save_for_backward(given)
        result = torch.empty_like(given)
        _square[(triton.cdiv(given.numel(), BLOCK),)](given, result, given.numel(), BLOCK=BLOCK)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (given,) = ctx.saved_tensors
        return 2 * given * gradient
