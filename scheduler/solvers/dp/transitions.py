"""The two ways to begin a state of a chain, and the bytes that each needs, compiled with numba.

Notation, for a state (a, b, h): layers a..b are to be run forward and backward. x_a is live,
and so is g_(b+1), the gradient of x_(b+1), unless b is the last layer: then the forward phase
has not ended. `h` is 1 if x_a is held from outside throughout. m is the bytes free in addition
to x_a, g_(b+1) and all else that is live at the start; t is the extra time over the fastest mode
of each layer run once. States with equal costs are one state, known by its number.

A state begins in one of two ways. Layer a runs with saving in some mode, then the state of
layers a + 1..b follows, then layer a runs backward. Or a sweep runs layers a..j-1 forward
without keeping anything but x_j; then layers j..b follow, and then layers a..j-1 from x_a.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.dp.costs import ChainArrays, ChainStates
from scheduler.solvers.jit import compiled

Ints = npt.NDArray[np.int64]


class Sweeps(NamedTuple):
    """The frontiers of the sweeps from x_a to x_(a+1), x_(a+2), and so on.

    Attributes
    ----------
    points : ndarray of int64, shape (2, points)
        Bytes and times; those of the k-th sweep, from 0, go from `ends[k]` to `ends[k + 1]`.
    ends : ndarray of int64, shape (n + 2,)
    reach : int
        Number of sweeps.
    """

    points: Ints
    ends: Ints
    reach: int


@compiled(inner=True)
def state_after_saving(arrays: ChainArrays, states: ChainStates, a: int, b: int) -> int:
    """Return the state of layers a + 1..b while layer a is saved: x_(a+1) is held if a keeps its output."""
    number: int = states.numbers[1 if arrays.keeps_output[a] else 0, a + 1, b]
    return number


@compiled()
def saving_limits(arrays: ChainArrays, a: int, b: int, h: int, mode: int) -> tuple[int, int]:
    """Return the least bytes with which layer a can run with saving, and those it takes from the layers after it.

    The forward needs x_(a+1), the saved bytes and its workspace. After it x_a is freed unless
    the layer keeps it or it is held from outside. The backward needs the saved bytes, the kept
    output, g_(a+1), g_a, the parameter gradients of a..b and its workspace, less g_(b+1), which
    is live already (except before the loss). In the last layer the loss reads x_n.
    """
    x, g, live = arrays.output_bytes, arrays.gradient_bytes, arrays.live_gradients
    saved = arrays.saved_bytes[mode]
    freed = 0 if arrays.keeps_input[a] or h else x[a]
    need = x[a + 1] + saved + arrays.forward_workspace_bytes[mode]
    output = x[a + 1] if arrays.keeps_output[a] else 0
    gradients = g[a + 1] + live[a] - live[b + 1]
    need = max(need, output + saved + gradients + arrays.backward_workspace_bytes[mode] - freed)
    if a == b and b == len(x) - 2:
        need = max(need, x[a + 1] + saved + g[a + 1] - freed)
    return need, x[a + 1] + saved - freed


@compiled(inner=True)
def sweep_scratch(arrays: ChainArrays) -> tuple[Ints, Ints]:
    """Return two arrays (2, points): the frontier of the empty sweep, and scratch space for `extend_sweep`."""
    ways = len(arrays.way_bytes) + 1
    sweep, spare = np.empty((2, ways), np.int64), np.empty((2, ways), np.int64)
    sweep[0, 0], sweep[1, 0] = 0, 0
    return sweep, spare


@compiled(inner=True)
def extend_sweep(arrays: ChainArrays, a: int, i: int, sweep: Ints, count: int, spare: Ints) -> int:
    """Extend the frontier of the sweep from x_a over a..i-1 by layer i in place; return its number of points."""
    x, way_bytes, way_time = arrays.output_bytes, arrays.way_bytes, arrays.way_time
    live = x[i + 1] + (x[i] if i > a else 0)
    low, high = arrays.first_way[i], arrays.first_way[i + 1]
    if high == low + 1:
        need = live + way_bytes[low]
        kept = 0
        for k in range(count):
            m = max(sweep[0, k], need)
            if kept and sweep[0, kept - 1] == m:
                kept -= 1
            sweep[0, kept] = m
            sweep[1, kept] = sweep[1, k] + way_time[low]
            kept += 1
        return kept
    total = 0
    k, way = 0, low
    while True:  # times descend in both frontiers as bytes grow
        spare[0, total] = max(sweep[0, k], live + way_bytes[way])
        spare[1, total] = sweep[1, k] + way_time[way]
        if total and spare[0, total - 1] == spare[0, total]:
            spare[1, total - 1] = spare[1, total]
        else:
            total += 1
        more_points, more_ways = k + 1 < count, way + 1 < high
        if not more_points and not more_ways:
            break
        if more_points and (not more_ways or sweep[0, k + 1] <= live + way_bytes[way + 1]):
            k += 1
        else:
            way += 1
    copy_points(spare, total, sweep, 0)
    return total


@compiled(inner=True)
def copy_points(source: Ints, count: int, target: Ints, at: int) -> None:
    """Copy the first points of a frontier; an assignment of slices takes seconds longer to compile."""
    for k in range(count):
        target[0, at + k] = source[0, k]
        target[1, at + k] = source[1, k]


@compiled(inner=True)
def grown(points: Ints, needed: int) -> Ints:
    """Return the points, or a copy with space for twice as many as needed if they do not fit."""
    if needed <= points.shape[1]:
        return points
    larger = np.empty((2, 2 * needed), np.int64)
    copy_points(points, points.shape[1], larger, 0)
    return larger


@compiled(inner=True)
def no_sweeps(arrays: ChainArrays) -> Sweeps:
    """Return the frontiers of no sweep, with space for `sweeps_from`."""
    return Sweeps(np.empty((2, 1024), np.int64), np.empty(len(arrays.output_bytes) + 1, np.int64), 0)


@compiled(inner=True)
def sweeps_from(arrays: ChainArrays, a: int, b: int, cap: int, scratch: Sweeps) -> Sweeps:
    """Return the frontiers of all sweeps from x_a that fit, to x_b at most; they overwrite `scratch`."""
    points, ends = scratch.points, scratch.ends
    sweep, spare = sweep_scratch(arrays)
    count, reach = 1, 0
    ends[0] = 0
    for i in range(a, b):
        count = extend_sweep(arrays, a, i, sweep, count, spare)
        if sweep[0, 0] > cap:
            break
        used = ends[reach]
        points = grown(points, used + count)
        copy_points(sweep, count, points, used)
        reach += 1
        ends[reach] = used + count
    return Sweeps(points, ends, reach)
