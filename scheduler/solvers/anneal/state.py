"""The state of slot annealing: a sequence of runs in an array of slots, and its memory.

A slot is empty or holds one run. An instance is the output of one run on one storage (a group of
its outputs); it is live from its slot to its end, the slot of its last reader. Memory is stored
per slot, in blocks with one pending addition each, so that a long range costs a few steps per
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
"""Slots per block."""
HIDDEN = 2**61
"""Subtracted from the memory of empty slots, so that they never count as over budget."""
RESERVED = -2
"""Entry of `State.run` for a slot that a move in progress will use."""
MOST_LINKS = 32
"""Largest number of runs that one move inserts."""

AREA, LOOSE, LAST_FORWARD, FIRST_BACKWARD, LOG, KEPT, STALE, FIRSTS, FITTING, SEEN = range(10)
"""Entries of `State.counts`."""
COST, BEST, WEIGHT = range(3)
"""Entries of `State.levels`."""
INSERTED, REMOVED, REMOVED_FIXED = range(3)
"""Kinds of entries of `State.log`."""

kernel = compiled(nogil=True, _nrt=False)
"""For kernels that create no array either; see `inner_kernel`."""


class Model(NamedTuple):
    """The constant data: the contracted graph and the budget, as flat arrays.

    Row i is `start[i]:start[i + 1]`. Inputs, outputs and groups are per operation, producers
    and readers per tensor, members per task. `output_group` and `producer_group` are the
    group of an output among those of its operation. `recompute` is the operation that
    recomputes a tensor, -1 for none. `budget` has one entry: bytes without the resident ones. A group
    on the storage of an input is `late`: its bytes count from the next slot on.

    A set of folded views is a bit mask over a row of `view_times`: `group_views` is the row of the views on a
    group. `input_views` and `reader_views` are the views that an operation needs of an input, `result_views` those
    that the results are.
    """

    input_start: Ints
    inputs: Ints
    output_start: Ints
    outputs: Ints
    output_group: Ints
    group_start: Ints
    group_bytes: Ints
    late: Flags
    producer_start: Ints
    producers: Ints
    producer_group: Ints
    reader_start: Ints
    readers: Ints
    group_views: Ints
    view_start: Ints
    view_times: Floats
    input_views: Ints
    reader_views: Ints
    result_views: Ints
    task_start: Ints
    task_members: Ints
    task: Ints
    recompute: Ints
    is_result: Flags
    backward: Flags
    time: Floats
    workspace: Ints
    budget: Ints


class Profile(NamedTuple):
    """Memory per slot, in blocks.

    `memory` has a row per block; it is relative to the budget, without the `pending` addition of
    the block. Per block: its `highest` memory, without the pending addition, and its `area` over
    budget. `counts` is that of the state.
    """

    memory: Ints
    pending: Ints
    highest: Ints
    area: Ints
    counts: Ints


class State(NamedTuple):
    """The mutable data of a walker; `run[slot]` is an operation, -1 (empty) or `RESERVED`.

    Per slot: `fixed` marks the runs that are never dropped: the first one of each task, by the
    task's leading operation, and of each required operation; all others are `loose`. `end` is
    the last slot of each instance that the run produces, `viewed` the views that its readers
    need. Per operation: the first `times_run` entries of `occurrences` are its slots, ascending;
    `fixed_slot` is the slot of its fixed run; `lead` is the leading operation of its task. `log`
    lists the changes of the last move, `links` is scratch space of a move, `kept_run` is the best
    sequence that fits.
    """

    run: Ints
    fixed: Flags
    end: Ints
    viewed: Ints
    occurrences: Ints
    times_run: Ints
    fixed_slot: Ints
    firsts: Ints
    lead: Ints
    loose: Ints
    loose_place: Ints
    profile: Profile
    log: Ints
    links: Ints
    kept_run: Ints
    kept_fixed: Flags
    counts: Ints
    levels: Floats
    random: npt.NDArray[np.uint64]


def new_state(model: Model, slots: int, most: int, random: npt.NDArray[np.uint64]) -> State:
    """Return an empty state of a multiple of `BLOCK` slots, for at most `most` runs of each operation."""
    operations, blocks = len(model.time), slots // BLOCK
    groups = max(1, int(np.diff(model.group_start).max()))

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, dtype=np.int64)

    counts = zeros(10)
    return State(
        run=zeros(slots),
        fixed=np.zeros(slots, dtype=np.bool_),
        end=zeros(slots, groups),
        viewed=zeros(slots, groups),
        occurrences=zeros(operations, most),
        times_run=zeros(operations),
        fixed_slot=np.full(operations, 2**30, dtype=np.int64),
        firsts=zeros(operations),
        lead=zeros(operations),
        loose=zeros(slots),
        loose_place=zeros(slots),
        profile=Profile(zeros(blocks, BLOCK), zeros(blocks), zeros(blocks), zeros(blocks), counts),
        log=zeros(4 * MOST_LINKS, 3),
        links=zeros(MOST_LINKS, 2),
        kept_run=zeros(slots),
        kept_fixed=np.zeros(slots, dtype=np.bool_),
        counts=counts,
        levels=np.zeros(3, dtype=np.float64),
        random=random,
    )
