"""Cut a deep network into blocks: stretches of the forward, each with its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.graph import Graph

Ints = npt.NDArray[np.int64]

LEAST_FORWARD = 6
"""Smallest number of operations between two boundaries of the forward."""
NEARBY = 24
"""A boundary must have the fewest crossing tensors within so many operations on either side."""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the forward and the corresponding stretch of the backward.

    Attributes
    ----------
    forward, backward : tuple of int
        Default operations, in the input order.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def partition(graph: Graph, least_forward: int = LEAST_FORWARD) -> tuple[Block, ...]:
    """Return the blocks of a training step, in the order of the forward.

    A boundary lies where fewer tensors cross from forward operations to later ones than
    anywhere nearby: at articulation tensors, such as the residual stream, even if long-lived
    tensors (an encoder's output, a mask, a skip connection) cross there too. The backward is
    cut where it finishes with the tensors of one block and starts with those of the previous
    one. The input order is unchanged.

    Parameters
    ----------
    graph : Graph
    least_forward : int
        Smallest number of forward operations between two boundaries.

    Returns
    -------
    tuple of Block
        A single block if there is no boundary or no backward.
    """
    index = graph.index
    forward = [i for i in index.defaults if graph.operations[i].phase == "forward"]
    backward = [i for i in index.defaults if graph.operations[i].phase == "backward"]
    ends = _forward_ends(graph, forward, least_forward) if backward else []
    if not ends:
        return (Block(tuple(forward), tuple(backward)),)
    block_of = np.searchsorted(ends, np.arange(len(forward)), side="left")
    starts = _backward_starts(graph, forward, backward, block_of, len(ends) + 1)
    cuts = [0, *(end + 1 for end in ends), len(forward)]
    return tuple(
        Block(
            tuple(forward[cuts[b] : cuts[b + 1]]),
            tuple(backward[starts[b] : starts[b - 1] if b else len(backward)]),
        )
        for b in range(len(cuts) - 1)
    )


def _forward_ends(graph: Graph, forward: Sequence[int], least: int) -> list[int]:
    """Return the positions in `forward` after which a block ends."""
    count, size = _crossing(graph, forward)
    count[count == 0] = len(forward)  # a boundary needs a crossing tensor
    ends: list[int] = []
    for position in range(least - 1, len(forward) - least):
        if count[position] > count[max(0, position - NEARBY) : position + NEARBY + 1].min():
            continue
        # Of several such places close to one another, take the one with the fewest crossing bytes.
        places = range(max(0, position - least), min(position + least + 1, len(forward) - least))
        _, best = min((int(size[place]), place) for place in places if count[place] == count[position])
        if best == position and (not ends or position - ends[-1] >= least):
            ends.append(position)
    return ends


def _crossing(graph: Graph, operations: Sequence[int]) -> tuple[Ints, Ints]:
    """Return how many storages, and bytes, cross each position from an earlier operation to a later one."""
    index = graph.index
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, i in enumerate(operations):
        for tensor in index.inputs[i]:
            if index.storage_of[tensor] in made:
                last[index.storage_of[tensor]] = position
        for tensor in index.outputs[i]:
            if index.storage_bytes[index.storage_of[tensor]]:
                made.setdefault(index.storage_of[tensor], position)
    count, size = np.zeros(len(operations) + 1, np.int64), np.zeros(len(operations) + 1, np.int64)
    for storage, end in last.items():
        begin = made[storage]
        count[begin] += 1
        count[end] -= 1
        size[begin] += index.storage_bytes[storage]
        size[end] -= index.storage_bytes[storage]
    return np.cumsum(count)[:-1], np.cumsum(size)[:-1]


def _backward_starts(
    graph: Graph, forward: Sequence[int], backward: Sequence[int], block_of: Ints, blocks: int
) -> list[int]:
    """Return, per block, the start of its part of `backward`, which ends where the previous block's part starts."""
    home = _homes(graph, forward, block_of)
    label = np.full(len(backward), -1, np.int64)
    for position, i in enumerate(backward):
        label[position] = max((home[t] for t in graph.index.inputs[i] if t in home), default=-1)
    count, size = _crossing(graph, backward)
    known = label >= 0
    starts = [0] * blocks
    low = 0
    for block in range(blocks - 1, 0, -1):
        # If the parts of this block and of later ones end before position p, how many operations are misplaced?
        later = np.concatenate([[0], np.cumsum(known & (label >= block))])
        earlier = np.concatenate([[0], np.cumsum(known & (label < block))])
        wrong = (later[-1] - later) + earlier
        places = np.flatnonzero(wrong[low:] == wrong[low:].min()) + low
        starts[block - 1] = low = int(
            min(places, key=lambda p: (count[p - 1], size[p - 1], p) if 0 < p <= len(backward) else (0, 0, p))
        )
    return starts


def _homes(graph: Graph, forward: Sequence[int], block_of: Ints) -> dict[int, int]:
    """Return the block of each tensor that no forward operation of another block reads."""
    index = graph.index
    block = {i: int(b) for i, b in zip(forward, block_of, strict=True)}
    home = {t: block[i] for i in forward for t in index.outputs[i] if index.storage_bytes[index.storage_of[t]]}
    for i in forward:
        for t in index.inputs[i]:
            if home.get(t, block[i]) != block[i]:
                del home[t]
    return home
