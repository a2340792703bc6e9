"""The profiler's events, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent

ProfilerEvent = _ProfilerEvent
"""An event: `name`, `start_time_ns`, `end_time_ns`, `children`, and `extra_fields` by its kind."""

AllocationFields = _ExtraFields_Allocation
"""The fields of an event of PyTorch's allocator: `ptr`, `alloc_size` (negative when freed), `device`."""


def event_trees(profile: torch.profiler.profile) -> Sequence[ProfilerEvent]:
    """Return the outermost events of a profile that has ended and was taken with `acc_events=True`."""
    return profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
