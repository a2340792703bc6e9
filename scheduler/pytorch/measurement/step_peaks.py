"""What a step that follows a plan needs beyond what it found, measured while it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scheduler.pytorch.torch_private.autograd import when_backward_ends
from scheduler.pytorch.torch_private.pytree import tree_leaves

ReadMemory = Callable[[torch.device], tuple[int, int]]
"""Returns the bytes that are allocated on a device, and their peak since the statistics were last reset."""


def read_allocator(device: torch.device) -> tuple[int, int]:
    """Return the present and the largest number of bytes that PyTorch has allocated on an accelerator."""
    return torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)


class AllocatorPeak:
    """The peak of a step on an accelerator, from the construction of this object to the end of the backward.

    The statistics are the user's, so they are not reset: a step is reported only if its peak is
    the largest since the user did so.

    Parameters
    ----------
    device : torch.device
    found : callable
        Takes the largest number of bytes above those that were allocated at first.
    read : callable
    """

    def __init__(self, device: torch.device, found: Callable[[int], None], read: ReadMemory = read_allocator) -> None:
        self._device = device
        self._found = found
        self._read = read
        self._allocated, self._largest = read(device)
        self._is_first = True

    def watch(self, outputs: object) -> None:
        """Wait for the backward of what the forward returned."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._begin)

    def _begin(self, _: Tensor) -> None:
        if self._is_first:
            self._is_first = False
            when_backward_ends(self._end)

    def _end(self) -> None:
        _, peak = self._read(self._device)
        if peak > self._largest:
            self._found(peak - self._allocated)
