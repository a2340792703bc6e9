"""Whether the segments of CUDA's caching allocator fit a device too, where the tensors of a plan do."""

from __future__ import annotations

import os
import warnings

from scheduler.plan import Plan
from scheduler.planning.caching_allocator import allocator_use
from scheduler.units import format_bytes

_SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def warn_of_fragmentation(plan: Plan, room_bytes: int, *, stacklevel: int) -> None:
    """Warn where the allocator would run out of memory although the tensors of a plan fit.

    It hands out blocks of segments, and a free block that is too small stays unused. Segments of
    fixed sizes lose the more the more the sizes of tensors differ: training steps of convolutions
    were seen to reserve more than twice what they have allocated.

    Parameters
    ----------
    plan : Plan
        Of operations.
    room_bytes : int
        What a process can have of the device, the tensors of the step included.
    stacklevel : int
        As for `warnings.warn` in the caller.
    """
    graph, schedule, peak = plan.graph, plan.schedule, plan.peak_bytes
    if peak > room_bytes:
        return  # a budget for another device, or for another time
    expandable = has_expandable_segments()
    use = allocator_use(graph, schedule, capacity_bytes=room_bytes, expandable_segments=expandable)
    if use.fits:
        return
    advice = "give a smaller budget, or keep room free with reserve="
    if not expandable:
        grown = allocator_use(graph, schedule, capacity_bytes=room_bytes, expandable_segments=True)
        advice = f"set {_SETTING} before Python starts, {'or' if grown.fits else 'and'} {advice}"
    warnings.warn(
        f"the tensors of this plan take {format_bytes(peak)} of the {format_bytes(room_bytes)} that the device has for"
        f' them, but the allocator of PyTorch would run out of memory in "{use.failed_operation}", since what is free'
        f" lies in pieces: {advice}",
        stacklevel=stacklevel + 1,
    )


def has_expandable_segments() -> bool:
    """Return whether the environment asks PyTorch for segments that grow."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in settings.lower().replace(" ", "")
