"""The profiler's events, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent, _RecordFunctionFast

ProfilerEvent = _ProfilerEvent
"""An event: `name`, `start_time_ns`, `end_time_ns`, `children`, and `extra_fields` by its kind."""

AllocationFields = _ExtraFields_Allocation
"""The fields of an event of PyTorch's allocator: `ptr`, `alloc_size` (negative when freed), `device`."""

RecordFunction = _RecordFunctionFast
"""A context that a profile sees as an event of the given name; unlike the public one, it calls no operator."""


def event_trees(profile: torch.profiler.profile) -> Sequence[ProfilerEvent]:
    """Return the outermost events of a profile that has ended."""
    return profile.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
