"""What storages hold at run time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from scheduler.pytorch.capture.operators import storage_key


@dataclass(frozen=True)
class StorageSizes:
    """The bytes of storages, where they differ from what the fake tensors on them show.

    Attributes
    ----------
    held : mapping of int to int
        Bytes by the identity of the fake storage.
    """

    held: Mapping[int, int] = field(default_factory=dict)

    def of(self, value: Tensor) -> int:
        """Return the bytes that the storage of a fake tensor holds at run time."""
        return self.held.get(storage_key(value), value.untyped_storage().nbytes())
