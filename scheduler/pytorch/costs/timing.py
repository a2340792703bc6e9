"""Measure the times and workspaces of single operator calls on random data.

Calls run in the order of the step, round after round: a call finds the caches as the calls
before it leave them, warm in a loop and cold elsewhere, and a disturbance of the machine
affects one round of all calls and not all runs of one call. On the CPU, times are those that
the calling thread spends on a processor, so other processes do not count; a thread that waits
for the others of a parallel region does count.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from scheduler.pytorch.capture.instructions import Call
from scheduler.pytorch.capture.lowering.inplace import REUSING
from scheduler.pytorch.capture.operators import IN_PLACE, is_collective, nodes_in, storage_key
from scheduler.pytorch.costs.storages import CLONES_STORAGE, Arguments, arguments_on_own_storages
from scheduler.pytorch.measurement.allocator import allocator_peaks
from scheduler.pytorch.measurement.memory import now, storage_bytes, storage_sizes
from scheduler.pytorch.measurement.rng import kept_generators
from scheduler.pytorch.torch_private.autograd import autocast_disabled
from scheduler.pytorch.torch_private.operators import OpOverload, call_of, schema_of
from scheduler.pytorch.torch_private.pytree import tree_leaves

_MIN_ROUNDS = 3
_MAX_ROUNDS = 30
_MEASURING_SECONDS = 3.0
"""No further round begins after this many seconds."""
_STEADY_ROUNDS, _STEADY_GAIN = 4, 0.005
"""No further round begins after so many that have together lowered the sum of all times by less than this share."""
_PLACES = 3
"""Of equal calls of a step, so many run in each round."""

thread_seconds = time.thread_time if time.get_clock_info("thread_time").resolution < 1e-6 else time.perf_counter
"""The clock of calls on the CPU."""

_ALIGNMENT_ELEMENTS = 64
"""Inputs begin at multiples of this many elements."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a call.

    Attributes
    ----------
    seconds : float
        The shortest time at each of its places in the order of a round, averaged over the places.
    spread : float
        The median of all runs over these shortest ones, minus 1.
    """

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class Rates:
    """The speed of a device.

    Attributes
    ----------
    seconds_per_call, seconds_per_flop, seconds_per_byte : float
        Measured with a view, a matrix product and an elementwise operation.
    """

    seconds_per_call: float
    seconds_per_flop: float
    seconds_per_byte: float


class Trials:
    """Calls that are run alone on random data.

    The constructor runs each once to warm up.

    Parameters
    ----------
    calls : sequence of Call
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        data = _Data(calls)
        with _undisturbed():
            self._trials = [_prepare(call, data) for call in calls]

    def times(
        self,
        seconds: float = _MEASURING_SECONDS,
        *,
        order: Sequence[int] | None = None,
        progress: Callable[[float, float], None] = lambda fraction, seconds: None,
    ) -> list[Timing | None]:
        """Return the time of each call, None for a call that cannot be run alone.

        The time includes freeing the outputs of the call.

        Parameters
        ----------
        seconds : float
            No further round begins after this long; there are at least three.
        order : sequence of int
            The positions of the calls in the order of the step, each once or several times.
        progress : callable
            Called after each round with the fraction that is done, and the seconds so far.
        """
        runnable = [position for position, trial in enumerate(self._trials) if trial is not None]
        number = {position: count for count, position in enumerate(runnable)}
        places = [number[position] for position in order or runnable if position in number]
        with _undisturbed():
            timings = iter(interleaved_times([t.run for t in self._runnable], seconds, order=places, progress=progress))
        return [None if trial is None else next(timings) for trial in self._trials]

    def workspaces(self) -> list[int]:
        """Return the bytes that each call allocates in addition to its outputs, 0 if it cannot be run alone."""
        with _undisturbed():
            peaks = iter(allocator_peaks([trial.run_and_count for trial in self._runnable]))
        return [0 if trial is None else max(0, next(peaks) - trial.output_bytes) for trial in self._trials]

    @property
    def _runnable(self) -> list[_Trial]:
        return [trial for trial in self._trials if trial is not None]


def measure_rates() -> Rates:
    """Measure the speed of the machine's device; this takes a fraction of a second."""
    device = "cuda" if torch.cuda.is_initialized() else "cpu"
    square, line = (torch.ones(shape, device=device) for shape in (_SQUARE, _LINE))
    with torch.no_grad():
        probes = [lambda: line.view(_LINE), lambda: torch.mm(square, square), lambda: torch.add(line, line)]
        call, product, addition = (timing.seconds for timing in interleaved_times(probes, _MEASURING_SECONDS))
    flops, moved = 2 * _SQUARE[0] ** 3, 3 * storage_bytes([line])
    return Rates(call, max(0.0, product - call) / flops, max(0.0, addition - call) / moved)


_SQUARE, _LINE = (512, 512), (2**18,)


def interleaved_times(
    functions: Sequence[Callable[[], object]],
    seconds: float,
    *,
    order: Sequence[int] | None = None,
    progress: Callable[[float, float], None] = lambda fraction, seconds: None,
) -> list[Timing]:
    """Return the time of each function; they take turns.

    Parameters
    ----------
    functions : sequence of callable
    seconds : float
        No further round begins after this long, or once the last few have hardly lowered any
        time; there are at least three.
    order : sequence of int
        The functions of a round, each at least once; the first few places of each are measured.
    progress : callable
        Called after each round with the fraction that is done, and the seconds so far.
    """
    counts: Counter[int] = Counter()
    places = []
    for position in range(len(functions)) if order is None else order:
        counts[position] += 1
        if counts[position] <= _PLACES:
            places.append(position)
    samples: list[list[float]] = [[] for _ in places]
    sums: list[float] = []
    begun = now()
    for number in range(1, _MAX_ROUNDS + 1):
        for runs, position in zip(samples, places, strict=True):
            runs.append(_seconds(functions[position]))
        passed = now() - begun
        sums.append(math.fsum(min(runs) for runs in samples))
        is_done = number == _MAX_ROUNDS or (number >= _MIN_ROUNDS and (passed > seconds or _is_steady(sums)))
        fraction = max(number / _MAX_ROUNDS, min(number / _MIN_ROUNDS, passed / max(seconds, passed, 1e-9)))
        progress(1.0 if is_done else fraction, passed)
        if is_done:
            break
    idle = 0.0 if torch.cuda.is_initialized() else _reading_seconds()
    found: list[list[list[float]]] = [[] for _ in functions]
    for runs, position in zip(samples, places, strict=True):
        found[position].append(runs)
    return [_timing(runs, idle) for runs in found]


def _is_steady(sums: Sequence[float]) -> bool:
    """Return whether the last rounds have hardly lowered the sum of the shortest times."""
    return len(sums) > _STEADY_ROUNDS and sums[-1] >= (1 - _STEADY_GAIN) * sums[-1 - _STEADY_ROUNDS]


def _timing(places: Sequence[Sequence[float]], idle: float) -> Timing:
    """Return the time of a function from its runs at each place, less what reading the clock takes."""
    shortest = statistics.fmean(min(runs) for runs in places)
    typical = statistics.fmean(statistics.median(runs) for runs in places)
    return Timing(max(0.0, shortest - idle), typical / shortest - 1 if shortest else 0.0)


def _reading_seconds() -> float:
    """Return what the clock shows for a function that does nothing."""
    return min(_seconds(lambda: None) for _ in range(100))


def _seconds(function: Callable[[], object]) -> float:
    """Return the time of one run; on CUDA with events around several runs in a row, as in a step."""
    if not torch.cuda.is_initialized():
        start = thread_seconds()
        function()
        return thread_seconds() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_RUNS_BETWEEN_EVENTS):
        function()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / _RUNS_BETWEEN_EVENTS


_RUNS_BETWEEN_EVENTS = 4


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Run calls as generated code does, and leave the random state as it was."""
    with torch.no_grad(), autocast_disabled(), kept_generators():
        yield


def _prepare(call: Call, data: _Data) -> _Trial | None:
    """Return a warmed-up call with its inputs, or None if it cannot be run or would wait for other processes."""
    if is_collective(call.node) or any(value.device.type == "meta" for value in _tensors(call)):
        return None
    try:
        trial = _Trial(call, data)
        trial.run()
    except Exception:
        # Operators may reject random data in many ways; the cost of this one is estimated instead.
        return None
    return trial


class _Trial:
    """A call with random inputs."""

    def __init__(self, call: Call, data: _Data) -> None:
        self.target = call_of(_measured_operator(call))
        self.args, self.kwargs = data.arguments(call)
        self.output_bytes = 0
        """Bytes of the storages that the latest `run_and_count` allocated and returned."""

    def run(self) -> object:
        """Run the call."""
        return self.target(*self.args, **self.kwargs)

    def run_and_count(self) -> None:
        """Run the call, and count the bytes that it returns."""
        given = _storages((self.args, self.kwargs))
        returned = _storages(self.run())
        self.output_bytes = sum(size for key, size in returned.items() if key not in given)


class _Data:
    """Random inputs for calls, all in the same memory, which is as large as the most demanding call needs.

    Floating-point numbers are in [0, 1); all others are 0, a valid index everywhere.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.elements: Counter[tuple[torch.device, torch.dtype]] = Counter()
        for call in calls:
            self.elements |= _Layout(call).elements
        self.buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def arguments(self, call: Call) -> Arguments:
        """Return arguments for a call, with the shapes, strides, dtypes and devices of the captured ones."""
        if call.node.target in CLONES_STORAGE:
            return arguments_on_own_storages(call.node, lambda value: value.untyped_storage().nbytes())
        layout = _Layout(call)

        def real(node: fx.Node) -> Argument:
            value = node.meta["val"]
            if isinstance(value, torch.Generator):
                return cast("Argument", torch.Generator(value.device))  # the user's own must not advance
            if not isinstance(value, Tensor):
                return cast("Argument", value)
            buffer = self._buffer(value.device, value.dtype)
            offset = layout.offsets[_place(value)] + int(value.storage_offset())
            return cast("Argument", buffer.as_strided(value.shape, value.stride(), offset))

        args, kwargs = cast("Arguments", fx.map_arg((call.node.args, call.node.kwargs), real))
        return tuple(_copy(value) if i in _written(call) else value for i, value in enumerate(args)), kwargs

    def _buffer(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        key = (device, dtype)
        if key not in self.buffers:
            buffer = torch.zeros(self.elements[key], dtype=dtype, device=device)
            if dtype.is_floating_point:
                generator = torch.Generator(device).manual_seed(0)
                buffer.copy_(torch.rand(self.elements[key], device=device, generator=generator))
            self.buffers[key] = buffer
        return self.buffers[key]


class _Layout:
    """The offsets of the storages that a call reads, one after the other in one buffer."""

    def __init__(self, call: Call) -> None:
        self.elements: Counter[tuple[torch.device, torch.dtype]] = Counter()
        self.offsets: dict[tuple[int, torch.dtype], int] = {}
        for value in _tensors(call):
            if _place(value) not in self.offsets:
                key = (value.device, value.dtype)
                self.offsets[_place(value)] = self.elements[key]
                size = -(-value.untyped_storage().nbytes() // value.element_size())
                self.elements[key] += -(-size // _ALIGNMENT_ELEMENTS) * _ALIGNMENT_ELEMENTS


def _measured_operator(call: Call) -> OpOverload:
    """Return the operator to run: the captured one if the call's target would overwrite its input."""
    return cast("OpOverload", call.node.target) if call.target in REUSING else call.target


def _written(call: Call) -> set[int]:
    """Return the positions of the arguments that every run of a call changes again."""
    if call.target in IN_PLACE.values():
        return set()
    arguments = enumerate(schema_of(_measured_operator(call)).arguments)
    return {i for i, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write}


def _copy(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


def _place(value: Tensor) -> tuple[int, torch.dtype]:
    return storage_key(value), value.dtype


def _tensors(call: Call) -> list[Tensor]:
    """Return the fake tensors that a call reads."""
    values = [node.meta["val"] for node in nodes_in((call.node.args, call.node.kwargs))]
    return [value for value in values if isinstance(value, Tensor)]


def _storages(values: object) -> dict[int, int]:
    """Return the bytes of each distinct storage in nested values."""
    return storage_sizes(value for value in tree_leaves(values) if isinstance(value, Tensor))
