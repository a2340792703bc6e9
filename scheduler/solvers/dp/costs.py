"""The costs of a chain in arrays, and its distinct states: what the kernels of `dp` work on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.graph.chain import Chain
from scheduler.graph.layers import Layer
from scheduler.solvers.scaling import common_power_of_two

_FINEST = 2.0**-40
_CHUNK = 100_000

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ChainCosts:
    """A chain in integers.

    Attributes
    ----------
    layers : int
    arrays : tuple of ndarray
        See `chain_kernels`.
    quantum : float
        Times are whole multiples of it, rounded down: a power of two that keeps them exact
        where they are not too fine, else 2^-40 of the time of the whole step.
    base : int
        Time of each layer's fastest mode, once: what extra times come on top of.
    resident_bytes : int
    """

    layers: int
    arrays: tuple[npt.NDArray[Any], ...]
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
    times = [time for ways in modes for mode in ways for time in (mode.forward_time, mode.backward_time)]
    quantum = _quantum([*times, *(layer.forward_without_saving_time for layer in layers)])
    whole = [[_whole(m.forward_time, quantum) + _whole(m.backward_time, quantum) for m in ways] for ways in modes]
    ways = [_ways(layer, quantum) for layer in layers]
    gradient = chain.input_bytes if chain.input_needs_gradient else 0
    arrays = (
        _ints([0, *(layer.output_bytes for layer in layers)]),
        _ints([gradient, *(layer.gradient_bytes for layer in layers)]),
        _starts([layer.parameter_gradient_bytes for layer in layers]),
        _starts([len(entry) for entry in modes]),
        _ints([mode.saved_bytes for entry in modes for mode in entry]),
        _ints([mode.forward_workspace_bytes for entry in modes for mode in entry]),
        _ints([mode.backward_workspace_bytes for entry in modes for mode in entry]),
        _ints([time - min(entry) for entry in whole for time in entry]),
        _starts([len(entry) for entry in ways]),
        _ints([need for entry in ways for need, _ in entry]),
        _ints([time for entry in ways for _, time in entry]),
        np.array([layer.keeps_input for layer in layers]),
        np.array([layer.keeps_output for layer in layers]),
    )
    base = sum(min(entry) for entry in whole)
    return ChainCosts(len(layers), arrays, quantum, base, chain.graph.resident_bytes)


@dataclass(frozen=True)
class ChainStates:
    """The distinct states (a, b, h) of a chain; repeated layers share theirs.

    Attributes
    ----------
    first, last, held : ndarray of int32
        a, b and h of one state of each kind, by ascending length.
    numbers : ndarray of int32, shape (2, n, n)
        The state of each (h, a, b).
    starts : ndarray of int64, shape (n + 1,)
        Where the states of each length begin.
    """

    first: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]
    held: npt.NDArray[np.int32]
    numbers: npt.NDArray[np.int32]
    starts: Ints

    @property
    def arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The fields a, b, h, for the kernels."""
        return self.first, self.last, self.held

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of states, by ascending length, each of a fraction of a second's work."""
        begin, work = 0, 0
        for length, (low, high) in enumerate(pairwise(self.starts.tolist())):
            work += (high - low) * (length + 1)
            if work > _CHUNK:
                yield begin, high
                begin, work = high, 0
        if begin < len(self.first):
            yield begin, len(self.first)


def chain_states(costs: ChainCosts) -> ChainStates:
    """Return the distinct states of a chain.

    Two states are the same if their layers have the same costs in the same order, inputs
    included, and both or neither end the chain. Whether somebody else holds x_a matters
    only if layer a does not keep it.
    """
    n = costs.layers
    kinds = _kinds(costs)
    keeps_input = costs.arrays[11]
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
        ended[-1] = len(a)  # the state that ends the chain is like no other
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
    x, g, p = costs.arrays[:3]
    n = costs.layers
    most = np.full(len(states.first), -1, np.int64)
    a, b = np.triu_indices(n)
    free = budget - x[a] - np.where(b == n - 1, 0, g[b + 1]) - (p[n] - p[b + 1])
    for h in range(2):
        np.maximum.at(most, states.numbers[h, a, b], free)
    return most


def grid_of(costs: ChainCosts, states: ChainStates, most: Ints, slots: int) -> tuple[Ints, int, int]:
    """Return offsets per state, the bytes of a slot, and the highest slot, for `chain_tables`.

    An offset counts x_a and g_(b+1), less the parameter gradients of a..b: so the layers
    before a split stand in the slot of the whole. To it comes, modulo a slot, what the layers
    before a save: so going from a to a + 1 by saving rounds nothing either. For repeated
    layers that works if what one period saves is whole slots.
    """
    x, g, p, first_mode = costs.arrays[:4]
    n = costs.layers
    a, b = states.first, states.last
    content = np.where(b == n - 1, 0, g[b + 1]) + x[a] - (p[b + 1] - p[a])
    saved, extra, keeps_input = costs.arrays[4], costs.arrays[7], costs.arrays[11]
    fastest = [int(low + np.argmin(extra[low:high])) for low, high in pairwise(first_mode)]
    steps = saved[fastest] + np.where(keeps_input, x[:-1], 0) - np.diff(p)
    before = np.concatenate([[0], np.cumsum(steps)[:-1]])
    kinds = _kinds(costs)
    unit = _unit(x[1:], _period(kinds, before), max(1, int((most + content).max())), slots)
    _, first = np.unique(kinds, return_index=True)
    phase = before[first][kinds] % unit
    offsets = content + phase[a]
    return offsets, unit, int((most + offsets).max()) // unit


def _unit(outputs: Ints, period: int, top: int, slots: int) -> int:
    """Return the bytes of a slot, so that there are `slots` to 4 `slots`, of which rounding loses least.

    What is lost: the rest of each checkpoint, and of what each period of the layers saves.
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


def _kinds(costs: ChainCosts) -> Ints:
    """Return a number per layer, the same for layers of equal costs with equal inputs."""
    x, g, p, first_mode, saved, forward_ws, backward_ws, extra, first_way, way_bytes, way_time, ki, ko = costs.arrays
    known: dict[tuple[object, ...], int] = {}
    kinds = []
    for i in range(costs.layers):
        modes, ways = slice(first_mode[i], first_mode[i + 1]), slice(first_way[i], first_way[i + 1])
        key = (
            *(x[i : i + 2].tolist() + g[i : i + 2].tolist()),
            int(p[i + 1] - p[i]),
            *(tuple(array[modes].tolist()) for array in (saved, forward_ws, backward_ws, extra)),
            *(tuple(array[ways].tolist()) for array in (way_bytes, way_time)),
            bool(ki[i]),
            bool(ko[i]),
        )
        kinds.append(known.setdefault(key, len(known)))
    return _ints(kinds)


def _ways(layer: Layer, quantum: float) -> list[tuple[int, int]]:
    """Return the frontier of (bytes beside input and output, time) of a forward run that keeps nothing."""
    ways = [(layer.forward_without_saving_workspace_bytes, _whole(layer.forward_without_saving_time, quantum))]
    ways += [
        (mode.saved_bytes + mode.forward_workspace_bytes, _whole(mode.forward_time, quantum))
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


def _whole(time: float, quantum: float) -> int:
    return math.floor(time / quantum)


def _ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def _starts(counts: list[int]) -> Ints:
    return np.cumsum([0, *counts], dtype=np.int64)
