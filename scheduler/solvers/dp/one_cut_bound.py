"""A lower bound on the time of every schedule of a chain, persistent or not."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.solvers.dp.costs import ChainCosts

_SLOTS = 2**16
"""Most slots of the grid."""
_NEVER = 2**60
"""Extra time of what does not fit."""


def one_cut_bound(costs: ChainCosts, budget_bytes: int) -> float:
    """Return a lower bound on the time of every schedule of the lowered chain; inf if none fits.

    Consider one moment: when the gradient of the last output is computed, or when a layer b first
    runs backward. Every layer before b has run forward once by then, and none has run backward.
    Either the saved bytes of such a layer in some mode are live (with the storages that autograd
    keeps), or the layer must run forward with saving again; for that its input must be live, or be
    recomputed by another run of the layer before it. The least extra time over all choices that
    fit is a dynamic program over bytes, here on a grid and rounded down; one pass serves all b.
    The bound is the largest over all moments. It can be tight where one more forward run of each
    layer suffices.

    Parameters
    ----------
    costs : ChainCosts
    budget_bytes : int
        Resident bytes included.
    """
    arrays = costs.arrays
    x, g, extra = arrays.output_bytes, arrays.gradient_bytes, arrays.extra_time
    gradients = g[1:] + g[:-1] + np.diff(arrays.parameter_gradients_before)
    n, free = costs.layers, budget_bytes - costs.resident_bytes
    if free < 0:
        return float("inf")
    unit = free // _SLOTS + 1
    # best[r, y][k]: least extra time of the layers so far with k slots; r: the last of them is
    # recomputed, y: a storage of its output is held.
    best = np.full((2, 2, free // unit + 1), _NEVER, np.int64)
    best[0, 1] = 0  # the input of the chain is resident
    worst = 0
    for i in range(n):
        modes = range(arrays.first_mode[i], arrays.first_mode[i + 1])
        again = int(arrays.way_time[arrays.first_way[i + 1] - 1])
        held = best[:, 1].min(axis=0)
        kept = held if arrays.keeps_input[i] else np.minimum(held, best[:, 0].min(axis=0))
        source = np.minimum(held, best[1, 0])  # the input is held, or recomputed
        both = held if arrays.keeps_input[i] else source
        at_backward = _NEVER
        output = int(x[i + 1]) if arrays.keeps_output[i] else 0
        for mode in modes:
            need = int(arrays.saved_bytes[mode] + arrays.backward_workspace_bytes[mode]) + output + int(gradients[i])
            at_backward = min(at_backward, _at(kept, (free - need) // unit) + int(extra[mode]))
        worst = max(worst, at_backward)
        after = np.full_like(best, _NEVER)
        for y, size in ((0, 0), (1, int(x[i + 1]))):
            _lower(after[1, y], source, size // unit, again)
            if arrays.keeps_output[i] and not y:
                continue
            for mode in modes:
                slots = (size + int(arrays.saved_bytes[mode])) // unit
                _lower(after[0, y], kept, slots, int(extra[mode]))
                _lower(after[1, y], both, slots, int(extra[mode]) + again)
        best = after
    worst = max(worst, _at(best[:, 1].min(axis=0), (free - int(g[n])) // unit))
    return float("inf") if worst >= _NEVER else costs.time(worst)


def _lower(row: npt.NDArray[np.int64], part: npt.NDArray[np.int64], slots: int, time: int) -> None:
    """Lower a row to another one that needs more slots and more time."""
    if slots < len(row):
        np.minimum(row[slots:], part[: len(part) - slots] + time, out=row[slots:])


def _at(row: npt.NDArray[np.int64], slot: int) -> int:
    return _NEVER if slot < 0 else int(row[slot])
