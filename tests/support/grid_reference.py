"""The published chain program on a grid of memory slots: what the exact one is compared with.

All sizes are rounded up to slots, as in Beaumont et al. 2019 (arXiv 1911.13214), so that what
it finds fits; its limits are those of this package's judge.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from scheduler.graph.chain import Chain


def grid_time(chain: Chain, budget_bytes: int, slots: int = 500) -> float:
    """Return the least time of the step on a grid of the bytes beside the resident ones; inf if nothing fits.

    For layers of one mode that keep their input.
    """
    layers = chain.layers
    if any(layer.modes or not layer.keeps_input for layer in layers):
        raise ValueError("the grid program knows layers of one mode that keep their input")
    free = budget_bytes - chain.graph.resident_bytes
    if free < 0:
        return float("inf")
    unit = max(1, -(-free // slots))

    def in_slots(sizes: list[int]) -> np.ndarray:
        return np.array([-(-size // unit) for size in sizes], np.int64)

    # Parameter gradients stand from the last layer on: rounded together, they lose one slot in all.
    to_come = [sum(layer.parameter_gradient_bytes for layer in layers[i:]) for i in range(len(layers) + 1)]
    table = _fill(
        in_slots([0, *(layer.output_bytes for layer in layers)]),
        in_slots([chain.input_bytes * chain.input_needs_gradient, *(layer.gradient_bytes for layer in layers)]),
        -np.diff(in_slots(to_come)),
        in_slots([layer.saved_bytes for layer in layers]),
        in_slots([layer.output_bytes * layer.keeps_output for layer in layers]),
        in_slots([layer.forward_without_saving_workspace_bytes for layer in layers]),
        in_slots([layer.forward_with_saving_workspace_bytes for layer in layers]),
        in_slots([layer.backward_workspace_bytes for layer in layers]),
        np.array([layer.forward_without_saving_time for layer in layers]),
        free // unit,
    )
    return sum(layer.forward_time + layer.backward_time for layer in layers) + float(table[0, -1, -1])


@njit(cache=True)
def _fill(x, g, p, saved, kept, plain_ws, forward_ws, backward_ws, plain_time, slots):  # type: ignore[no-untyped-def]
    n = len(saved)
    table = np.full((n, n, slots + 1), np.inf, np.float32)
    for length in range(1, n + 1):
        for a in range(n - length + 1):
            b = a + length - 1
            row = table[a, b]
            standing = 0 if b == n - 1 else g[b + 1]
            done = p[a : b + 1].sum()
            need = max(
                x[a + 1] + saved[a] + forward_ws[a],
                kept[a] + saved[a] + g[a + 1] - standing + g[a] + done + backward_ws[a],
            )
            if a == b:
                if b == n - 1:
                    need = max(need, x[a + 1] + saved[a] + g[a + 1])
                row[need:] = 0
                continue
            held = x[a + 1] + saved[a]
            for k in range(max(need, held), slots + 1):
                row[k] = table[a + 1, b, k - held]
            sweep, time = 0, 0.0
            for j in range(a + 1, b + 1):
                i = j - 1
                sweep = max(sweep, x[j] + (x[i] if i > a else 0) + plain_ws[i])
                time += plain_time[i]
                done -= p[i]
                more = standing - g[j] - done
                low = max(max(sweep, x[j]), -more)
                high = min(slots, slots - more) + 1
                right, left = table[j, b], table[a, j - 1]
                for k in range(low, high):
                    row[k] = min(row[k], right[k - x[j]] + left[k + more] + np.float32(time))
                for k in range(max(low, high), slots + 1):
                    row[k] = min(row[k], right[k - x[j]] + left[slots] + np.float32(time))
    return table
