"""Groups of gradients that leave the backward together."""

from __future__ import annotations

from collections.abc import Mapping

ACCUMULATED_AT_ONCE = 1 / 16
"""Share of all gradients that may wait to be added to existing ones; a larger gradient waits alone."""


def group_gradients(ready: Mapping[int, int], sizes: Mapping[int, int], *, least: int = 0) -> list[tuple[int, ...]]:
    """Return the gradients that leave the backward together, in the order in which they can.

    Parameters
    ----------
    ready : mapping of int to int
        The moment from which each gradient can.
    sizes : mapping of int to int
        Bytes of each.
    least : int
        As many bytes may wait in any case.
    """
    limit = max(least, sum(sizes[i] for i in ready) * ACCUMULATED_AT_ONCE)
    groups: list[tuple[int, ...]] = []
    for i in sorted(ready, key=ready.__getitem__):
        if groups and sizes[i] + sum(sizes[j] for j in groups[-1]) <= limit:
            groups[-1] += (i,)
        else:
            groups.append((i,))
    return groups
