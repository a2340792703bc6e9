"""Tensors and their storages."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "DataDependentOutputException",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "is_view",
    "storage_id",
    "version_of",
]


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no data because a FakeTensorMode created it."""
    return isinstance(tensor, FakeTensor)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage: the same for every Python object of it, and for no other live storage."""
    return int(storage._cdata)


def version_of(tensor: Tensor) -> int:
    """Return a number that grows whenever an operator changes a tensor or a view of it in place."""
    return int(tensor._version)


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another one."""
    return bool(tensor._is_view())
