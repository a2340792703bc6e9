"""The guards of TorchDynamo in C++, which see in one call that many tensors have not changed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._C._dynamo import guards

Check = Callable[[], bool]
"""Returns whether nothing has changed for certain."""


def tensors_check(tensors: Sequence[Tensor]) -> Check:
    """Return a check that no tensor has another type, shape, dtype, device or requires_grad than now.

    The check also fails while autocast or another mode is active that was not active now.
    """
    make: Callable[..., Any] | None = getattr(guards, "TensorGuards", None)
    if make is None:
        return tensors_check_one_by_one(tensors)
    sizes, strides = [[*t.shape] for t in tensors], [[None] * t.dim() for t in tensors]  # strides may be any
    try:
        tensor_guards = make(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except TypeError:
        return tensors_check_one_by_one(tensors)
    return functools.partial(tensor_guards.check, *tensors)


def tensors_check_one_by_one(tensors: Sequence[Tensor]) -> Check:
    """Do what `tensors_check` does where torch has no guards to build a tree of."""

    def read() -> list[object]:
        return [(type(t), t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]

    then = read()
    return lambda: read() == then
