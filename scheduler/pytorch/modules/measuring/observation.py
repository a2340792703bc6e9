"""Watch a step operator by operator: what each one allocates, reads and changes, and when storages are freed.

The log of a step is a list of events in the order in which they happened, divided into spans: each
span is one run of one segment, forward or backward. What a segment needs is read from the log
afterwards, so that watching costs little while the step runs.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from scheduler.pytorch.costs.timing import thread_seconds
from scheduler.pytorch.measurement.allocator import named_region
from scheduler.pytorch.measurement.rng import default_generator
from scheduler.pytorch.modules.recomputation.kept_results import changed_arguments, is_expensive, may_draw
from scheduler.pytorch.torch_private.autograd import TorchDispatchMode
from scheduler.pytorch.torch_private.tensors import parts_of, storage_id, storage_of

OPERATOR = "scheduler operator "
"""The beginning of the names under which the profiler sees the operators of a watched step."""
_DETACH = torch.ops.aten.detach.default
_CPU = torch.device("cpu")
_NO_REGION = contextlib.nullcontext()


class Phase(enum.Enum):
    """What a span of the log belongs to: the first run of a segment, another run, or its backward."""

    FORWARD = enum.auto()
    AGAIN = enum.auto()
    BACKWARD = enum.auto()


@dataclass(slots=True)
class Run:
    """One run of an operator.

    Attributes
    ----------
    born, read, changed : sequence of int
        The storages that it allocates, reads, and changes in place.
    is_expensive : bool
        Whether it multiplies matrices or the like.
    state_bytes : int
        Bytes of the random state that is kept with its results, if they are.
    seconds : float
    workspace_bytes : int
        Most bytes that it allocates in addition to what it returns; 0 unless the step is profiled.
    """

    born: Sequence[int] = ()
    read: Sequence[int] = ()
    changed: Sequence[int] = ()
    is_expensive: bool = False
    state_bytes: int = 0
    seconds: float = 0.0
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """Nothing refers to a storage any more."""

    storage: int


@dataclass(frozen=True, slots=True)
class Saved:
    """Autograd saves a storage for the backward."""

    storage: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The graph for whose backward a storage was saved is gone, as that of a value that only Python reads.

    Attributes
    ----------
    storage : int
    saved_at : int
        Position of the event with which it was saved.
    """

    storage: int
    saved_at: int


@dataclass(frozen=True, slots=True)
class Accumulated:
    """A storage becomes the gradient of a parameter."""

    storage: int


class Began:
    """The backward comes to another autograd node."""


Event = Run | Freed | Saved | Dropped | Accumulated | Began


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the log: one phase of a segment, up to the beginning of the next span.

    Attributes
    ----------
    phase : Phase
    segment : int
    begin : int
        Position of its first event.
    """

    phase: Phase
    segment: int
    begin: int


@dataclass
class Log:
    """What was seen of one step.

    Attributes
    ----------
    events : list of Event
    spans : list of Span
    sizes : list of int
        Bytes of each storage, by its number; 0 on other devices than the model's.
    resident : int
        The storages with smaller numbers were given as resident.
    constants : dict of int to int
        Bytes of the storages that the step read, but that no operator of the step allocated.
    """

    events: list[Event] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    resident: int = 0
    constants: dict[int, int] = field(default_factory=dict)

    def parts(self) -> Iterable[tuple[Span, Sequence[Event]]]:
        """Yield each span with its events."""
        ends = [span.begin for span in self.spans[1:]] + [len(self.events)]
        for span, end in zip(self.spans, ends, strict=True):
            yield span, self.events[span.begin : end]


class Observer(TorchDispatchMode):
    """Write the log of a step while this mode is active.

    Parameters
    ----------
    resident : sequence of Tensor
        Parameters, buffers and arguments.
    device : torch.device
        Storages on devices of other types count 0 bytes.
    profiled : bool
        Whether the step runs under the profiler, which then sees the name of each operator.

    Attributes
    ----------
    log : Log
    device_type : str
    """

    supports_higher_order_operators = True

    def __init__(self, resident: Sequence[Tensor], device: torch.device, *, profiled: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = Log()
        self.device_type = device.type
        self._profiled = profiled
        self._clock = _DeviceClock() if device.type == "cuda" else _Clock()
        self._numbers: dict[int, int] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._open = True
        self._is_paused = False
        self._held = [storage for tensor in resident for storage in self.storages_of(tensor)]
        for storage in self._held:
            if storage_id(storage) not in self._numbers:
                self._number(storage)
        self.log.resident = len(self.log.sizes)

    def begin(self, phase: Phase, segment: int) -> None:
        """Begin a span."""
        self.log.spans.append(Span(phase, segment, len(self.log.events)))

    def close(self) -> Log:
        """Write nothing more, and return the log."""
        self._open = False
        self._references.clear()
        self._clock.finish()
        return self.log

    def write(self, event: Event) -> int:
        """Write an event, unless the log is closed, and return its position."""
        if self._open:
            self.log.events.append(event)
        return len(self.log.events) - 1

    def accumulated(self, tensor: Tensor) -> None:
        """Note that a tensor becomes a parameter's gradient."""
        for number in self.numbers_of(tensor):
            self.write(Accumulated(number))

    def numbers_of(self, tensor: Tensor) -> list[int]:
        """Return the numbers of the storages of a tensor; one that no operator has returned is a constant."""
        return [self._find(storage) for storage in self.storages_of(tensor)]

    def storages_of(self, tensor: Tensor) -> list[torch.UntypedStorage]:
        """Return the storages of a tensor of any layout."""
        own = storage_of(tensor)
        if own is not None:
            return [own]
        with self.paused():
            return [storage for part in parts_of(tensor) for storage in self.storages_of(part)]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context whose operators are not those of the step."""
        self._is_paused, before = True, self._is_paused
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if self._is_paused or func is _DETACH:  # recomputations detach what they save
            return func(*args, **kwargs)
        known = _facts_of(func)
        run = Run(is_expensive=known.is_expensive)
        if known.is_expensive and known.may_draw and self.device_type == "cpu":
            run.state_bytes = default_generator(_CPU).get_state().nbytes
        run.read = self._find_all(_tensors((*args, *kwargs.values())))
        run.changed = self._find_all(_tensors(changed_arguments(func, args, kwargs)))
        with named_region(f"{OPERATOR}{len(self.log.events)}") if self._profiled else _NO_REGION:
            self._clock.start(run)
            result = func(*args, **kwargs)
            self._clock.stop()
        del args, kwargs
        run.born = [number for tensor in _tensors((result,)) for number in self._see(tensor)]
        self.log.events.append(run)
        return result

    def _find_all(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the numbers of the storages of some tensors; most tensors have a storage with a number."""
        found: list[int] = []
        for tensor in tensors:
            own = storage_of(tensor)
            number = None if own is None else self._numbers.get(storage_id(own))
            if number is None:
                found += self.numbers_of(tensor)
            else:
                found.append(number)
        return found

    def _see(self, tensor: Tensor) -> list[int]:
        """Return the numbers of those storages of a result that are new."""
        found = []
        for storage in self.storages_of(tensor):
            number = self._numbers.get(storage_id(storage))
            if number is None:
                found.append(self._number(storage))
            elif storage.nbytes() > self.log.sizes[number] and storage.device.type == self.device_type:
                self.log.sizes[number] = storage.nbytes()
        return found

    def _find(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage_id(storage))
        if number is None:
            number = self._number(storage)
            self.log.constants[number] = self.log.sizes[number]
        return number

    def _number(self, storage: torch.UntypedStorage) -> int:
        key, number = storage_id(storage), len(self.log.sizes)
        self._numbers[key] = number
        self.log.sizes.append(storage.nbytes() if storage.device.type == self.device_type else 0)
        self._references[key] = weakref.ref(storage, functools.partial(self._forget, key))
        return number

    def _forget(self, key: int, _: object) -> None:
        number = self._numbers.pop(key)
        self._references.pop(key, None)
        self.write(Freed(number))


class Saving:
    """Hooks for saved tensors that note what is saved, and keep none of it, or only what is needed.

    Parameters
    ----------
    observer : Observer
    kept : set of int, optional
        The saved tensors that are kept, by the order in which they are saved; all if it is None.

    Attributes
    ----------
    unpacked : dict of int to int
        For each saved tensor that a backward within the forward needed, the event with which it was saved.
    """

    def __init__(self, observer: Observer, kept: set[int] | None) -> None:
        self.unpacked: dict[int, int] = {}
        self._observer = observer
        self._kept = kept
        self._count = 0

    def pack(self, tensor: Tensor) -> _Packed:
        """Note that autograd saves a tensor."""
        number, self._count = self._count, self._count + 1
        storages = self._observer.numbers_of(tensor)
        held = tensor.detach() if self._kept is None or number in self._kept else None
        return _Packed(self._observer, number, storages, held)

    def unpack(self, packed: _Packed) -> Tensor:
        """Return a saved tensor.

        Raises
        ------
        NotSavedError
            If it was not kept.
        """
        self.unpacked[packed.number] = packed.begin
        if packed.tensor is None:
            raise NotSavedError
        return packed.tensor


class NotSavedError(Exception):
    """A backward within the forward needs a tensor that was not kept."""


class _Packed:
    """What autograd holds in place of a saved tensor."""

    def __init__(self, observer: Observer, number: int, storages: Sequence[int], tensor: Tensor | None) -> None:
        self.number = number
        self.tensor = tensor
        self._observer = observer
        self.begin = len(observer.log.events)
        self._saved = [(storage, observer.write(Saved(storage))) for storage in storages]

    def __del__(self) -> None:
        for storage, position in self._saved:
            self._observer.write(Dropped(storage, position))


class _Clock:
    """The seconds that an operator takes on the CPU."""

    def start(self, run: Run) -> None:
        self._run = run
        self._begin = thread_seconds()

    def stop(self) -> None:
        self._run.seconds = thread_seconds() - self._begin

    def finish(self) -> None:
        pass


class _DeviceClock(_Clock):
    """The seconds that an operator takes on a CUDA device, known once the step has ended."""

    def __init__(self) -> None:
        self._events: list[tuple[Run, torch.cuda.Event, torch.cuda.Event]] = []

    def start(self, run: Run) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._events.append((run, begin, end))
        begin.record()

    def stop(self) -> None:
        self._events[-1][2].record()

    def finish(self) -> None:
        torch.cuda.synchronize()
        for run, begin, end in self._events:
            run.seconds = float(begin.elapsed_time(end)) / 1e3
        self._events.clear()


def _tensors(values: Iterable[object]) -> list[Tensor]:
    """Return the tensors among the arguments or the results of an operator, which are few and nested once at most."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += _tensors(value)
        elif isinstance(value, dict):
            found += _tensors(value.values())
    return found


class _Facts(NamedTuple):
    """What is known of an operator.

    Attributes
    ----------
    is_expensive, may_draw : bool
        Whether its results may be kept; whether it may draw random numbers.
    """

    is_expensive: bool
    may_draw: bool


@functools.cache
def _facts_of(operator: object) -> _Facts:
    return _Facts(is_expensive(operator), may_draw(operator))
