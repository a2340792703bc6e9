"""The allocator's peak during a step, from the profiler's events."""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from scheduler.pytorch.torch_private.profiler import (
    AllocationFields,
    NamedRegion,
    ProfilerEvent,
    start_profile,
    stop_profile,
)

Step = Callable[[], object]
"""One training step, that is, a forward and a backward; it clears old gradients itself."""


def allocator_peak(step: Step) -> int:
    """Return the most bytes that a step holds beyond what was allocated before it; see `allocator_peaks`."""
    (peak,) = allocator_peaks([step])
    return peak


def allocator_peaks(steps: Sequence[Step]) -> list[int]:
    """Return the most bytes that each of several steps holds beyond what was allocated before it.

    The peak is that of the running sum of the profiler's memory events, which are those of
    PyTorch's allocator. On the CPU they do not include the memory that libraries allocate
    themselves (oneDNN's scratch memory, thread stacks) or malloc's rounding; on CUDA, blocks
    count with the size that the caching allocator gives them. For a step that uses an
    accelerator, only the accelerator's memory counts. Unlike the allocator's own peak, the sum
    does not include what the step frees first, such as the gradients of the step before.
    """

    def run() -> None:
        for number, step in enumerate(steps):
            with named_region(f"{_STEP}{number}"):
                step()

    peaks = peaks_of_regions(run, _STEP)
    return [peaks[f"{_STEP}{number}"] for number in range(len(steps))]


def peaks_of_regions(run: Callable[[], object], prefix: str) -> dict[str, int]:
    """Return the peak of each region of a run that `named_region` gave a name with this prefix.

    Regions are not nested in each other; a peak is counted as by `allocator_peaks`.
    """
    older = torch.empty(1)
    with _native_stderr_closed():
        start_profile()
        # Of the blocks that are older than the profile, torch reports the first that is freed, and every thousandth.
        del older
    try:
        run()
    finally:
        with _native_stderr_closed():
            events = stop_profile()
    spans: dict[str, ProfilerEvent] = {}
    allocations: list[Allocation] = []
    for event in _with_children(events):
        fields = event.extra_fields
        if isinstance(fields, AllocationFields):
            allocations.append((event.start_time_ns, fields.ptr, fields.alloc_size, fields.device.type == "cpu"))
        elif (name := event.name).startswith(prefix):
            spans[name] = event
    allocations.sort(key=_time_of)
    times = [time for time, *_ in allocations]
    return {name: peak_bytes(_within(span, allocations, times)) for name, span in spans.items()}


def named_region(name: str, *, active: bool = True) -> AbstractContextManager[object]:
    """Return a context that the profiler sees under a name; it costs nothing if it is not active."""
    return NamedRegion(name) if active else contextlib.nullcontext()


_STEP = "scheduler step "


@contextlib.contextmanager
def _native_stderr_closed() -> Iterator[None]:
    """Discard what native code writes to stderr: the profiler reports its start and stop there."""
    kept = os.dup(_STDERR)
    try:
        with open(os.devnull, "wb") as sink:
            os.dup2(sink.fileno(), _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)


_STDERR = 2


Allocation = tuple[int, int, int, bool]
"""Time in ns, address, bytes (negative when freed), and whether on the CPU."""


def _time_of(allocation: Allocation) -> int:
    return allocation[0]


def _within(span: ProfilerEvent, allocations: Sequence[Allocation], times: Sequence[int]) -> Sequence[Allocation]:
    """Return the allocations of all threads during an event."""
    begin = bisect.bisect_left(times, span.start_time_ns)
    return allocations[begin : bisect.bisect_right(times, span.end_time_ns, begin)]


def peak_bytes(allocations: Sequence[Allocation]) -> int:
    """Return the peak of the running sum of allocations: the accelerator's if there are any there, else the CPU's."""
    # Freeing a block that was allocated before the profile began does not count.
    held: dict[int, int] = {}
    total = peak = 0
    only_cpu = all(on_cpu for *_, on_cpu in allocations)
    for _, pointer, size, on_cpu in allocations:
        if on_cpu is not only_cpu:
            continue
        if size > 0:
            held[pointer] = size
            total += size
            peak = max(peak, total)
        else:
            total -= held.pop(pointer, 0)
    return peak


def _with_children(events: Iterable[ProfilerEvent]) -> Iterator[ProfilerEvent]:
    """Yield all events of some trees; an active dispatch mode adds events above those of a step."""
    pending = list(events)
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        yield event
