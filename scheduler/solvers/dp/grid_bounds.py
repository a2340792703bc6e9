"""Bounds for the solver `dp` on a coarse grid of memory, compiled with numba.

Bytes are rounded to slots of `unit` bytes, always in the schedule's favor, and times to whole
quanta, down: so both tables are lower bounds. A state with m free bytes stands in slot
(m + offset) // unit, with an offset of its own. An amount d that a part has more than the
whole, offsets included, becomes ceil(d / unit) slots more, and a limit becomes its slot. Any
offsets give true bounds; `chain_costs.offsets` chooses them so that little is lost by rounding.
See `chain_kernels` for states and costs.
"""

from __future__ import annotations

import numpy as np

from scheduler.solvers.dp.kernels import mode_limits, sweeps_from
from scheduler.solvers.jit import compiled

INFINITE = np.float32(2**24)
"""No solution, or none of interest; below it, 32-bit floats hold whole numbers exactly."""


@compiled()
def slots_more(amount, unit, rounding):  # type: ignore[no-untyped-def]
    """Return an amount of bytes in slots: rounded up with rounding = unit - 1, to the nearest with unit // 2."""
    return (amount + rounding) // unit


@compiled()
def in_quanta(time, quantum):  # type: ignore[no-untyped-def]
    """Return a time in whole quanta, rounded down."""
    return min(INFINITE, np.float32(time // quantum))


@compiled()
def lower_row(row, part, cost):  # type: ignore[no-untyped-def]
    """Lower a row to another one plus a cost; apart, so that the loop compiles to vector instructions."""
    for k in range(len(row)):
        value = part[k] + cost
        row[k] = value if value < row[k] else row[k]


@compiled()
def lower_row_by_two(row, part, other, cost):  # type: ignore[no-untyped-def]
    """Lower a row to the sum of two plus a cost."""
    for k in range(len(row)):
        value = part[k] + other[k] + cost
        row[k] = value if value < row[k] else row[k]


@compiled()
def lower(own, part, low, shift, cost):  # type: ignore[no-untyped-def]
    """Take, from slot `low` on, the minimum of a row and another one shifted; beyond its end stands its last entry."""
    slots = len(own) - 1
    end = min(slots, slots - shift) + 1
    if low < end:
        lower_row(own[low:end], part[low + shift : end + shift], cost)
    for k in range(max(low, end), slots + 1):
        own[k] = min(own[k], part[slots] + cost)


@compiled()
def lower_by_two(own, part, other, low, shift, other_shift, cost):  # type: ignore[no-untyped-def]
    """Take, from slot `low` on, the minimum of a row and the sum of two shifted ones."""
    slots, last = len(part) - 1, len(own) - 1
    end = min(last, slots - max(shift, other_shift)) + 1
    if low < end:
        theirs, others = part[low + shift : end + shift], other[low + other_shift : end + other_shift]
        lower_row_by_two(own[low:end], theirs, others, cost)
    for k in range(max(low, end), last + 1):
        own[k] = min(own[k], part[min(slots, k + shift)] + other[min(slots, k + other_shift)] + cost)


@compiled()
def push(part, own, low, highest, shift, cost):  # type: ignore[no-untyped-def]
    """Lower a shifted row to another one, of which the slots low..highest count."""
    slots = len(own) - 1
    end = min(highest, slots - shift) + 1
    if low < end:
        lower_row(part[low + shift : end + shift], own[low:end], cost)
    for k in range(max(low, end), highest + 1):
        part[slots] = min(part[slots], own[k] + cost)


@compiled()
def push_by_two(part, own, other, low, highest, shift, other_shift, cost):  # type: ignore[no-untyped-def]
    """Lower a shifted row to the sum of another one, of which the slots low..highest count, and a shifted one."""
    slots = len(own) - 1
    end = min(highest, slots - max(shift, other_shift)) + 1
    if low < end:
        theirs, others = part[low + shift : end + shift], other[low + other_shift : end + other_shift]
        lower_row_by_two(theirs, own[low:end], others, cost)
    for k in range(max(low, end), highest + 1):
        to = min(slots, k + shift)
        part[to] = min(part[to], own[k] + other[min(slots, k + other_shift)] + cost)


@compiled()
def inside(costs, states, numbers, first, last, rows, grid, sweeps, rounding, table, begin):  # type: ignore[no-untyped-def]
    """Fill `table[rows[s], k]` for states first..last-1: at least the extra time of state s within slot k.

    That is with `rounding` = unit - 1. With unit // 2 the errors cancel out: no bound, but a
    good guess. States with rows[s] < 0 are left out. `begin[s]` is the first slot with a value.
    """
    x, g, p, first_mode, extra, keeps_output = costs[0], costs[1], costs[2], costs[3], costs[7], costs[12]
    offsets, unit, quantum = grid
    sweep_m, sweep_t = sweeps
    slots = table.shape[1] - 1
    for s in range(first, last):
        begin[s] = slots + 1
        if rows[s] < 0:
            continue
        own = table[rows[s]]
        own[:] = INFINITE
        a, b, h = states[0][s], states[1][s], states[2][s]
        offset = offsets[s]
        for mode in range(first_mode[a], first_mode[a + 1]):
            need, held = mode_limits(costs, a, b, h, mode)
            cost = in_quanta(extra[mode], quantum)
            low = (need + offset) // unit
            if a == b:
                for k in range(low, slots + 1):
                    own[k] = min(own[k], cost)
                continue
            number = numbers[1 if keeps_output[a] else 0, a + 1, b]
            if rows[number] < 0:
                continue
            shift = slots_more(offsets[number] - offset - held, unit, rounding)
            lower(own, table[rows[number]], max(low, -shift), shift, cost)
        standing = offset - (0 if b == len(x) - 2 else g[b + 1]) + p[b + 1]
        for j in range(a + 1, b + 1):
            low = (sweep_m[a, j] + offset) // unit
            if low > slots:
                break
            right, left = numbers[0, j, b], numbers[h, a, j - 1]
            if rows[right] < 0 or rows[left] < 0:
                continue
            shift_right = slots_more(offsets[right] - offset - x[j], unit, rounding)
            shift_left = slots_more(offsets[left] - g[j] + p[j] - standing, unit, rounding)
            cost = in_quanta(sweep_t[a, j], quantum)
            low = max(low, max(begin[right] - shift_right, begin[left] - shift_left))
            # From `end` on, the row stands no higher than the sum can ever be.
            least = table[rows[right], slots] + table[rows[left], slots] + cost
            end = slots + 1
            if own[slots] <= least:
                back = max(low, 0)
                while back < end:
                    middle = (back + end) // 2
                    if own[middle] <= least:
                        end = middle
                    else:
                        back = middle + 1
            if low < end:
                lower_by_two(own[:end], table[rows[right]], table[rows[left]], low, shift_right, shift_left, cost)
        for k in range(slots, -1, -1):
            own[k] = min(own[k], INFINITE)
            if own[k] < INFINITE:
                begin[s] = k


@compiled()
def outside(costs, states, numbers, first, last, rows, grid, sweeps, limit, table, around):  # type: ignore[no-untyped-def]
    """Push `around` from states last-1 down to first to their parts.

    `around[s, k]` is at most the extra time of everything around state s in a schedule that
    leaves it slot k. States for which no slot gives a total of at most `limit` die.
    """
    x, g, p, first_mode, extra, keeps_output = costs[0], costs[1], costs[2], costs[3], costs[7], costs[12]
    offsets, unit, quantum = grid
    rounding = unit - 1
    sweep_m, sweep_t = sweeps
    slots = table.shape[1] - 1
    for s in range(last - 1, first - 1, -1):
        if rows[s] < 0:
            continue
        own, inner = around[rows[s]], table[rows[s]]
        for k in range(slots - 1, -1, -1):
            own[k] = min(own[k], own[k + 1])
        lowest, highest = slots + 1, -1
        for k in range(slots + 1):
            if own[k] + inner[k] <= limit:
                lowest = min(lowest, k)
                highest = k
        if highest < 0:
            rows[s] = -1
            continue
        a, b, h = states[0][s], states[1][s], states[2][s]
        if a == b:
            continue
        offset = offsets[s]
        for mode in range(first_mode[a], first_mode[a + 1]):
            need, held = mode_limits(costs, a, b, h, mode)
            cost = in_quanta(extra[mode], quantum)
            number = numbers[1 if keeps_output[a] else 0, a + 1, b]
            if rows[number] < 0:
                continue
            shift = slots_more(offsets[number] - offset - held, unit, rounding)
            low = max(max(lowest, (need + offset) // unit), -shift)
            push(around[rows[number]], own, low, highest, shift, cost)
        standing = offset - (0 if b == len(x) - 2 else g[b + 1]) + p[b + 1]
        for j in range(a + 1, b + 1):
            low = max(lowest, (sweep_m[a, j] + offset) // unit)
            if low > highest:
                break
            right, left = numbers[0, j, b], numbers[h, a, j - 1]
            if rows[right] < 0 or rows[left] < 0:
                continue
            shift_right = slots_more(offsets[right] - offset - x[j], unit, rounding)
            shift_left = slots_more(offsets[left] - g[j] + p[j] - standing, unit, rounding)
            cost = in_quanta(sweep_t[a, j], quantum)
            low = max(low, max(-shift_right, -shift_left))
            push_by_two(around[rows[right]], own, table[rows[left]], low, highest, shift_right, shift_left, cost)
            push_by_two(around[rows[left]], own, table[rows[right]], low, highest, shift_left, shift_right, cost)


@compiled()
def least_bytes(costs, states, numbers, first, last, sweeps, need_of):  # type: ignore[no-untyped-def]
    """Fill `need_of[s]` for states first..last-1: the least free bytes, exactly, with which state s can be run."""
    x, g, p, first_mode, keeps_output = costs[0], costs[1], costs[2], costs[3], costs[12]
    sweep_m = sweeps[0]
    for s in range(first, last):
        a, b, h = states[0][s], states[1][s], states[2][s]
        least = np.int64(2**62)
        for mode in range(first_mode[a], first_mode[a + 1]):
            need, held = mode_limits(costs, a, b, h, mode)
            if a < b:
                need = max(need, need_of[numbers[1 if keeps_output[a] else 0, a + 1, b]] + held)
            least = min(least, need)
        standing = (0 if b == len(x) - 2 else g[b + 1]) - p[b + 1]
        for j in range(a + 1, b + 1):
            before = need_of[numbers[h, a, j - 1]] - standing + g[j] - p[j]
            need = max(max(sweep_m[a, j], before), need_of[numbers[0, j, b]] + x[j])
            least = min(least, need)
        need_of[s] = least


@compiled()
def sweep_bounds(costs):  # type: ignore[no-untyped-def]
    """Return arrays (n, n): the least bytes and the least time of a forward run from x_a to x_j that keeps nothing.

    Where a layer can be run in several ways, they need not be of the same one.
    """
    x, first_way, way_bytes, way_time = costs[0], costs[8], costs[9], costs[10]
    n = len(x) - 1
    need, time = np.zeros((n, n), np.int64), np.zeros((n, n), np.int64)
    for a in range(n):
        for i in range(a, n - 1):
            standing = x[i + 1] + (x[i] if i > a else 0)
            need[a, i + 1] = max(need[a, i], standing + way_bytes[first_way[i]])
            time[a, i + 1] = time[a, i] + way_time[first_way[i + 1] - 1]
    return need, time


@compiled()
def at(table, row, slot):  # type: ignore[no-untyped-def]
    """Return a table's entry; beyond its end stands its last one, and states left out have none."""
    return INFINITE if row < 0 else table[row, max(0, min(slot, table.shape[1] - 1))]


@compiled()
def descend(costs, numbers, rows, grid, need_of, table, free, caution, choices):  # type: ignore[no-untyped-def]
    """Walk down from the whole chain, choosing each part by the table, in exact bytes; return the extra time.

    The bytes that a part really has are known on the way down, so that the table's rounding
    does not add up, and no part gets less than it needs. `caution` slots are left unused,
    since the table promises too much. `choices[a, b]` becomes (mode, -1, 0) or
    (-1, j, bytes of the sweep).
    """
    x, g, p, first_mode, extra, keeps_output = costs[0], costs[1], costs[2], costs[3], costs[7], costs[12]
    offsets, unit, quantum = grid
    n = len(x) - 1
    found, ends = np.empty((2, 1024), np.int64), np.empty(n + 2, np.int64)
    stack = np.empty((2 * n + 2, 4), np.int64)
    stack[0] = 0, n - 1, 0, free
    depth, total = 1, 0
    while depth:
        depth -= 1
        a, b, h, m = stack[depth]
        best, mode_of, split, sweep_of = np.float32(np.inf), -1, -1, -1
        for mode in range(first_mode[a], first_mode[a + 1]):
            need, held = mode_limits(costs, a, b, h, mode)
            if need > m:
                continue
            value = in_quanta(extra[mode], quantum)
            if a < b:
                child = numbers[1 if keeps_output[a] else 0, a + 1, b]
                if m - held < need_of[child]:
                    continue
                value += at(table, rows[child], (m - held + offsets[child]) // unit - caution)
            if value < best:
                best, mode_of, split = value, mode, -1
        standing = m + (0 if b == n - 1 else g[b + 1]) - p[b + 1]
        found, ends = sweeps_from(costs, a, b, m, found, ends)
        for place in range(ends[0]):
            j = a + 1 + place
            right, left = numbers[0, j, b], numbers[h, a, j - 1]
            after, before = m - x[j], standing - g[j] + p[j]
            if after < need_of[right] or before < need_of[left]:
                continue
            value = at(table, rows[right], (after + offsets[right]) // unit - caution)
            value += at(table, rows[left], (before + offsets[left]) // unit - caution)
            way = ends[place] if place else 0
            while way + 1 < ends[place + 1] and found[0, way + 1] <= m:
                way += 1
            value += in_quanta(found[1, way], quantum)
            if value < best:
                best, mode_of, split, sweep_of = value, -1, j, way
        if split < 0:
            total += extra[mode_of]
            choices[a, b] = mode_of, -1, 0
            if a < b:
                _, held = mode_limits(costs, a, b, h, mode_of)
                stack[depth] = a + 1, b, 1 if keeps_output[a] else 0, m - held
                depth += 1
            continue
        total += found[1, sweep_of]
        choices[a, b] = -1, split, found[0, sweep_of]
        stack[depth] = split, b, 0, m - x[split]
        stack[depth + 1] = a, split - 1, h, standing - g[split] + p[split]
        depth += 2
    return total
