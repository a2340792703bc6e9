"""The numerical kernels of the solver `dp`, compiled with numba.

Notation, for a state (a, b, h): layers a..b are to be run forward and backward; x_a is live,
and so is g_(b+1) unless b is the last layer, in which case the forward phase is still on.
`h` says that somebody else holds x_a throughout. m is the bytes free beside x_a, g_(b+1)
and all else that is live at the start; t is the extra time over the fastest mode of each
layer run once. States of equal content are one state, known by its number.

Costs come as a tuple of arrays (see `ChainCosts.arrays`):
x, g : bytes of x_i and of its gradient; x[0] = 0 since the input is resident
p : prefix sums of parameter gradients
first_mode : where the modes of a layer begin in the arrays of modes
saved, forward_ws, backward_ws, extra : per mode
first_way : where the ways to run a layer without keeping anything begin
way_bytes, way_time : per way: bytes beside input and output, and time; a frontier
keeps_input, keeps_output : per layer
"""

from __future__ import annotations

import numpy as np

from scheduler.solvers.jit import compiled

INFINITE = 2**29
"""In tables: no solution. Two of them and a sweep still fit 32 bits."""


@compiled()
def mode_limits(costs, a, b, h, mode):  # type: ignore[no-untyped-def]
    """Return what running layer a with saving takes: at least `need` bytes, and `held` ones for the layers after it.

    The forward needs x_(a+1), what is saved and its workspace. After it x_a goes unless the
    layer keeps it or somebody else holds it. The backward needs what is saved, the kept
    output, g_(a+1), g_a, the parameter gradients of a..b and its workspace, where g_(b+1)
    stands already (not before the loss). In the last layer the loss is read off x_n.
    """
    x, g, p, _, saved, forward_ws, backward_ws, _, _, _, _, keeps_input, keeps_output = costs
    last = b == len(x) - 2
    dropped = 0 if keeps_input[a] or h else x[a]
    standing = 0 if last else g[b + 1]
    need = x[a + 1] + saved[mode] + forward_ws[mode]
    output = x[a + 1] if keeps_output[a] else 0
    gradients = g[a + 1] - standing + g[a] + p[b + 1] - p[a]
    need = max(need, output + saved[mode] + gradients + backward_ws[mode] - dropped)
    if a == b and last:
        need = max(need, x[a + 1] + saved[mode] + g[a + 1] - dropped)
    return need, x[a + 1] + saved[mode] - dropped


@compiled()
def extend_sweep(costs, a, i, sweep_m, sweep_t, count, spare_m, spare_t):  # type: ignore[no-untyped-def]
    """Extend the frontier of forward runs over a..i-1 from x_a, nothing kept, by layer i; return its length."""
    x, first_way, way_bytes, way_time = costs[0], costs[8], costs[9], costs[10]
    standing = x[i + 1] + (x[i] if i > a else 0)
    low, high = first_way[i], first_way[i + 1]
    if high == low + 1:
        need = standing + way_bytes[low]
        kept = 0
        for k in range(count):
            m = max(sweep_m[k], need)
            if kept and sweep_m[kept - 1] == m:
                kept -= 1
            sweep_m[kept] = m
            sweep_t[kept] = sweep_t[k] + way_time[low]
            kept += 1
        return kept
    total = 0
    k, way = 0, low
    while True:  # both frontiers descend in time as bytes grow
        spare_m[total] = max(sweep_m[k], standing + way_bytes[way])
        spare_t[total] = sweep_t[k] + way_time[way]
        if total and spare_m[total - 1] == spare_m[total]:
            spare_t[total - 1] = spare_t[total]
        else:
            total += 1
        more_k, more_way = k + 1 < count, way + 1 < high
        if not more_k and not more_way:
            break
        if more_k and (not more_way or sweep_m[k + 1] <= standing + way_bytes[way + 1]):
            k += 1
        else:
            way += 1
    for k in range(total):
        sweep_m[k], sweep_t[k] = spare_m[k], spare_t[k]
    return total


@compiled()
def left_shift(costs, b, j):  # type: ignore[no-untyped-def]
    """Return what the layers before j have more, in bytes, once j..b are done."""
    x, g, p = costs[0], costs[1], costs[2]
    standing = 0 if b == len(x) - 2 else g[b + 1]
    return standing - g[j] - (p[b + 1] - p[j])


@compiled()
def value_at(pool, start, count, m):  # type: ignore[no-untyped-def]
    """Return the least time of a frontier within m bytes; -1 if there is none."""
    low, high = start, start + count
    while low < high:
        middle = (low + high) // 2
        if pool[0, middle] <= m:
            low = middle + 1
        else:
            high = middle
    return pool[1, low - 1] if low > start else np.int64(-1)


@compiled()
def enter(m, t, unit, offset, bound, buffer, total):  # type: ignore[no-untyped-def]
    """Note a point that beats the bounds, and lower them; return the number of points."""
    buffer[0, total], buffer[1, total] = m, t
    k = -(-(m + offset) // unit)
    while k < len(bound) and bound[k] > t:
        bound[k] = t
        k += 1
    return total + 1


@compiled()
def longer(buffer, needed):  # type: ignore[no-untyped-def]
    """Return the buffer, or a copy with room for that many points."""
    if needed <= buffer.shape[1]:
        return buffer
    grown = np.empty((2, 2 * needed), np.int64)
    grown[:, : buffer.shape[1]] = buffer
    return grown


@compiled()
def join(pool, right, left, shifts, sweep, cap, grid, bound, buffer, total):  # type: ignore[no-untyped-def]
    """Enter the sums of two frontiers (first, end) and a sweep that beat the bounds; return the number of points.

    `shifts` are bytes to be added to either frontier, `grid` is (unit, offset, 1 / unit). It
    runs from many bytes to few, so that each point lowers few bounds.
    """
    shift_right, shift_left = shifts
    sweep_m, sweep_t = sweep
    unit, offset, per_byte = grid
    slots = len(bound) - 1
    r, el = right[1] - 1, left[1] - 1
    m_right, m_left = pool[0, r] + shift_right, pool[0, el] + shift_left
    while True:
        m = max(max(m_right, m_left), sweep_m)
        if m <= cap:
            t = pool[1, r] + pool[1, el] + sweep_t
            if t < bound[min(slots, int((m + offset) * per_byte))]:
                total = enter(m, t, unit, offset, bound, buffer, total)
        if m == sweep_m:
            return total
        if m == m_right:
            r -= 1
            if r < right[0]:
                return total
            m_right = pool[0, r] + shift_right
        if m == m_left:
            el -= 1
            if el < left[0]:
                return total
            m_left = pool[0, el] + shift_left


@compiled()
def settle(buffer, total, unit, offset, slots, ends, order):  # type: ignore[no-untyped-def]
    """Sort the points by bytes (`order`) and drop the dominated ones; return how many stay."""
    ends[:] = 0
    for i in range(total):
        ends[min(slots, (buffer[0, i] + offset) // unit) + 1] += 1
    for k in range(slots + 1):
        ends[k + 1] += ends[k]
    for i in range(total):
        k = min(slots, (buffer[0, i] + offset) // unit)
        position = ends[k]
        ends[k] += 1
        order[position] = i
    for position in range(1, total):  # only within a bucket is anything left to sort
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
def sweeps_from(costs, a, b, cap, found, ends):  # type: ignore[no-untyped-def]
    """Return the frontiers of all forward runs from x_a that keep nothing and fit: to x_(a+1), x_(a+2), .. x_b.

    `ends[0]` is their number; the k-th, from 0, lies in `found` from `ends[k]` (0 for the
    first) to `ends[k + 1]`.
    """
    ways = len(costs[9]) + 1
    sweep_m, sweep_t = np.empty(ways, np.int64), np.empty(ways, np.int64)
    spare_m, spare_t = np.empty(ways, np.int64), np.empty(ways, np.int64)
    sweep_m[0], sweep_t[0] = 0, 0
    sweeps, used, reach = 1, 0, 0
    for i in range(a, b):
        sweeps = extend_sweep(costs, a, i, sweep_m, sweep_t, sweeps, spare_m, spare_t)
        if sweep_m[0] > cap:
            break
        found = longer(found, used + sweeps)
        found[0, used : used + sweeps], found[1, used : used + sweeps] = sweep_m[:sweeps], sweep_t[:sweeps]
        used += sweeps
        reach += 1
        ends[reach] = used
    ends[0] = reach
    return found, ends


@compiled()
def co_prime_stride(length):  # type: ignore[no-untyped-def]
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


@compiled()
def pareto(costs, states, numbers, first, last, most, pruning, pool, start, count, used):  # type: ignore[no-untyped-def]
    """Compute the frontiers of the states first..last-1 from those of shorter ones.

    Parameters
    ----------
    states : tuple of arrays a, b, h
    numbers : array (2, n, n)
        The state's number of (h, a, b).
    most : array
        Per state, the most bytes that any schedule can offer it: points above are dropped.
    pruning : tuple
        Table of least extra times around a state (empty for none), the bytes of a slot,
        the time of a unit of the table, and the largest extra time of interest in such units.
    pool : array (2, points)
        Bytes and times of all frontiers; grown as needed and returned.
    """
    x, first_mode, extra, keeps_output = costs[0], costs[3], costs[7], costs[12]
    outside, rows, offsets, table_unit, quantum, limit = pruning
    pruned = outside.shape[0] > 0
    slots = outside.shape[1] - 1 if pruned else 4096
    bound, ends = np.empty(slots + 1, np.int64), np.empty(slots + 2, np.int64)
    buffer, order = np.empty((2, 1024), np.int64), np.empty(1024, np.int64)
    sweeps_buffer, ends_of = np.empty((2, 1024), np.int64), np.empty(len(x) + 1, np.int64)
    for s in range(first, last):
        a, b, h = states[0][s], states[1][s], states[2][s]
        cap = most[s]
        start[s], count[s] = used, 0
        if pruned:
            if rows[s] < 0:
                continue
            unit, offset = table_unit, offsets[s]
            for k in range(slots + 1):
                bound[k] = (limit - np.int64(outside[rows[s], k]) + 1) * quantum
            if bound[0] <= 0:
                continue
        else:
            largest = np.int64(0)
            for mode in range(first_mode[a], first_mode[a + 1]):
                need, held = mode_limits(costs, a, b, h, mode)
                if a < b:
                    child = numbers[1 if keeps_output[a] else 0, a + 1, b]
                    if count[child]:
                        need = max(need, pool[0, start[child] + count[child] - 1] + held)
                largest = max(largest, need)
            unit, offset = min(largest, cap) // slots + 1, np.int64(0)
            bound[:] = 2**62
        # Rounded down: a slot too low only lets more points through.
        per_byte = (1.0 - 1e-12) / unit
        total = 0
        for mode in range(first_mode[a], first_mode[a + 1]):
            need, held = mode_limits(costs, a, b, h, mode)
            if a == b:
                if need <= cap and extra[mode] < bound[min(slots, int((need + offset) * per_byte))]:
                    total = enter(need, extra[mode], unit, offset, bound, buffer, total)
                continue
            child = numbers[1 if keeps_output[a] else 0, a + 1, b]
            buffer = longer(buffer, total + count[child])
            for k in range(start[child] + count[child] - 1, start[child] - 1, -1):
                m, t = max(need, pool[0, k] + held), pool[1, k] + extra[mode]
                if m <= cap and t < bound[min(slots, int((m + offset) * per_byte))]:
                    total = enter(m, t, unit, offset, bound, buffer, total)
        all_sweeps, ends_of = sweeps_from(costs, a, b, cap, sweeps_buffer, ends_of)
        sweeps_buffer = all_sweeps
        reach = ends_of[0]
        stride = co_prime_stride(reach)
        place = 0
        for _ in range(reach):
            place = (place + stride) % reach
            j = a + 1 + place
            right, left = numbers[0, j, b], numbers[h, a, j - 1]
            if count[right] == 0 or count[left] == 0:
                continue
            shift_right, shift_left = x[j], -left_shift(costs, b, j)
            r0, r1 = start[right], start[right] + count[right]
            l0, l1 = start[left], start[left] + count[left]
            for way in range(ends_of[place] if place else 0, ends_of[place + 1]):
                sweep_m, sweep_t = all_sweeps[0, way], all_sweeps[1, way]
                m = max(max(pool[0, r0] + shift_right, pool[0, l0] + shift_left), sweep_m)
                if m > cap:
                    break
                least = pool[1, r1 - 1] + pool[1, l1 - 1] + sweep_t
                if least >= bound[min(slots, int((m + offset) * per_byte))]:
                    continue
                buffer = longer(buffer, total + count[right] + count[left])
                shifts, sweep, grid = (shift_right, shift_left), (sweep_m, sweep_t), (unit, offset, per_byte)
                total = join(pool, (r0, r1), (l0, l1), shifts, sweep, cap, grid, bound, buffer, total)
        if total > len(order):
            order = np.empty(2 * total, np.int64)
        kept = settle(buffer, total, unit, offset, slots, ends, order)
        pool = longer(pool, used + kept)
        for k in range(kept):
            pool[0, used + k], pool[1, used + k] = buffer[0, order[k]], buffer[1, order[k]]
        count[s] = kept
        used += kept
    return pool, used


@compiled()
def decide(costs, numbers, pool, start, count, a, b, h, m):  # type: ignore[no-untyped-def]
    """Return how (a, b, h) reaches its least time within m bytes: (mode, -1, 0), or (-1, j, the sweep's bytes)."""
    x, first_mode, extra, keeps_output = costs[0], costs[3], costs[7], costs[12]
    s = numbers[h, a, b]
    target = value_at(pool, start[s], count[s], m)
    for mode in range(first_mode[a], first_mode[a + 1]):
        need, held = mode_limits(costs, a, b, h, mode)
        if need > m:
            continue
        if a == b:
            if extra[mode] == target:
                return mode, -1, np.int64(0)
            continue
        child = numbers[1 if keeps_output[a] else 0, a + 1, b]
        rest = value_at(pool, start[child], count[child], m - held)
        if rest >= 0 and rest + extra[mode] == target:
            return mode, -1, np.int64(0)
    ways = len(costs[9]) + 1
    sweep_m, sweep_t = np.empty(ways, np.int64), np.empty(ways, np.int64)
    spare_m, spare_t = np.empty(ways, np.int64), np.empty(ways, np.int64)
    sweep_m[0], sweep_t[0] = 0, 0
    sweeps = 1
    for j in range(a + 1, b + 1):
        sweeps = extend_sweep(costs, a, j - 1, sweep_m, sweep_t, sweeps, spare_m, spare_t)
        right, left = numbers[0, j, b], numbers[h, a, j - 1]
        after = value_at(pool, start[right], count[right], m - x[j])
        before = value_at(pool, start[left], count[left], m + left_shift(costs, b, j))
        if after < 0 or before < 0:
            continue
        for way in range(sweeps):
            if sweep_m[way] <= m and after + before + sweep_t[way] == target:
                return -1, j, sweep_m[way]
    return -1, -1, np.int64(0)
