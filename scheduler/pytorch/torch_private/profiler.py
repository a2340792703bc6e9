"""A profile of allocations alone: torch's own records every operator as well, which takes much longer."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._autograd import (
    _disable_profiler,
    _enable_profiler,
    _prepare_profiler,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
    _ProfilerEvent,
)

ProfilerEvent = _ProfilerEvent
"""An event: `name`, `start_time_ns`, `end_time_ns`, `children`, and `extra_fields` by its kind."""

AllocationFields = _ExtraFields_Allocation
"""The fields of an event of PyTorch's allocator: `ptr`, `alloc_size` (negative when freed), `device`."""

_ACTIVITIES = {ProfilerActivity.CPU}
_SCOPES = {RecordScope.USER_SCOPE, RecordScope.BACKWARD_FUNCTION}
"""Named regions, and autograd's functions: without these, torch records no CUDA allocation of a backward's thread."""


def start_profile() -> None:
    """Begin to record allocations and named regions."""
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _prepare_profiler(config, _ACTIVITIES)
    _enable_profiler(config, _ACTIVITIES, _SCOPES)  # type: ignore[call-arg]


def stop_profile() -> Sequence[ProfilerEvent]:
    """Return the outermost events since `start_profile`."""
    return _disable_profiler().experimental_event_tree()


class NamedRegion:
    """A context that a profile sees as an event of the given name; unlike the public one, it calls no operator."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._handle = _record_function_with_args_enter(self._name)

    def __exit__(self, *_: object) -> None:
        _record_function_with_args_exit(self._handle)
