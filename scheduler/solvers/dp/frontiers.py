"""The frontier of bytes and time of each state of a chain, compiled with numba.

See `transitions` for states and notation. A point (m, t) of a state's frontier is the least extra
time t within m bytes; bytes ascend and times descend.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.dp.costs import ChainArrays, ChainStates
from scheduler.solvers.dp.transitions import (
    Sweeps,
    extend_sweep,
    grown,
    no_sweeps,
    saving_limits,
    state_after_saving,
    sweep_scratch,
    sweeps_from,
)
from scheduler.solvers.jit import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Decision = tuple[int, int, int]
"""(mode, -1, 0), or (-1, j, bytes in addition to x_a that the sweep from x_a to x_j may take)."""

_SLOTS = 4096
"""Slots of a state's bytes where nothing is pruned."""
_UNBOUNDED = 2**62


class Frontiers(NamedTuple):
    """The frontiers of all states.

    Attributes
    ----------
    points : ndarray of int64, shape (2, points)
        Bytes and extra times.
    start, length : ndarray of int64, shape (states,)
        State s has the points from `start[s]` to `start[s] + length[s]`.
    """

    points: Ints
    start: Ints
    length: Ints


class Pruning(NamedTuple):
    """The least cost of a useful schedule around each state, on a coarse grid; see `grid_bounds`.

    Attributes
    ----------
    around : ndarray of float32, shape (rows, slots + 1)
        Lower bounds on the extra time around a state that is left that slot; no rows for no pruning.
    rows : ndarray of int64, shape (states,)
        Row of each state; -1 if no useful schedule passes it.
    offsets : ndarray of int64, shape (states,)
        Bytes added to a state's own before they are put in slots.
    unit : int
        Bytes of a slot.
    quantum : int
        Time of a unit in `around`.
    limit : int
        Largest useful extra time, in such units.
    """

    around: Floats
    rows: Ints
    offsets: Ints
    unit: int
    quantum: int
    limit: int

    @classmethod
    def none(cls) -> Pruning:
        """Return the pruning that leaves nothing out."""
        return cls(np.empty((0, 1), np.float32), np.empty(0, np.int64), np.empty(0, np.int64), 1, 1, 0)


class Slots(NamedTuple):
    """The slots of a state's bytes: m bytes are in slot (m + offset) // unit, and above `cap` nothing is useful.

    `per_byte` is just below 1 / unit. A product with it may give a slot too low, which only lets more points pass.
    A unit of 0 means that no point of the state is useful.
    """

    unit: int
    offset: int
    per_byte: float
    cap: int


@compiled(inner=True)
def least_time(frontiers: Frontiers, s: int, m: int) -> int:
    """Return the least time of a state within m bytes; -1 if there is none."""
    points, start = frontiers.points, frontiers.start[s]
    low, high = start, start + frontiers.length[s]
    while low < high:
        middle = (low + high) // 2
        if points[0, middle] <= m:
            low = middle + 1
        else:
            high = middle
    return points[1, low - 1] if low > start else -1


@compiled(inner=True)
def is_useful(m: int, t: int, slots: Slots, bound: Ints) -> bool:
    """Return whether a point fits and may beat the bound of its slot."""
    return m <= slots.cap and t < bound[min(len(bound) - 1, int((m + slots.offset) * slots.per_byte))]


@compiled(inner=True)
def add_point(m: int, t: int, slots: Slots, bound: Ints, buffer: Ints, total: int) -> int:
    """Add a point that may beat the bounds, and lower them; return the number of points."""
    buffer[0, total], buffer[1, total] = m, t
    k = -(-(m + slots.offset) // slots.unit)
    while k < len(bound) and bound[k] > t:
        bound[k] = t
        k += 1
    return total + 1


@compiled(inner=True)
def fill_bounds(
    arrays: ChainArrays, states: ChainStates, s: int, cap: int, pruning: Pruning, frontiers: Frontiers, bound: Ints
) -> Slots:
    """Fill `bound` with the time that a point of state s must beat, per slot; return the slots."""
    last = len(bound) - 1
    if len(pruning.around):
        row = pruning.rows[s]
        if row < 0:
            return Slots(0, 0, 0.0, cap)
        for k in range(last + 1):
            bound[k] = (pruning.limit - np.int64(pruning.around[row, k]) + 1) * pruning.quantum
        unit = pruning.unit if bound[0] > 0 else 0
        return Slots(unit, pruning.offsets[s], (1.0 - 1e-12) / pruning.unit, cap)
    a, b, h = states.first[s], states.last[s], states.held[s]
    largest = 0
    for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
        need, held = saving_limits(arrays, a, b, h, mode)
        if a < b:
            child = state_after_saving(arrays, states, a, b)
            end = frontiers.start[child] + frontiers.length[child]
            if frontiers.length[child]:
                need = max(need, frontiers.points[0, end - 1] + held)
        largest = max(largest, need)
    bound[:] = _UNBOUNDED
    unit = min(largest, cap) // last + 1
    return Slots(unit, 0, (1.0 - 1e-12) / unit, cap)


@compiled(inner=True)
def add_saving(
    arrays: ChainArrays,
    states: ChainStates,
    s: int,
    frontiers: Frontiers,
    slots: Slots,
    bound: Ints,
    buffer: Ints,
) -> tuple[Ints, int]:
    """Add the points of state s that begin with saving layer a; return the buffer and their number."""
    a, b, h = states.first[s], states.last[s], states.held[s]
    points, total = frontiers.points, 0
    for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
        need, held = saving_limits(arrays, a, b, h, mode)
        extra = arrays.extra_time[mode]
        if a == b:
            buffer = grown(buffer, total + 1)
            if is_useful(need, extra, slots, bound):
                total = add_point(need, extra, slots, bound, buffer, total)
            continue
        child = state_after_saving(arrays, states, a, b)
        start, length = frontiers.start[child], frontiers.length[child]
        buffer = grown(buffer, total + length)
        for k in range(start + length - 1, start - 1, -1):
            m, t = max(need, points[0, k] + held), points[1, k] + extra
            if is_useful(m, t, slots, bound):
                total = add_point(m, t, slots, bound, buffer, total)
    return buffer, total


@compiled(inner=True)
def add_split(
    points: Ints,
    right: tuple[int, int, int],
    left: tuple[int, int, int],
    sweep: tuple[int, int],
    slots: Slots,
    bound: Ints,
    buffer: Ints,
    total: int,
) -> int:
    """Add the sums of two frontiers and a sweep; return the number of points.

    `right` and `left` are (first point, end, bytes to be added to each point), `sweep` is (bytes,
    time). The merge runs from many bytes to few, so that each point lowers few bounds.
    """
    r, first_right, shift_right = right[1] - 1, right[0], right[2]
    k, first_left, shift_left = left[1] - 1, left[0], left[2]
    sweep_bytes, sweep_time = sweep
    m_right, m_left = points[0, r] + shift_right, points[0, k] + shift_left
    while True:
        m = max(max(m_right, m_left), sweep_bytes)
        t = points[1, r] + points[1, k] + sweep_time
        if is_useful(m, t, slots, bound):
            total = add_point(m, t, slots, bound, buffer, total)
        if m == sweep_bytes:
            return total
        if m == m_right:
            r -= 1
            if r < first_right:
                return total
            m_right = points[0, r] + shift_right
        if m == m_left:
            k -= 1
            if k < first_left:
                return total
            m_left = points[0, k] + shift_left


@compiled(inner=True)
def stride_over(length: int) -> int:
    """Return a stride that visits all of 0..length-1 in turn, far apart: good splits come early."""
    stride = max(1, int(0.618 * length))
    while stride > 1:
        p, q = length, stride
        while q:
            p, q = q, p % q
        if p == 1:
            break
        stride -= 1
    return stride


@compiled(inner=True)
def add_splits(
    arrays: ChainArrays,
    states: ChainStates,
    s: int,
    frontiers: Frontiers,
    slots: Slots,
    bound: Ints,
    sweeps: Sweeps,
    buffer: Ints,
    total: int,
) -> tuple[Ints, int]:
    """Add the points of state s that begin with a sweep; return the buffer and their number."""
    a, b, h = states.first[s], states.last[s], states.held[s]
    points, start, length = frontiers.points, frontiers.start, frontiers.length
    x, live = arrays.output_bytes, arrays.live_gradients
    stride, place = stride_over(sweeps.reach), 0
    for _ in range(sweeps.reach):
        place = (place + stride) % sweeps.reach
        j = a + 1 + place
        right, left = states.numbers[0, j, b], states.numbers[h, a, j - 1]
        if length[right] == 0 or length[left] == 0:
            continue
        after = (start[right], start[right] + length[right], x[j])
        before = (start[left], start[left] + length[left], live[j] - live[b + 1])
        for k in range(sweeps.ends[place], sweeps.ends[place + 1]):
            sweep = (sweeps.points[0, k], sweeps.points[1, k])
            m = max(max(points[0, after[0]] + after[2], points[0, before[0]] + before[2]), sweep[0])
            if m > slots.cap:
                break
            least = points[1, after[1] - 1] + points[1, before[1] - 1] + sweep[1]
            if is_useful(m, least, slots, bound):
                buffer = grown(buffer, total + length[right] + length[left])
                total = add_split(points, after, before, sweep, slots, bound, buffer, total)
    return buffer, total


@compiled(inner=True)
def sort_useful(buffer: Ints, total: int, slots: Slots, last: int, ends: Ints, order: Ints) -> int:
    """Fill `order` with the points by bytes, without the dominated ones; return how many remain.

    A bucket sort by slot, the last being `last`; `ends` is scratch space.
    """
    unit, offset = slots.unit, slots.offset
    ends[:] = 0
    for i in range(total):
        ends[min(last, (buffer[0, i] + offset) // unit) + 1] += 1
    for k in range(last + 1):
        ends[k + 1] += ends[k]
    for i in range(total):
        k = min(last, (buffer[0, i] + offset) // unit)
        position = ends[k]
        ends[k] += 1
        order[position] = i
    for position in range(1, total):  # only points of the same bucket are still out of order
        i = order[position]
        back = position
        while back and buffer[0, order[back - 1]] > buffer[0, i]:
            order[back] = order[back - 1]
            back -= 1
        order[back] = i
    kept = 0
    for position in range(total):
        i = order[position]
        m, t = buffer[0, i], buffer[1, i]
        if kept and t >= buffer[1, order[kept - 1]]:
            continue
        if kept and buffer[0, order[kept - 1]] == m:
            kept -= 1
        order[kept] = i
        kept += 1
    return kept


@compiled()
def fill_frontiers(
    arrays: ChainArrays,
    states: ChainStates,
    low: int,
    high: int,
    most: Ints,
    pruning: Pruning,
    frontiers: Frontiers,
    used: int,
) -> tuple[Frontiers, int]:
    """Compute the frontiers of the states low..high-1 from those of shorter ones.

    Parameters
    ----------
    most : array
        Per state, the most bytes that any schedule can leave it: points above are dropped.
    frontiers : Frontiers
        Its first `used` points are taken.

    Returns
    -------
    frontiers : Frontiers
        The same arrays; the points are grown as needed.
    used : int
    """
    points, start, length = frontiers.points, frontiers.start, frontiers.length
    last = pruning.around.shape[1] - 1 if len(pruning.around) else _SLOTS
    bound, ends = np.empty(last + 1, np.int64), np.empty(last + 2, np.int64)
    buffer, order = np.empty((2, 1024), np.int64), np.empty(1024, np.int64)
    sweeps = no_sweeps(arrays)
    for s in range(low, high):
        start[s], length[s] = used, 0
        known = Frontiers(points, start, length)
        slots = fill_bounds(arrays, states, s, most[s], pruning, known, bound)
        if slots.unit == 0:
            continue
        buffer, total = add_saving(arrays, states, s, known, slots, bound, buffer)
        sweeps = sweeps_from(arrays, states.first[s], states.last[s], slots.cap, sweeps)
        buffer, total = add_splits(arrays, states, s, known, slots, bound, sweeps, buffer, total)
        if total > len(order):
            order = np.empty(2 * total, np.int64)
        kept = sort_useful(buffer, total, slots, last, ends, order)
        points = grown(points, used + kept)
        for k in range(kept):
            points[0, used + k], points[1, used + k] = buffer[0, order[k]], buffer[1, order[k]]
        length[s] = kept
        used += kept
    return Frontiers(points, start, length), used


@compiled()
def decide(arrays: ChainArrays, states: ChainStates, frontiers: Frontiers, a: int, b: int, h: int, m: int) -> Decision:
    """Return the decision by which (a, b, h) takes its least time within m bytes."""
    target = least_time(frontiers, states.numbers[h, a, b], m)
    for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
        need, held = saving_limits(arrays, a, b, h, mode)
        if need > m:
            continue
        rest = 0
        if a < b:
            rest = least_time(frontiers, state_after_saving(arrays, states, a, b), m - held)
        if rest >= 0 and rest + arrays.extra_time[mode] == target:
            return mode, -1, 0
    live = arrays.live_gradients
    sweep, spare = sweep_scratch(arrays)
    count = 1
    for j in range(a + 1, b + 1):
        count = extend_sweep(arrays, a, j - 1, sweep, count, spare)
        after = least_time(frontiers, states.numbers[0, j, b], m - arrays.output_bytes[j])
        before = least_time(frontiers, states.numbers[h, a, j - 1], m + live[b + 1] - live[j])
        if after < 0 or before < 0:
            continue
        for way in range(count):
            if sweep[0, way] <= m and after + before + sweep[1, way] == target:
                return -1, j, sweep[0, way]
    return -1, -1, 0
