"""Groups of gradients that leave the backward together."""

from __future__ import annotations

from collections.abc import Mapping

LARGEST_GROUP_SHARE = 1 / 16
"""Largest share of the bytes of all gradients in a group of several; a larger gradient forms a group alone."""


def group_gradients(ready: Mapping[int, int], sizes: Mapping[int, int], *, least: int = 0) -> list[tuple[int, ...]]:
    """Return the groups of gradients that leave the backward together, in the order in which they can.

    Parameters
    ----------
    ready : mapping of int to int
        The position from which each gradient can leave.
    sizes : mapping of int to int
        Bytes of each gradient.
    least : int
        A group may have this many bytes whatever its share.
    """
    limit = max(least, sum(sizes[i] for i in ready) * LARGEST_GROUP_SHARE)
    groups: list[tuple[int, ...]] = []
    for i in sorted(ready, key=ready.__getitem__):
        if groups and sizes[i] + sum(sizes[j] for j in groups[-1]) <= limit:
            groups[-1] += (i,)
        else:
            groups.append((i,))
    return groups
