"""Run single operator calls alone on random data: their times and their workspaces.

All calls take turns, round after round, so that a disturbance of the machine falls on one
round of all and not on all runs of one; what counts is the shortest time. Between two runs
of a call run the others, as in a training step, so that caches are as cold as there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import Argument
from torch.utils._pytree import tree_leaves

from scheduler.pytorch.capture.instructions import Call
from scheduler.pytorch.capture.lowering.inplace import REUSING
from scheduler.pytorch.capture.operators import IN_PLACE, is_collective, nodes_in, storage_key
from scheduler.pytorch.measurement.allocator import allocator_peaks
from scheduler.pytorch.measurement.memory import now, storage_bytes, storage_sizes
from scheduler.pytorch.measurement.rng import kept_generators

_LEAST_ROUNDS = 3
_MOST_ROUNDS = 30
_SECONDS = 3.0
"""No further round begins after this many seconds."""

_ALIGNMENT = 64
"""Elements that inputs begin at multiples of."""

Arguments = tuple[tuple[object, ...], dict[str, object]]
"""Positional and keyword arguments of one call."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast a device is, in seconds.

    Attributes
    ----------
    seconds_per_call, seconds_per_flop, seconds_per_byte : float
        Of a call that does nothing, of a matrix product, of an elementwise operation.
    """

    seconds_per_call: float
    seconds_per_flop: float
    seconds_per_byte: float


class Trials:
    """Calls that are run alone on random data.

    Each runs once to warm up when this is made.

    Parameters
    ----------
    calls : sequence of Call
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        data = _Data(calls)
        with _undisturbed():
            self._trials = [_prepare(call, data) for call in calls]

    def times(self, seconds: float = _SECONDS) -> list[float | None]:
        """Return the shortest time of each call in seconds, None for what cannot be run alone.

        The time is from the call to the release of what it returned.

        Parameters
        ----------
        seconds : float
            No further round begins after this long; there are at least three.
        """
        with _undisturbed():
            times = iter(shortest_times([trial.run for trial in self._able], seconds))
        return [None if trial is None else next(times) for trial in self._trials]

    def workspaces(self) -> list[int]:
        """Return the bytes that each call allocates beyond what it returns, 0 for what cannot be run alone."""
        with _undisturbed():
            peaks = iter(allocator_peaks([trial.weigh for trial in self._able]))
        return [0 if trial is None else max(0, next(peaks) - trial.output_bytes) for trial in self._trials]

    @property
    def _able(self) -> list[_Trial]:
        return [trial for trial in self._trials if trial is not None]


def measure_rates() -> Rates:
    """Return how fast the machine's device is, measured in a fraction of a second."""
    device = "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]
    square, line = (torch.ones(shape, device=device) for shape in (_SQUARE, _LINE))
    with torch.no_grad():
        probes = [lambda: line.view(_LINE), lambda: torch.mm(square, square), lambda: torch.add(line, line)]
        call, product, addition = shortest_times(probes, _SECONDS)
    flops, moved = 2 * _SQUARE[0] ** 3, 3 * storage_bytes([line])
    return Rates(call, max(0.0, product - call) / flops, max(0.0, addition - call) / moved)


_SQUARE, _LINE = (512, 512), (2**18,)


def shortest_times(functions: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Return the shortest time of each function in seconds; they take turns.

    Parameters
    ----------
    functions : sequence of callable
    seconds : float
        No further round begins after this long; there are at least three.
    """
    shortest = [float("inf")] * len(functions)
    end = now() + seconds
    for number in range(_MOST_ROUNDS):
        for position, function in enumerate(functions):
            shortest[position] = min(shortest[position], _seconds(function))
        if number + 1 >= _LEAST_ROUNDS and now() > end:
            break
    return shortest


def _seconds(function: Callable[[], object]) -> float:
    """Return the time of one run; on CUDA by events around several, which follow each other as in a step."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        start = now()
        function()
        return now() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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
    with torch.no_grad(), torch._C._DisableAutocast(), kept_generators():
        yield


def _prepare(call: Call, data: _Data) -> _Trial | None:
    """Return a call with its inputs, warmed up, or None if it cannot be run, or would wait for other processes."""
    if is_collective(call.node) or any(value.device.type == "meta" for value in _tensors(call)):
        return None
    try:
        trial = _Trial(call, data)
        trial.run()
    except Exception:
        # Whatever an operator makes of random data: its cost is estimated instead.
        return None
    return trial


class _Trial:
    """A call with random inputs."""

    def __init__(self, call: Call, data: _Data) -> None:
        self.target = _repeated(call)._op
        self.args, self.kwargs = data.arguments(call)
        self.output_bytes = 0
        """Bytes of the storages that it made, once weighed."""

    def run(self) -> object:
        """Run the call."""
        return self.target(*self.args, **self.kwargs)

    def weigh(self) -> None:
        """Run the call, and count what it returns."""
        given = _storages((self.args, self.kwargs))
        made = _storages(self.run())
        self.output_bytes = sum(size for key, size in made.items() if key not in given)


class _Data:
    """Random inputs for calls, all in the same memory: as much as the call with the largest needs.

    Floating-point numbers are in [0, 1); all others are 0, a valid index everywhere.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.elements: Counter[tuple[torch.device, torch.dtype]] = Counter()
        for call in calls:
            self.elements |= _Layout(call).elements
        self.buffers: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def arguments(self, call: Call) -> Arguments:
        """Return arguments for a call: of the shapes, strides, dtypes and devices that it is given."""
        layout = _Layout(call)

        def real(node: fx.Node) -> Argument:
            value = node.meta["val"]
            if not isinstance(value, Tensor):
                return cast("Argument", value)
            buffer = self._buffer(value.device, value.dtype)
            offset = layout.offsets[_place(value)] + int(value.storage_offset())
            return cast("Argument", buffer.as_strided(value.shape, value.stride(), offset))

        args, kwargs = cast("Arguments", fx.map_arg((call.node.args, call.node.kwargs), real))
        return tuple(_own(value) if i in _written(call) else value for i, value in enumerate(args)), kwargs

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
    """Where the storages that a call reads lie: one after the other."""

    def __init__(self, call: Call) -> None:
        self.elements: Counter[tuple[torch.device, torch.dtype]] = Counter()
        self.offsets: dict[tuple[int, torch.dtype], int] = {}
        for value in _tensors(call):
            if _place(value) not in self.offsets:
                key = (value.device, value.dtype)
                self.offsets[_place(value)] = self.elements[key]
                size = -(-value.untyped_storage().nbytes() // value.element_size())
                self.elements[key] += -(-size // _ALIGNMENT) * _ALIGNMENT


def _repeated(call: Call) -> OpOverload:
    """Return the operator to run: with memory of its own, where the call would use up its input."""
    return cast("OpOverload", call.node.target) if call.target in REUSING else call.target


def _written(call: Call) -> set[int]:
    """Return the positions of the arguments that a call changes anew in every run."""
    if call.target in IN_PLACE.values():
        return set()
    arguments = enumerate(_repeated(call)._schema.arguments)
    return {i for i, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write}


def _own(value: object) -> object:
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
