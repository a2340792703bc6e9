"""The fastest schedule of a chain in which each layer runs forward at most twice, compiled with numba.

See `transitions` for states and notation. Only states that end the chain are searched: a label is
one way to reach the state of layers a..n-1, with the bytes free then and the extra time so far.
Layers that a sweep leads past are all saved in their second run, in their fastest mode.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.dp.costs import ChainArrays
from scheduler.solvers.dp.transitions import saving_limits
from scheduler.solvers.jit import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Labels(NamedTuple):
    """The best label of each state (a, h) in each slot of its free bytes; the row of (a, h) is 2 a + h.

    Attributes
    ----------
    least : float
        What the cheapest choices cost if nothing limits them: extra time plus the price of the bytes that they take.
    unit : int
        Bytes of a slot.
    first_bytes : ndarray of int64, shape (n + 1,)
        The free bytes at which the slots of a state begin.
    cost : ndarray of float64, shape (2 n + 2, slots)
        Extra time so far, plus the price of the bytes that have been taken; inf without a label.
    free_bytes, time : ndarray of int64, shape (2 n + 2, slots)
    previous : ndarray of int64, shape (2 n + 2, slots)
        The label before: row times slots, plus slot.
    mode : ndarray of int64, shape (2 n + 2, slots)
        The mode in which the layer before was saved; -1 after a sweep.
    """

    least: float
    unit: int
    first_bytes: Ints
    cost: Floats
    free_bytes: Ints
    time: Ints
    previous: Ints
    mode: Ints


@compiled(inner=True)
def fastest_modes(arrays: ChainArrays) -> Ints:
    """Return the fastest mode of each layer."""
    n = len(arrays.output_bytes) - 1
    fastest = arrays.first_mode[:n].copy()
    for a in range(n):
        for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
            if arrays.extra_time[mode] < arrays.extra_time[fastest[a]]:
                fastest[a] = mode
    return fastest


@compiled(inner=True)
def least_costs(arrays: ChainArrays, price: float) -> Floats:
    """Return, per (h, a), the least extra time plus the price of the bytes taken from layer a on, without limits."""
    x, n = arrays.output_bytes, len(arrays.output_bytes) - 1
    least = np.zeros((2, n + 1))
    after_sweep = np.inf  # from x_(a+1), which a sweep has reached, on
    for a in range(n - 1, -1, -1):
        again = arrays.way_time[arrays.first_way[a + 1] - 1] + after_sweep
        for h in range(2):
            least[h, a] = again
            for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
                _, held = saving_limits(arrays, a, n - 1, h, mode)
                rest = least[1 if arrays.keeps_output[a] else 0, a + 1]
                least[h, a] = min(least[h, a], arrays.extra_time[mode] + price * held + rest)
        after_sweep = min(again, price * x[a] + least[0, a])
    return least


@compiled(inner=True)
def bytes_along_the_cheapest(arrays: ChainArrays, price: float, least: Floats, free: int) -> Floats:
    """Return the free bytes of each state along the choices of `least_costs`, scaled so that all bytes are taken."""
    x, n = arrays.output_bytes, len(arrays.output_bytes) - 1
    taken = np.zeros(n + 1)
    a, h = 0, 0
    while a < n:
        best, j, held, after = np.inf, a + 1, 0, 0
        for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
            _, size = saving_limits(arrays, a, n - 1, h, mode)
            kept = 1 if arrays.keeps_output[a] else 0
            cost = arrays.extra_time[mode] + price * size + least[kept, a + 1]
            if cost < best:
                best, held, after = cost, size, kept
        time = 0
        for end in range(a + 1, n):
            time += arrays.way_time[arrays.first_way[end] - 1]
            cost = time + price * x[end] + least[0, end]
            if cost < best:
                best, j, held, after = cost, end, x[end], 0
        for k in range(a + 1, j + 1):
            taken[k] = taken[a] + held * (k - a) / (j - a)
        a, h = j, after
    scaled: Floats = free * (1 - taken / max(1.0, taken[n]))
    return scaled


@compiled(inner=True)
def add_label(labels: Labels, row: int, free: int, time: int, cost: float, previous: int, mode: int) -> None:
    """Keep a label if it is in the slots of its state and cheaper than the other one in its slot."""
    slot = (free - labels.first_bytes[row // 2]) // labels.unit
    if 0 <= slot < labels.cost.shape[1] and cost < labels.cost[row, slot]:
        labels.cost[row, slot], labels.time[row, slot], labels.free_bytes[row, slot] = cost, time, free
        labels.previous[row, slot], labels.mode[row, slot] = previous, mode


@compiled(inner=True)
def list_sweeps(arrays: ChainArrays, fastest: Ints, a: int, h: int, free: int, sweeps: Ints) -> int:
    """Fill in (j, least free bytes, time) of the sweeps from x_a that may fit; return their number.

    The bytes include what layers a..j-1 need later, all saved.
    """
    x, live, n = arrays.output_bytes, arrays.live_gradients, len(arrays.output_bytes) - 1
    count, sweep_bytes, time, held_before, forward, backward, held_input = 0, 0, 0, 0, 0, live[n], h
    for i in range(a, n - 1):
        way = arrays.first_way[i + 1] - 1
        sweep_bytes = max(sweep_bytes, x[i + 1] + (x[i] if i > a else 0) + arrays.way_bytes[way])
        time += arrays.way_time[way]
        mode, freed = fastest[i], 0 if arrays.keeps_input[i] or held_input else x[i]
        forward = max(forward, held_before + x[i + 1] + arrays.saved_bytes[mode] + arrays.forward_workspace_bytes[mode])
        output = x[i + 1] if arrays.keeps_output[i] else 0
        own = output + arrays.saved_bytes[mode] + arrays.backward_workspace_bytes[mode] - freed
        backward = max(backward, held_before + own + arrays.gradient_bytes[i + 1] + live[i])
        _, held = saving_limits(arrays, i, n - 1, held_input, mode)
        held_before += held
        held_input = 1 if arrays.keeps_output[i] else 0
        j = i + 1
        if max(sweep_bytes, backward - live[n]) > free:
            break
        sweeps[0, count] = j
        sweeps[1, count] = max(max(sweep_bytes, backward - live[n]), forward + live[j] - live[n])
        sweeps[2, count] = time
        count += 1
    return count


@compiled()
def fill_labels(arrays: ChainArrays, free: int, price: float, slack: float, slots: int, unit: int) -> Labels:
    """Return the labels of all states.

    Parameters
    ----------
    arrays : ChainArrays
    free : int
        Bytes free for the whole chain.
    price : float
        Extra time per byte.
    slack : float
        Labels that cost more than the cheapest choices by more than this are left out.
    slots : int
        Slots of each state, around the bytes that the cheapest choices leave it.
    unit : int
        Bytes of a slot.
    """
    x, n = arrays.output_bytes, len(arrays.output_bytes) - 1
    fastest, least = fastest_modes(arrays), least_costs(arrays, price)
    middle = bytes_along_the_cheapest(arrays, price, least, free)
    rows = 2 * n + 2
    labels = Labels(
        least[0, 0],
        unit,
        (middle - unit * (slots // 2)).astype(np.int64),
        np.full((rows, slots), np.inf),
        np.empty((rows, slots), np.int64),
        np.empty((rows, slots), np.int64),
        np.empty((rows, slots), np.int64),
        np.empty((rows, slots), np.int64),
    )
    add_label(labels, 0, free, 0, 0.0, -1, -1)
    limit, sweeps = least[0, 0] + slack, np.empty((3, n + 1), np.int64)
    for row in range(2 * n):
        a, h = row // 2, row % 2
        if least[h, a] == np.inf or labels.cost[row].min() == np.inf:
            continue
        count, useful = list_sweeps(arrays, fastest, a, h, free, sweeps), 0
        for k in range(count):
            cost = sweeps[2, k] + price * x[sweeps[0, k]] + least[0, sweeps[0, k]]
            if cost - least[h, a] <= slack:
                sweeps[:, useful] = sweeps[:, k]
                useful += 1
        for slot in range(slots):
            before = labels.cost[row, slot]
            if before + least[h, a] > limit:
                continue
            m, t, number = labels.free_bytes[row, slot], labels.time[row, slot], row * slots + slot
            kept = 1 if arrays.keeps_output[a] else 0
            for mode in range(arrays.first_mode[a], arrays.first_mode[a + 1]):
                need, held = saving_limits(arrays, a, n - 1, h, mode)
                cost = before + arrays.extra_time[mode] + price * held
                if need <= m and cost + least[kept, a + 1] <= limit:
                    to = 2 * (a + 1) + kept
                    add_label(labels, to, m - held, t + arrays.extra_time[mode], cost, number, mode)
            for k in range(useful):
                j, need, time = sweeps[0, k], sweeps[1, k], sweeps[2, k]
                cost = before + time + price * x[j]
                if need <= m and cost + least[0, j] <= limit:
                    add_label(labels, 2 * j, m - x[j], t + time, cost, number, -1)
    return labels
