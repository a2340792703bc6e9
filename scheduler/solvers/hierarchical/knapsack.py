"""Solve the multiple-choice knapsack within a slack of its Lagrangian bound."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Options = npt.NDArray[np.float64]
"""Shape (options, 2): bytes, and by how much time + price x bytes exceeds the item's least."""

MOST_LABELS = 100_000


class TooManyLabelsError(Exception):
    """More than `MOST_LABELS` partial sums lie within the slack."""


def choose(items: Sequence[Options], limit: int, price: float, slack: float) -> tuple[float, list[int]] | None:
    """Choose one option per item: the least time whose bytes fit.

    Parameters
    ----------
    items : sequence of ndarray
    limit : int
        Upper limit of the sum of bytes.
    price : float
        Time per byte.
    slack : float
        Largest excess of the answer over the Lagrangian bound.

    Returns
    -------
    float, list of int
        Excess of the least time over the Lagrangian bound, and the option of each item; None
        if every choice exceeds the bound by more than the slack.

    Raises
    ------
    TooManyLabelsError
        If more than `MOST_LABELS` partial sums lie within the slack.
    """
    size, over = np.zeros(1), np.zeros(1)
    rest = np.cumsum([0.0, *(options[:, 0].min() if len(options) else math.inf for options in reversed(items))])[-2::-1]
    trail = []
    for options, least in zip(items, rest, strict=True):
        all_size = (size[:, None] + options[None, :, 0]).ravel()
        all_over = (over[:, None] + options[None, :, 1]).ravel()
        keep = np.flatnonzero((all_over <= slack) & (all_size + least <= limit))
        if not len(keep):
            return None
        time = all_over[keep] - price * all_size[keep]
        rank = np.lexsort((time, all_size[keep]))
        # A partial sum with as many bytes or more is useful only if it is faster.
        lowest = np.minimum.accumulate(time[rank])
        keep = keep[rank[np.concatenate([[True], time[rank][1:] < lowest[:-1] - 1e-12 * slack])]]
        if len(keep) > MOST_LABELS:
            raise TooManyLabelsError
        trail.append((keep // len(options), keep % len(options)))
        size, over = all_size[keep], all_over[keep]
    excess = over + price * (limit - size)
    label = int(excess.argmin())
    if excess[label] > slack:
        return None
    best, picks = float(excess[label]), []
    for parents, picked in reversed(trail):
        picks.append(int(picked[label]))
        label = int(parents[label])
    return best, picks[::-1]
