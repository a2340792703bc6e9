"""The state of slot annealing: a sequence of runs in an array of slots, and the memory that it takes.

A slot is empty or holds one run. An instance is what one run makes on one storage (a group of
its outputs); it lives from its slot to its end, the last reader served by it. Memory is kept
per slot, in blocks with a pending addition each, so that a long range costs a few steps per
block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.jit import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

BLOCK = 64
HIDDEN = 2**61
"""Taken off the memory of empty slots, so that they never count as over budget."""
RESERVED = -2
MOST_LINKS = 32
"""Longest list of runs that one move inserts."""

AREA, LOOSE, LAST_FORWARD, FIRST_BACKWARD, LOG, KEPT, STALE, FIRSTS, FITTING, SEEN = range(10)
"""Entries of `State.counts`."""
COST, BEST, WEIGHT = range(3)
"""Entries of `State.levels`."""
INSERTED, REMOVED, REMOVED_FIXED = range(3)
"""What `State.log` says of a slot."""

kernel = compiled(nogil=True, _nrt=False)
"""No kernel of annealing makes an array, so no references are counted: that took five sixths of the time."""


class Model(NamedTuple):
    """What never changes: the contracted graph and the budget, as flat arrays.

    Rows are addressed by `start[i]:start[i + 1]`. Inputs, outputs and groups are per
    operation, makers and readers per tensor; `remake` is the operation that makes a tensor
    again, -1 for none; `budget` has the bytes beyond the resident ones.
    """

    input_start: Ints
    inputs: Ints
    output_start: Ints
    outputs: Ints
    output_group: Ints
    group_start: Ints
    group_bytes: Ints
    maker_start: Ints
    makers: Ints
    maker_group: Ints
    reader_start: Ints
    readers: Ints
    task_start: Ints
    task_members: Ints
    task: Ints
    remake: Ints
    is_result: Flags
    backward: Flags
    time: Floats
    workspace: Ints
    budget: Ints


class State(NamedTuple):
    """What a walker owns; `run[slot]` is an operation, -1 (empty) or `RESERVED`.

    Per slot: `fixed` marks the runs that stay: the first of each task, by the operation that
    leads it, and of each required operation; all others are `loose`. `end` is the last slot
    of each instance that the run makes; `memory` is relative to the budget, with `pending`
    of its block still to be added. Per operation: `occurrences`, the first `times_run` of
    them, are its slots, ascending; `fixed_slot` is that of its fixed run; `lead` leads its
    task. Per block: its `highest` memory, without what is pending, and its `area` over
    budget. `log` says what the last move did, `links` is its scratch space, `kept_run` the
    best fitting sequence.
    """

    run: Ints
    fixed: Flags
    end: Ints
    occurrences: Ints
    times_run: Ints
    fixed_slot: Ints
    firsts: Ints
    lead: Ints
    loose: Ints
    loose_place: Ints
    memory: Ints
    pending: Ints
    highest: Ints
    area: Ints
    log: Ints
    links: Ints
    kept_run: Ints
    kept_fixed: Flags
    counts: Ints
    levels: Floats
    random: npt.NDArray[np.uint64]


def new_state(model: Model, slots: int, most: int, random: npt.NDArray[np.uint64]) -> State:
    """Return an empty state: a multiple of `BLOCK` slots, at most `most` runs of one operation."""
    operations, blocks = len(model.time), slots // BLOCK
    groups = max(1, int(np.diff(model.group_start).max()))

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    return State(
        run=zeros(slots),
        fixed=np.zeros(slots, dtype=np.bool_),
        end=zeros(slots, groups),
        occurrences=zeros(operations, most),
        times_run=zeros(operations),
        fixed_slot=np.full(operations, 2**30, dtype=np.int64),
        firsts=zeros(operations),
        lead=zeros(operations),
        loose=zeros(slots),
        loose_place=zeros(slots),
        memory=zeros(slots),
        pending=zeros(blocks),
        highest=zeros(blocks),
        area=zeros(blocks),
        log=zeros(4 * MOST_LINKS, 3),
        links=zeros(MOST_LINKS, 2),
        kept_run=zeros(slots),
        kept_fixed=np.zeros(slots, dtype=np.bool_),
        counts=zeros(10),
        levels=np.zeros(3, dtype=np.float64),
        random=random,
    )
