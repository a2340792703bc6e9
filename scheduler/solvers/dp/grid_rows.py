"""Operations on the rows of the tables of `grid_bounds`, compiled with numba.

A row has an entry per slot; entries descend with the slots.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.solvers.jit import compiled

Floats = npt.NDArray[np.float32]


@compiled(inner=True)
def lower_row(row: Floats, part: Floats, cost: np.float32) -> None:
    """Lower a row to another one plus a cost; a function of its own so that it compiles to vector instructions."""
    for k in range(len(row)):
        value = part[k] + cost
        row[k] = value if value < row[k] else row[k]


@compiled(inner=True)
def lower_row_by_two(row: Floats, part: Floats, other: Floats, cost: np.float32) -> None:
    """Lower a row to the sum of two plus a cost."""
    for k in range(len(row)):
        value = part[k] + other[k] + cost
        row[k] = value if value < row[k] else row[k]


@compiled(inner=True)
def lower(own: Floats, part: Floats, low: int, shift: int, cost: np.float32) -> None:
    """Lower a row from slot `low` on to another one shifted; beyond its end that one has its last entry."""
    slots = len(own) - 1
    end = min(slots, slots - shift) + 1
    if low < end:
        lower_row(own[low:end], part[low + shift : end + shift], cost)
    for k in range(max(low, end), slots + 1):
        own[k] = min(own[k], part[slots] + cost)


@compiled(inner=True)
def lower_by_two(
    own: Floats, part: Floats, other: Floats, low: int, shift: int, other_shift: int, cost: np.float32
) -> None:
    """Lower a row from slot `low` on to the sum of two shifted ones."""
    slots, last = len(part) - 1, len(own) - 1
    end = min(last, slots - max(shift, other_shift)) + 1
    if low < end:
        parts, others = part[low + shift : end + shift], other[low + other_shift : end + other_shift]
        lower_row_by_two(own[low:end], parts, others, cost)
    for k in range(max(low, end), last + 1):
        own[k] = min(own[k], part[min(slots, k + shift)] + other[min(slots, k + other_shift)] + cost)


@compiled(inner=True)
def push(part: Floats, own: Floats, low: int, highest: int, shift: int, cost: np.float32) -> None:
    """Lower a shifted row to the slots low..highest of another one."""
    slots = len(own) - 1
    end = min(highest, slots - shift) + 1
    if low < end:
        lower_row(part[low + shift : end + shift], own[low:end], cost)
    for k in range(max(low, end), highest + 1):
        part[slots] = min(part[slots], own[k] + cost)


@compiled(inner=True)
def push_by_two(
    part: Floats, own: Floats, other: Floats, low: int, highest: int, shift: int, other_shift: int, cost: np.float32
) -> None:
    """Lower a shifted row to the slots low..highest of the sum of another one and a shifted one."""
    slots = len(own) - 1
    end = min(highest, slots - max(shift, other_shift)) + 1
    if low < end:
        parts, others = part[low + shift : end + shift], other[low + other_shift : end + other_shift]
        lower_row_by_two(parts, own[low:end], others, cost)
    for k in range(max(low, end), highest + 1):
        to = min(slots, k + shift)
        part[to] = min(part[to], own[k] + other[min(slots, k + other_shift)] + cost)


@compiled(inner=True)
def count_at_most(own: Floats, part: Floats, other: Floats, limit: np.float32) -> int:
    """Return at how many slots three rows sum to at most a limit; counting compiles to vector instructions."""
    count = 0
    for k in range(len(own)):
        count += own[k] + part[k] + other[k] <= limit
    return count


@compiled(inner=True)
def is_split_useful(
    own: Floats, part: Floats, other: Floats, low: int, highest: int, shift: int, other_shift: int, limit: np.float32
) -> bool:
    """Return whether a row and two shifted ones sum to at most a limit at one of the slots low..highest."""
    slots = len(own) - 1
    end = min(highest, slots - max(shift, other_shift)) + 1
    if low < end:
        parts, others = part[low + shift : end + shift], other[low + other_shift : end + other_shift]
        if count_at_most(own[low:end], parts, others, limit):
            return True
    for k in range(max(low, end), highest + 1):
        if own[k] + part[min(slots, k + shift)] + other[min(slots, k + other_shift)] <= limit:
            return True
    return False


@compiled(inner=True)
def first_at_most(row: Floats, low: int, value: np.float32) -> int:
    """Return the first slot from `low` on at which a descending row is at most a value; its length if none is."""
    end = len(row)
    if row[end - 1] <= value:
        low = max(low, 0)
        while low < end:
            middle = (low + end) // 2
            if row[middle] <= value:
                end = middle
            else:
                low = middle + 1
    return end


@compiled(inner=True)
def useful_slots(around: Floats, inside: Floats, limit: int) -> tuple[int, int]:
    """Return the first and the last slot at which two rows sum to at most a limit; the last is -1 if there is none."""
    lowest, highest = len(around), -1
    for k in range(len(around)):
        if around[k] + inside[k] <= limit:
            lowest = min(lowest, k)
            highest = k
    return lowest, highest
