"""The costs of a chain in arrays and its distinct states, on which the kernels of `dp` work."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.graph.chain import Chain
from scheduler.graph.layers import Layer
from scheduler.solvers.scaling import common_power_of_two

_FINEST = 2.0**-40
"""Finest quantum, as a share of the time of the step."""
_CHUNK_WORK = 100_000
"""States times their splits between two looks at the clock."""

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class ChainArrays(NamedTuple):
    """The costs of n layers in arrays, for the compiled kernels; layer i leads from x_i to x_(i+1).

    Bytes are exact; times are in quanta. The modes of layer i are those from `first_mode[i]` to
    `first_mode[i + 1]`, and its ways those from `first_way[i]` to `first_way[i + 1]`. A way is
    a forward run that keeps nothing; those of a layer are a frontier: bytes ascend and times descend.

    Attributes
    ----------
    output_bytes : ndarray of int64, shape (n + 1,)
        Bytes of x_i; 0 for x_0, which is resident.
    gradient_bytes : ndarray of int64, shape (n + 1,)
        Bytes of g_i, the gradient of x_i; 0 for g_0 if the chain's input needs none.
    parameter_gradients_before : ndarray of int64, shape (n + 1,)
        Bytes of the parameter gradients of the layers before i.
    live_gradients : ndarray of int64, shape (n + 1,)
        Bytes of the gradients that are live once the layers from i on have run backward, less
        those of all parameters: g_i less `parameter_gradients_before[i]`. For i = n, before the
        loss, without g_n.
    first_mode : ndarray of int64, shape (n + 1,)
    saved_bytes, forward_workspace_bytes, backward_workspace_bytes : ndarray of int64, shape (modes,)
    extra_time : ndarray of int64, shape (modes,)
        Forward and backward time over those of the layer's fastest mode.
    first_way : ndarray of int64, shape (n + 1,)
    way_bytes, way_time : ndarray of int64, shape (ways,)
        Bytes in addition to input and output, and time.
    keeps_input, keeps_output : ndarray of bool, shape (n,)
    """

    output_bytes: Ints
    gradient_bytes: Ints
    parameter_gradients_before: Ints
    live_gradients: Ints
    first_mode: Ints
    saved_bytes: Ints
    forward_workspace_bytes: Ints
    backward_workspace_bytes: Ints
    extra_time: Ints
    first_way: Ints
    way_bytes: Ints
    way_time: Ints
    keeps_input: Flags
    keeps_output: Flags


@dataclass(frozen=True)
class ChainCosts:
    """A chain in integers.

    Attributes
    ----------
    layers : int
    arrays : ChainArrays
    quantum : float
        Times are multiples of it, rounded down: a power of two that keeps them exact unless
        they are too fine, then 2^-40 of the time of the whole step.
    base : int
        Time of each layer's fastest mode, once; extra times are counted from it.
    resident_bytes : int
    """

    layers: int
    arrays: ChainArrays
    quantum: float
    base: int
    resident_bytes: int

    def time(self, extra: int) -> float:
        """Return the time of the step from its extra time."""
        return (self.base + extra) * self.quantum


def chain_costs(chain: Chain) -> ChainCosts:
    """Return the costs of a chain in integers."""
    layers = chain.layers
    modes = [layer.all_modes for layer in layers]
    times = [time for options in modes for mode in options for time in (mode.forward_time, mode.backward_time)]
    quantum = _quantum([*times, *(layer.forward_without_saving_time for layer in layers)])
    mode_times = [
        [_in_quanta(mode.forward_time, quantum) + _in_quanta(mode.backward_time, quantum) for mode in options]
        for options in modes
    ]
    ways = [_ways(layer, quantum) for layer in layers]
    gradients = [chain.input_bytes if chain.input_needs_gradient else 0, *(layer.gradient_bytes for layer in layers)]
    parameter_gradients_before = _starts([layer.parameter_gradient_bytes for layer in layers])
    arrays = ChainArrays(
        output_bytes=_ints([0, *(layer.output_bytes for layer in layers)]),
        gradient_bytes=_ints(gradients),
        parameter_gradients_before=parameter_gradients_before,
        live_gradients=_ints([*gradients[:-1], 0]) - parameter_gradients_before,
        first_mode=_starts([len(options) for options in modes]),
        saved_bytes=_ints([mode.saved_bytes for options in modes for mode in options]),
        forward_workspace_bytes=_ints([mode.forward_workspace_bytes for options in modes for mode in options]),
        backward_workspace_bytes=_ints([mode.backward_workspace_bytes for options in modes for mode in options]),
        extra_time=_ints([time - min(options) for options in mode_times for time in options]),
        first_way=_starts([len(frontier) for frontier in ways]),
        way_bytes=_ints([need for frontier in ways for need, _ in frontier]),
        way_time=_ints([time for frontier in ways for _, time in frontier]),
        keeps_input=np.array([layer.keeps_input for layer in layers]),
        keeps_output=np.array([layer.keeps_output for layer in layers]),
    )
    base = sum(min(options) for options in mode_times)
    return ChainCosts(len(layers), arrays, quantum, base, chain.graph.resident_bytes)


class ChainStates(NamedTuple):
    """The distinct states (a, b, h) of a chain; repeated layers share theirs. The kernels take it as it is.

    Attributes
    ----------
    first, last, held : ndarray of int32, shape (states,)
        a, b and h of one state of each kind, by ascending length.
    numbers : ndarray of int32, shape (2, n, n)
        The state of each (h, a, b).
    starts : ndarray of int64, shape (n + 1,)
        Number of the first state of each length.
    """

    first: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]
    held: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int32]
    starts: Ints

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of states, by ascending length, each a fraction of a second of work."""
        begin, work = 0, 0
        for length, (low, high) in enumerate(pairwise(self.starts.tolist())):
            work += (high - low) * (length + 1)
            if work > _CHUNK_WORK:
                yield begin, high
                begin, work = high, 0
        if begin < len(self.first):
            yield begin, len(self.first)


def chain_states(costs: ChainCosts) -> ChainStates:
    """Return the distinct states of a chain.

    Two states are the same if their layers have the same costs in the same order, inputs
    included, and both or neither end the chain. Whether x_a is held from outside matters
    only if layer a does not keep it.
    """
    n = costs.layers
    kinds = layer_kinds(costs)
    keeps_input = costs.arrays.keeps_input
    numbers = np.full((2, n, n), -1, np.int32)
    parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
    starts = [0]
    classes = kinds.copy()
    for length in range(1, n + 1):
        a = np.arange(n - length + 1)
        b = a + length - 1
        if length > 1:
            pair = classes[: len(a)] * np.int64(n + 1) + kinds[b]
            classes = np.unique(pair, return_inverse=True)[1].astype(np.int64)
        ended = classes.copy()
        ended[-1] = len(a)  # the state that ends the chain differs from all others
        _, representative, inverse = np.unique(ended, return_index=True, return_inverse=True)
        offset = starts[-1]
        numbers[0, a, b] = numbers[1, a, b] = offset + inverse
        free = np.flatnonzero(~keeps_input[representative] & (representative > 0))
        renamed = np.full(len(representative), -1)
        renamed[free] = offset + len(representative) + np.arange(len(free))
        other = renamed[inverse] >= 0
        numbers[1, a[other], b[other]] = renamed[inverse][other]
        chosen = np.concatenate([representative, representative[free]]).astype(np.int32)
        held = np.concatenate([np.zeros(len(representative), np.int32), np.ones(len(free), np.int32)])
        parts.append((chosen, chosen + np.int32(length - 1), held))
        starts.append(offset + len(chosen))
    first, last, held = (np.concatenate([part[k] for part in parts]) for k in range(3))
    return ChainStates(first, last, held, numbers, np.array(starts, np.int64))


def most_bytes(costs: ChainCosts, states: ChainStates, budget: int) -> Ints:
    """Return, per state, the most bytes that any schedule within the budget can leave it."""
    live = costs.arrays.live_gradients
    most = np.full(len(states.first), -1, np.int64)
    a, b = np.triu_indices(costs.layers)
    free = budget - costs.arrays.output_bytes[a] - (live[b + 1] - live[-1])
    for h in range(2):
        np.maximum.at(most, states.numbers[h, a, b], free)
    return most


def grid_of(costs: ChainCosts, states: ChainStates, most: Ints, slots: int) -> tuple[Ints, int, int]:
    """Return offsets per state, the bytes of a slot, and the highest slot, for `grid_bounds`.

    An offset counts x_a and g_(b+1), less the parameter gradients of a..b: so the layers
    before a split are in the same slot as the whole. Added to it, modulo a slot, are the bytes
    that the layers before a save: so going from a to a + 1 by saving rounds nothing either.
    For repeated layers that works if one period saves an integer number of slots.
    """
    arrays = costs.arrays
    x, p = arrays.output_bytes, arrays.parameter_gradients_before
    a, b = states.first, states.last
    content = x[a] + arrays.live_gradients[b + 1] + p[a]
    fastest = [int(low + np.argmin(arrays.extra_time[low:high])) for low, high in pairwise(arrays.first_mode)]
    steps = arrays.saved_bytes[fastest] + np.where(arrays.keeps_input, x[:-1], 0) - np.diff(p)
    before = np.concatenate([[0], np.cumsum(steps)[:-1]])
    kinds = layer_kinds(costs)
    unit = _unit(x[1:], _period(kinds, before), max(1, int((most + content).max())), slots)
    _, first = np.unique(kinds, return_index=True)
    phase = before[first][kinds] % unit
    offsets = content + phase[a]
    return offsets, unit, int((most + offsets).max()) // unit


def _unit(outputs: Ints, period: int, top: int, slots: int) -> int:
    """Return the bytes of a slot that lose least to rounding, for `slots` to 4 `slots` of them.

    Each checkpoint loses its remainder, and so do the bytes that each period of the layers saves.
    """
    sizes, counts = np.unique(outputs[outputs > 0], return_counts=True)
    common = [*sizes[np.argsort(-counts)][:3].tolist(), period]
    plain = -(-top // slots)
    units = {plain, *(size // r for size in common for r in range(1, 65))}

    def lost(unit: int) -> float:
        rest = float((outputs % unit).mean())
        return rest + 10 * (period % unit) if period else rest

    fine = sorted(unit for unit in units if unit and slots <= top // unit + 1 <= 4 * slots + 1)
    return min(fine, key=lost, default=plain)


def _period(kinds: Ints, before: Ints) -> int:
    """Return the bytes saved between two layers of the most frequent kind; 0 if it is rare."""
    values, counts = np.unique(kinds, return_counts=True)
    places = np.flatnonzero(kinds == values[np.argmax(counts)])
    if len(places) < 3:
        return 0
    sums, times = np.unique(np.diff(before[places]), return_counts=True)
    return max(0, int(sums[np.argmax(times)]))


def layer_kinds(costs: ChainCosts) -> Ints:
    """Return a number per layer, the same for layers of equal costs with equal inputs."""
    arrays = costs.arrays
    per_mode = (
        arrays.saved_bytes,
        arrays.forward_workspace_bytes,
        arrays.backward_workspace_bytes,
        arrays.extra_time,
    )
    parameter_gradients = np.diff(arrays.parameter_gradients_before)
    known: dict[tuple[object, ...], int] = {}
    kinds = []
    for i in range(costs.layers):
        modes = slice(arrays.first_mode[i], arrays.first_mode[i + 1])
        ways = slice(arrays.first_way[i], arrays.first_way[i + 1])
        key = (
            *arrays.output_bytes[i : i + 2].tolist(),
            *arrays.gradient_bytes[i : i + 2].tolist(),
            int(parameter_gradients[i]),
            *(tuple(array[modes].tolist()) for array in per_mode),
            *(tuple(array[ways].tolist()) for array in (arrays.way_bytes, arrays.way_time)),
            bool(arrays.keeps_input[i]),
            bool(arrays.keeps_output[i]),
        )
        kinds.append(known.setdefault(key, len(known)))
    return _ints(kinds)


def _ways(layer: Layer, quantum: float) -> list[tuple[int, int]]:
    """Return the frontier of (bytes in addition to input and output, time) of a forward run that keeps nothing."""
    ways = [(layer.forward_without_saving_workspace_bytes, _in_quanta(layer.forward_without_saving_time, quantum))]
    ways += [
        (mode.saved_bytes + mode.forward_workspace_bytes, _in_quanta(mode.forward_time, quantum))
        for mode in layer.all_modes
    ]
    frontier: list[tuple[int, int]] = []
    for need, time in sorted(ways):
        if not frontier or time < frontier[-1][1]:
            frontier.append((need, time))
    return frontier


def _quantum(times: list[float]) -> float:
    total = math.fsum(times)
    if total == 0:
        return 1.0
    coarsest = math.ldexp(1.0, math.frexp(total * _FINEST)[1])
    return max(coarsest, common_power_of_two(times))


def _in_quanta(time: float, quantum: float) -> int:
    return math.floor(time / quantum)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def _starts(counts: list[int]) -> Ints:
    return np.cumsum([0, *counts], dtype=np.int64)
