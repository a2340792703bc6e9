"""Tensors and their storages."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "fake_mode_of",
    "fake_on_device",
    "has_data",
    "is_fake",
    "is_traceable_wrapper_subclass",
    "is_view",
    "parts_of",
    "storage_id",
    "storage_of",
    "version_of",
]


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no data because a FakeTensorMode created it."""
    return isinstance(tensor, FakeTensor)


def has_data(tensor: Tensor) -> bool:
    """Return whether a tensor has values: it is neither fake nor on device "meta"."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def fake_mode_of(tensor: Tensor) -> FakeTensorMode | None:
    """Return the mode that created a fake tensor, None for all others."""
    return tensor.fake_mode if isinstance(tensor, FakeTensor) else None


def fake_on_device(tensor: Tensor, mode: FakeTensorMode, device: str) -> Tensor:
    """Return a fake tensor like one on device "meta", with the same storage, as if it was on a device."""
    fake = FakeTensor(mode, tensor.detach(), torch.device(device))
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return the identity of a storage: the same for every Python object of it, and for no other live storage."""
    return int(storage._cdata)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of a tensor, None if it consists of other tensors or has no storage, as one of oneDNN."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
        return None
    return tensor.untyped_storage()


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse or nested tensor, or one of a subclass, consists of."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values()] if tensor.is_nested else []


def version_of(tensor: Tensor) -> int:
    """Return a number that grows whenever an operator changes a tensor or a view of it in place."""
    return int(tensor._version)


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd knows a tensor as a view of another one."""
    return bool(tensor._is_view())


def alias_of(tensor: Tensor) -> Tensor:
    """Return, below autograd, another tensor of the same storage, whose version grows with that of the tensor."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
