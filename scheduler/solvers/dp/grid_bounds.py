"""Lower bounds for the solver `dp` on a coarse grid of memory, compiled with numba.

Bytes are rounded to slots of `unit` bytes, always in the schedule's favor, and times down to
quanta: so both tables are lower bounds. A state with m free bytes is in slot
(m + offset) // unit, with an offset of its own. An amount d by which a part has more than the
whole, offsets included, becomes ceil(d / unit) slots more, and a limit becomes its slot. Any
offsets give true bounds; `costs.grid_of` chooses them so that little is lost to rounding.
See `transitions` for states and notation.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.dp.costs import ChainArrays, ChainStates
from scheduler.solvers.dp.grid_rows import (
    first_at_most,
    is_split_useful,
    lower,
    lower_by_two,
    push,
    push_by_two,
    useful_slots,
)
from scheduler.solvers.dp.transitions import (
    Sweeps,
    no_sweeps,
    saving_limits,
    state_after_saving,
    sweeps_from,
)
from scheduler.solvers.jit import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

INFINITE = np.float32(2**24)
"""The entry of a table where there is no useful schedule; below it, 32-bit floats represent integers exactly."""
UNKNOWN = -(2**62)
"""A number of bytes that is still to be found."""


class Grid(NamedTuple):
    """A grid of memory, and a table with a row for each useful state.

    Attributes
    ----------
    offsets : ndarray of int64, shape (states,)
        Bytes added to a state's own before they are put in slots.
    unit : int
        Bytes of a slot.
    quantum : int
        Time of a unit in the table.
    rows : ndarray of int64, shape (states,)
        Row of each state; -1 for those left out.
    table : ndarray of float32, shape (rows, slots + 1)
        Least extra time of a state within a slot.
    """

    offsets: Ints
    unit: int
    quantum: int
    rows: Ints
    table: Floats


class Steps(NamedTuple):
    """The first steps of one state, as arrays: first those that save layer a, then those that sweep to a split.

    Attributes
    ----------
    right : ndarray of int64
        Row of the state that follows the step; -1 if none does.
    left : ndarray of int64
        Row of the state before the split; -1 after a saving.
    shift_right, shift_left : ndarray of int64
        Slots by which these states have more than the whole.
    low : ndarray of int64
        First slot with enough bytes for the step.
    cost : ndarray of float32
        Extra time of the step, in quanta.
    """

    right: Ints
    left: Ints
    shift_right: Ints
    shift_left: Ints
    low: Ints
    cost: Floats


class SweepBounds(NamedTuple):
    """The least bytes and the least time of the sweep from x_a to x_j, each of shape (n, n)."""

    need: Ints
    time: Ints


@compiled()
def sweep_bounds(arrays: ChainArrays) -> SweepBounds:
    """Return the least bytes and the least time of every sweep; they may belong to different ways."""
    x = arrays.output_bytes
    n = len(x) - 1
    need, time = np.zeros((n, n), np.int64), np.zeros((n, n), np.int64)
    for a in range(n):
        for i in range(a, n - 1):
            live = x[i + 1] + (x[i] if i > a else 0)
            need[a, i + 1] = max(need[a, i], live + arrays.way_bytes[arrays.first_way[i]])
            time[a, i + 1] = time[a, i] + arrays.way_time[arrays.first_way[i + 1] - 1]
    return SweepBounds(need, time)


@compiled(inner=True)
def in_slots(amount: int, unit: int, rounding: int) -> int:
    """Return an amount of bytes in slots: rounded up if `rounding` is unit - 1, to the nearest if unit // 2."""
    return (amount + rounding) // unit


@compiled(inner=True)
def in_quanta(time: int, quantum: int) -> np.float32:
    """Return a time in quanta, rounded down."""
    return min(INFINITE, np.float32(time // quantum))


@compiled(inner=True)
def no_steps(arrays: ChainArrays) -> Steps:
    """Return space for the steps of any state."""
    most = len(arrays.output_bytes) + len(arrays.extra_time)
    numbers = np.empty((5, most), np.int64)
    return Steps(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], np.empty(most, np.float32))


@compiled(inner=True)
def list_steps(
    arrays: ChainArrays,
    states: ChainStates,
    grid: Grid,
    sweeps: SweepBounds,
    s: int,
    highest: int,
    rounding: int,
    steps: Steps,
) -> int:
    """Fill in the steps of a state that fit in the slots up to `highest`; return their number.

    Steps to states without a row are left out.
    """
    a, b, h = states.first[s], states.last[s], states.held[s]
    rows, offsets, unit = grid.rows, grid.offsets, grid.unit
    x, live = arrays.output_bytes, arrays.live_gradients
    offset, count = offsets[s], 0
    for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
        need, held = saving_limits(arrays, a, b, h, mode)
        steps.right[count], steps.shift_right[count] = -1, 0
        if a < b:
            child = state_after_saving(arrays, states, a, b)
            if rows[child] < 0:
                continue
            steps.right[count] = rows[child]
            steps.shift_right[count] = in_slots(offsets[child] - offset - held, unit, rounding)
        steps.left[count], steps.shift_left[count] = -1, 0
        steps.low[count] = (need + offset) // unit
        steps.cost[count] = in_quanta(arrays.extra_time[mode], grid.quantum)
        count += 1
    for j in range(a + 1, b + 1):
        low = (sweeps.need[a, j] + offset) // unit
        if low > highest:
            break
        right, left = states.numbers[0, j, b], states.numbers[h, a, j - 1]
        if rows[right] < 0 or rows[left] < 0:
            continue
        steps.right[count], steps.left[count] = rows[right], rows[left]
        steps.shift_right[count] = in_slots(offsets[right] - offset - x[j], unit, rounding)
        steps.shift_left[count] = in_slots(offsets[left] - offset + live[b + 1] - live[j], unit, rounding)
        steps.low[count] = low
        steps.cost[count] = in_quanta(sweeps.time[a, j], grid.quantum)
        count += 1
    return count


@compiled(nogil=True)
def fill_inside(
    arrays: ChainArrays,
    states: ChainStates,
    low_state: int,
    high_state: int,
    grid: Grid,
    sweeps: SweepBounds,
    rounding: int,
    begin: Ints,
) -> None:
    """Fill the rows of the states low_state..high_state-1: at most the extra time of a state within each slot.

    This holds if `rounding` is unit - 1. With unit // 2 the errors cancel out: the rows are no
    bounds, but good guesses. `begin[row]` is set to the first slot of a row with a value.
    """
    rows, table = grid.rows, grid.table
    slots, steps = table.shape[1] - 1, no_steps(arrays)
    for s in range(low_state, high_state):
        row = rows[s]
        if row < 0:
            continue
        own = table[row]
        own[:] = INFINITE
        begin[row] = slots + 1
        for k in range(list_steps(arrays, states, grid, sweeps, s, slots, rounding, steps)):
            right, left, low, cost = steps.right[k], steps.left[k], steps.low[k], steps.cost[k]
            shift_right, shift_left = steps.shift_right[k], steps.shift_left[k]
            if right < 0:
                for slot in range(low, slots + 1):
                    own[slot] = min(own[slot], cost)
            elif left < 0:
                lower(own, table[right], max(low, -shift_right), shift_right, cost)
            else:
                low = max(low, max(begin[right] - shift_right, begin[left] - shift_left))
                # From `end` on, the row is already as low as the sum can ever be.
                end = first_at_most(own, low, table[right, slots] + table[left, slots] + cost)
                if low < end:
                    lower_by_two(own[:end], table[right], table[left], low, shift_right, shift_left, cost)
        for slot in range(slots, -1, -1):
            own[slot] = min(own[slot], INFINITE)
            if own[slot] < INFINITE:
                begin[row] = slot


@compiled()
def push_around(
    arrays: ChainArrays,
    states: ChainStates,
    low_state: int,
    high_state: int,
    grid: Grid,
    sweeps: SweepBounds,
    limit: int,
    around: Floats,
) -> None:
    """Push `around` from the states high_state-1 down to low_state to their parts.

    `around[row]` is, per slot, at most the extra time of everything around a state in a schedule
    that leaves it that slot. States for which no slot gives a total of at most `limit` lose
    their row in the grid.
    """
    rows, table, steps = grid.rows, grid.table, no_steps(arrays)
    for s in range(high_state - 1, low_state - 1, -1):
        if rows[s] < 0:
            continue
        own = around[rows[s]]
        for slot in range(len(own) - 2, -1, -1):
            own[slot] = min(own[slot], own[slot + 1])
        lowest, highest = useful_slots(own, table[rows[s]], limit)
        if highest < 0:
            rows[s] = -1
            continue
        for k in range(list_steps(arrays, states, grid, sweeps, s, highest, grid.unit - 1, steps)):
            right, left, cost = steps.right[k], steps.left[k], steps.cost[k]
            shift_right, shift_left = steps.shift_right[k], steps.shift_left[k]
            low = max(max(lowest, steps.low[k]), -shift_right)
            if right >= 0 and left < 0:
                push(around[right], own, low, highest, shift_right, cost)
            elif right >= 0:
                low = max(low, -shift_left)
                rest = np.float32(limit) - cost
                if not is_split_useful(own, table[left], table[right], low, highest, shift_left, shift_right, rest):
                    continue
                push_by_two(around[right], own, table[left], low, highest, shift_right, shift_left, cost)
                push_by_two(around[left], own, table[right], low, highest, shift_left, shift_right, cost)


@compiled(inner=True)
def least_of_splits(need: Ints, left: Ints, live: Ints, live_after: int, right: Ints, outputs: Ints) -> int:
    """Return the least over all splits of what the sweep, the layers before the split and those after it need.

    A function of its own so that it compiles to vector instructions.
    """
    least = 2**62
    for k in range(len(need)):
        least = min(least, max(max(need[k], left[k] + live[k] - live_after), right[k] + outputs[k]))
    return least


@compiled()
def fill_least_bytes(
    arrays: ChainArrays, states: ChainStates, low: int, high: int, sweeps: SweepBounds, inside: Ints, need_of: Ints
) -> None:
    """Fill in the least free bytes, exactly, with which the states that end with the layers low..high-1 can run.

    `need_of` has an entry per state, `UNKNOWN` at first. `inside[h, a, b]` is the same by layers, known for
    all b before `low`: the splits of a state read a row of it one by one.
    """
    x, live = arrays.output_bytes, arrays.live_gradients
    ending = np.empty(len(x), np.int64)
    """`inside[0, a, b]` for all a."""
    for b in range(low, high):
        for a in range(b, -1, -1):
            for h in range(2):
                s = states.numbers[h, a, b]
                if need_of[s] == UNKNOWN:
                    after = slice(a + 1, b + 1)
                    least = least_of_splits(
                        sweeps.need[a, after], inside[h, a, a:b], live[after], live[b + 1], ending[after], x[after]
                    )
                    for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
                        need, held = saving_limits(arrays, a, b, h, mode)
                        if a < b:
                            need = max(need, need_of[state_after_saving(arrays, states, a, b)] + held)
                        least = min(least, need)
                    need_of[s] = least
                inside[h, a, b] = need_of[s]
            ending[a] = inside[0, a, b]


@compiled(inner=True)
def entry(grid: Grid, s: int, free: int, caution: int) -> np.float32:
    """Return the entry of a state with that many free bytes, `caution` slots lower; beyond its end, the last one."""
    row, slot = grid.rows[s], (free + grid.offsets[s]) // grid.unit - caution
    return INFINITE if row < 0 else grid.table[row, max(0, min(slot, grid.table.shape[1] - 1))]


@compiled(inner=True)
def best_saving(
    arrays: ChainArrays, states: ChainStates, grid: Grid, need_of: Ints, caution: int, a: int, b: int, h: int, m: int
) -> tuple[np.float32, int]:
    """Return the least value of beginning (a, b, h) by saving layer a, and the mode; infinite if none fits."""
    best, choice = np.float32(np.inf), -1
    for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
        need, held = saving_limits(arrays, a, b, h, mode)
        if need > m:
            continue
        value = in_quanta(arrays.extra_time[mode], grid.quantum)
        if a < b:
            child = state_after_saving(arrays, states, a, b)
            if m - held < need_of[child]:
                continue
            value += entry(grid, child, m - held, caution)
        if value < best:
            best, choice = value, mode
    return best, choice


@compiled(inner=True)
def best_split(
    arrays: ChainArrays,
    states: ChainStates,
    grid: Grid,
    need_of: Ints,
    caution: int,
    sweeps: Sweeps,
    a: int,
    b: int,
    h: int,
    m: int,
) -> tuple[np.float32, int, int]:
    """Return the least value of beginning (a, b, h) by a sweep, where it ends, and its point; infinite if none fits."""
    best, split, point = np.float32(np.inf), -1, -1
    live = arrays.live_gradients
    for place in range(sweeps.reach):
        j = a + 1 + place
        right, left = states.numbers[0, j, b], states.numbers[h, a, j - 1]
        after, before = m - arrays.output_bytes[j], m + live[b + 1] - live[j]
        if after < need_of[right] or before < need_of[left]:
            continue
        value = entry(grid, right, after, caution)
        value += entry(grid, left, before, caution)
        k = sweeps.ends[place]
        while k + 1 < sweeps.ends[place + 1] and sweeps.points[0, k + 1] <= m:
            k += 1
        value += in_quanta(sweeps.points[1, k], grid.quantum)
        if value < best:
            best, split, point = value, j, k
    return best, split, point


@compiled()
def descend(
    arrays: ChainArrays, states: ChainStates, grid: Grid, need_of: Ints, free: int, caution: int, choices: Ints
) -> int:
    """Walk down from the whole chain, choosing each part by the table, in exact bytes; return the extra time.

    The bytes that a part really has are known on the way down, so that the table's rounding
    does not add up, and no part gets less than it needs. `caution` slots are left unused,
    since the table promises too much. `choices[a, b]` is set to the decision for layers a..b:
    (mode, -1, 0), or (-1, j, bytes of the sweep to x_j).
    """
    n, live = len(arrays.output_bytes) - 1, arrays.live_gradients
    sweeps = no_sweeps(arrays)
    stack = np.empty((2 * n + 2, 4), np.int64)
    stack[0] = 0, n - 1, 0, free
    depth, total = 1, 0
    while depth:
        depth -= 1
        a, b, h, m = stack[depth]
        saving, mode = best_saving(arrays, states, grid, need_of, caution, a, b, h, m)
        sweeps = sweeps_from(arrays, a, b, m, sweeps)
        splitting, split, point = best_split(arrays, states, grid, need_of, caution, sweeps, a, b, h, m)
        if splitting < saving:
            total += sweeps.points[1, point]
            choices[a, b] = -1, split, sweeps.points[0, point]
            stack[depth] = split, b, 0, m - arrays.output_bytes[split]
            stack[depth + 1] = a, split - 1, h, m + live[b + 1] - live[split]
            depth += 2
            continue
        total += arrays.extra_time[mode]
        choices[a, b] = mode, -1, 0
        if a < b:
            _, held = saving_limits(arrays, a, b, h, mode)
            stack[depth] = a + 1, b, 1 if arrays.keeps_output[a] else 0, m - held
            depth += 1
    return total
