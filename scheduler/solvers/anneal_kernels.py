"""Compiled kernels of slot annealing: memory kept exactly while runs come, go and move.

A sequence of runs lies in an array of slots, each empty or one run. An instance is what one
run makes on one storage (a group of its outputs); it lives from its slot to its end, the last
reader served by it. When a run enters or leaves, only the ends of a few instances move, and
each moved end is one addition over a contiguous range of slots. Ints are in blocks with a
pending addition each, so a long range costs a few steps per block.

All kernels stand in one file: numba's cache sees changes of the file that a kernel stands in,
not of those that it calls into.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.compilation import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

BLOCK = 64
HIDDEN = 2**61
"""Taken off the memory of empty slots, so that they never count as over budget."""
RESERVED = -2
MOST_LINKS = 32
"""Longest list of runs that one move inserts."""
DIRECTED, TRIES = 0.7, 40
"""Share of insertions over budget that aim at a slot over budget, and how often they look for a tensor there."""
SHIFTS_OF_FIRSTS = 0.4
"""Share of the moves that shift a first run, where the order is free; of the others:"""
INSERTIONS, INSERTIONS_OVER, SHIFTS = 0.25, 0.55, 0.25
"""Shares of insertions in fitting states and in those over budget, and of shifts; the rest are drops."""

_kernel = compiled(nogil=True, _nrt=False)
"""Nothing here makes an array, so no references are counted: that took five sixths of the time."""

AREA, LOOSE, LAST_FORWARD, FIRST_BACKWARD, LOG, KEPT, STALE, FIRSTS, FITTING, SEEN = range(10)
"""Entries of `State.counts`."""
COST, BEST, WEIGHT = range(3)
"""Entries of `State.levels`."""
INSERTED, REMOVED, REMOVED_FIXED = range(3)
"""What `State.log` says of a slot."""


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


@_kernel
def _draw(s):  # type: ignore[no-untyped-def]
    """Return a number in [0, 1): xorshift64*, owned by the walker."""
    x = s.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    s.random[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * 1.1102230246251565e-16


@_kernel
def _pick(s, count):  # type: ignore[no-untyped-def]
    return min(int(_draw(s) * count), count - 1)


@_kernel
def _refresh_block(s, block):  # type: ignore[no-untyped-def]
    """Recount a block's highest memory and its area over budget."""
    first = block * BLOCK
    highest = s.memory[first]
    for i in range(first + 1, first + BLOCK):
        highest = max(highest, s.memory[i])
    s.highest[block] = highest
    _refresh_area(s, block)


@_kernel
def _refresh_area(s, block):  # type: ignore[no-untyped-def]
    over = np.int64(0)
    if s.highest[block] + s.pending[block] > 0:
        pending = s.pending[block]
        for i in range(block * BLOCK, block * BLOCK + BLOCK):
            over += max(np.int64(0), s.memory[i] + pending)
    s.counts[AREA] += over - s.area[block]
    s.area[block] = over


@_kernel
def _add(s, first, stop, amount):  # type: ignore[no-untyped-def]
    """Add to the memory of slots first .. stop - 1."""
    if first >= stop or amount == 0:
        return
    low, high = first // BLOCK, (stop - 1) // BLOCK
    if low == high:
        for i in range(first, stop):
            s.memory[i] += amount
        _refresh_block(s, low)
        return
    for i in range(first, (low + 1) * BLOCK):
        s.memory[i] += amount
    _refresh_block(s, low)
    for block in range(low + 1, high):
        s.pending[block] += amount
        if s.area[block] > 0 or s.highest[block] + s.pending[block] > 0:
            _refresh_area(s, block)
    for i in range(high * BLOCK, stop):
        s.memory[i] += amount
    _refresh_block(s, high)


@_kernel
def _serving(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the last slot before this one that makes a tensor, and its group there; -1 for none."""
    best, group = -1, 0
    for e in range(m.maker_start[tensor], m.maker_start[tensor + 1]):
        op = m.makers[e]
        k = s.times_run[op] - 1
        while k >= 0 and s.occurrences[op, k] >= slot:
            k -= 1
        if k >= 0 and s.occurrences[op, k] > best:
            best = s.occurrences[op, k]
            group = m.maker_group[e]
    return best, group


@_kernel
def _last_read(m, s, tensor, after, before):  # type: ignore[no-untyped-def]
    """Return the last slot strictly between two that reads a tensor, or the first of the two."""
    best = after
    for e in range(m.reader_start[tensor], m.reader_start[tensor + 1]):
        op = m.readers[e]
        for k in range(s.times_run[op] - 1, -1, -1):
            slot = s.occurrences[op, k]
            if slot < before:
                best = max(best, slot)
                break
    return best


@_kernel
def _next_run(s, ops, slot):  # type: ignore[no-untyped-def]
    """Return the first slot after this one that runs any of these operations; the number of slots for none."""
    best = s.run.shape[0]
    for op in ops:
        for k in range(s.times_run[op]):
            if s.occurrences[op, k] > slot:
                best = min(best, s.occurrences[op, k])
                break
    return best


@_kernel
def _next_make(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the first slot after this one that makes a tensor; the number of slots for none."""
    return _next_run(s, m.makers[m.maker_start[tensor] : m.maker_start[tensor + 1]], slot)


@_kernel
def _next_read(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the first slot after this one that reads a tensor; the number of slots for none."""
    return _next_run(s, m.readers[m.reader_start[tensor] : m.reader_start[tensor + 1]], slot)


@_kernel
def _end(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the last slot that holds what was made of a tensor at a slot."""
    following = _next_make(m, s, tensor, slot)
    if following == s.run.shape[0] and m.is_result[tensor]:
        return following - 1
    return _last_read(m, s, tensor, slot, following)


@_kernel
def _refresh_instance(m, s, slot, group):  # type: ignore[no-untyped-def]
    """Recompute an instance's end, and move its bytes."""
    op = s.run[slot]
    end = slot
    for e in range(m.output_start[op], m.output_start[op + 1]):
        if m.output_group[e] == group:
            end = max(end, _end(m, s, m.outputs[e], slot))
    old = s.end[slot, group]
    size = m.group_bytes[m.group_start[op] + group]
    if end > old:
        _add(s, old + 1, end + 1, size)
    elif end < old:
        _add(s, end + 1, old + 1, -size)
    s.end[slot, group] = end


@_kernel
def insert(m, s, op, slot, fixed):  # type: ignore[no-untyped-def]
    """Put a run into an empty slot; its inputs are made before it."""
    s.run[slot] = op
    s.fixed[slot] = fixed
    _add(s, slot, slot + 1, HIDDEN + m.workspace[op])
    k = s.times_run[op]
    while k > 0 and s.occurrences[op, k - 1] > slot:
        s.occurrences[op, k] = s.occurrences[op, k - 1]
        k -= 1
    s.occurrences[op, k] = slot
    s.times_run[op] += 1
    for e in range(m.input_start[op], m.input_start[op + 1]):
        source, group = _serving(m, s, m.inputs[e], slot)
        if source >= 0 and s.end[source, group] < slot:
            _add(s, s.end[source, group] + 1, slot + 1, m.group_bytes[m.group_start[s.run[source]] + group])
            s.end[source, group] = slot
    for e in range(m.output_start[op], m.output_start[op + 1]):
        source, group = _serving(m, s, m.outputs[e], slot)
        if source >= 0:
            _refresh_instance(m, s, source, group)
    for group in range(m.group_start[op + 1] - m.group_start[op]):
        s.end[slot, group] = slot - 1
        _refresh_instance(m, s, slot, group)
    s.levels[COST] += m.time[op]
    if fixed:
        s.fixed_slot[op] = slot
    else:
        s.loose_place[slot] = s.counts[LOOSE]
        s.loose[s.counts[LOOSE]] = slot
        s.counts[LOOSE] += 1


@_kernel
def remove(m, s, slot):  # type: ignore[no-untyped-def]
    """Empty a slot."""
    op = s.run[slot]
    k = s.times_run[op] - 1
    while s.occurrences[op, k] != slot:
        k -= 1
    for later in range(k, s.times_run[op] - 1):
        s.occurrences[op, later] = s.occurrences[op, later + 1]
    s.times_run[op] -= 1
    for group in range(m.group_start[op + 1] - m.group_start[op]):
        _add(s, slot, s.end[slot, group] + 1, -m.group_bytes[m.group_start[op] + group])
    _add(s, slot, slot + 1, -HIDDEN - m.workspace[op])
    s.run[slot] = -1
    for e in range(m.input_start[op], m.input_start[op + 1]):
        source, group = _serving(m, s, m.inputs[e], slot)
        if source >= 0 and s.end[source, group] == slot:
            _refresh_instance(m, s, source, group)
    for e in range(m.output_start[op], m.output_start[op + 1]):
        source, group = _serving(m, s, m.outputs[e], slot)
        if source >= 0:
            _refresh_instance(m, s, source, group)
    s.levels[COST] -= m.time[op]
    if not s.fixed[slot]:
        last = s.loose[s.counts[LOOSE] - 1]
        s.loose[s.loose_place[slot]] = last
        s.loose_place[last] = s.loose_place[slot]
        s.counts[LOOSE] -= 1


@_kernel
def load(m, s, ops, fixed, slots):  # type: ignore[no-untyped-def]
    """Fill the slots with a sequence of runs."""
    s.run[:] = -1
    s.times_run[:] = 0
    s.counts[LOOSE] = 0
    s.counts[LOG] = 0
    s.levels[COST] = 0.0
    s.memory[:] = -HIDDEN - m.budget[0]
    s.pending[:] = 0
    s.highest[:] = -HIDDEN - m.budget[0]
    s.area[:] = 0
    s.counts[AREA] = 0
    firsts = 0
    for i in range(ops.shape[0]):
        insert(m, s, ops[i], slots[i], fixed[i])
        if fixed[i]:
            s.firsts[firsts] = ops[i]
            firsts += 1
    s.counts[FIRSTS] = firsts
    _find_phases(m, s)


@_kernel
def _find_phases(m, s):  # type: ignore[no-untyped-def]
    """Find the last first run of the forward phase and the first run of the backward phase."""
    slots = s.run.shape[0]
    s.counts[LAST_FORWARD], s.counts[FIRST_BACKWARD] = -1, slots
    for slot in range(slots):
        op = s.run[slot]
        if op >= 0 and s.fixed[slot]:
            if not m.backward[op]:
                if s.lead[op] == op:
                    s.counts[LAST_FORWARD] = slot
            elif s.counts[FIRST_BACKWARD] == slots:
                s.counts[FIRST_BACKWARD] = slot


@_kernel
def _do_insert(m, s, op, slot, fixed):  # type: ignore[no-untyped-def]
    insert(m, s, op, slot, fixed)
    _note(s, op, slot, INSERTED)


@_kernel
def _do_remove(m, s, slot):  # type: ignore[no-untyped-def]
    op, fixed = s.run[slot], s.fixed[slot]
    remove(m, s, slot)
    _note(s, op, slot, REMOVED_FIXED if fixed else REMOVED)


@_kernel
def _note(s, op, slot, kind):  # type: ignore[no-untyped-def]
    place = s.counts[LOG]
    s.log[place, 0], s.log[place, 1], s.log[place, 2] = op, slot, kind
    s.counts[LOG] = place + 1


@_kernel
def _undo(m, s):  # type: ignore[no-untyped-def]
    for place in range(s.counts[LOG] - 1, -1, -1):
        op, slot, kind = s.log[place, 0], s.log[place, 1], s.log[place, 2]
        if kind == INSERTED:
            remove(m, s, slot)
        else:
            insert(m, s, op, slot, kind == REMOVED_FIXED)
    s.counts[LOG] = 0


@_kernel
def _is_needed(m, s, slot):  # type: ignore[no-untyped-def]
    """Return whether nothing before a slot could serve those whom its run serves."""
    op = s.run[slot]
    for e in range(m.output_start[op], m.output_start[op + 1]):
        tensor = m.outputs[e]
        source, _ = _serving(m, s, tensor, slot)
        if source < 0 and _end(m, s, tensor, slot) > slot:
            return True
    return False


@_kernel
def _is_useless(m, s, slot):  # type: ignore[no-untyped-def]
    op = s.run[slot]
    end = slot
    for group in range(m.group_start[op + 1] - m.group_start[op]):
        end = max(end, s.end[slot, group])
    return end == slot


@_kernel
def _drop(m, s):  # type: ignore[no-untyped-def]
    """Remove a recomputation, and the recomputed inputs that nobody reads any more."""
    if s.counts[LOOSE] == 0:
        return False
    slot = s.loose[_pick(s, s.counts[LOOSE])]
    if _is_needed(m, s, slot):
        return False
    s.links[0, 0] = slot
    height = 1
    while height > 0:
        height -= 1
        slot = s.links[height, 0]
        op = s.run[slot]
        if op < 0 or (s.counts[LOG] > 0 and not _is_useless(m, s, slot)):
            continue
        _do_remove(m, s, slot)
        for e in range(m.input_start[op], m.input_start[op + 1]):
            source, _ = _serving(m, s, m.inputs[e], slot)
            room = height < MOST_LINKS and s.counts[LOG] < MOST_LINKS
            if room and source >= 0 and not s.fixed[source] and _is_useless(m, s, source):
                s.links[height, 0] = source
                height += 1
    return True


@_kernel
def _empty_slot(s, low, high, near):  # type: ignore[no-untyped-def]
    """Return an empty slot strictly between two, the last one or a random one; -1 if none is found."""
    if high - low < 2:
        return -1
    start = high - 1 if near else low + 1 + _pick(s, high - low - 1)
    for slot in range(start, max(low, start - BLOCK), -1):
        if s.run[slot] == -1:
            return slot
    return -1


@_kernel
def _any_gap(m, s):  # type: ignore[no-untyped-def]
    """Return a random input of a random run, the last slot that holds it before, and the run's slot."""
    firsts = s.counts[FIRSTS]
    pick = _pick(s, firsts + s.counts[LOOSE])
    reader = s.fixed_slot[s.firsts[pick]] if pick < firsts else s.loose[pick - firsts]
    op = s.run[reader]
    count = m.input_start[op + 1] - m.input_start[op]
    if count == 0:
        return -1, 0, 0
    tensor = m.inputs[m.input_start[op] + _pick(s, count)]
    source, _ = _serving(m, s, tensor, reader)
    return tensor, _last_read(m, s, tensor, source, reader), reader


@_kernel
def _slot_over(s):  # type: ignore[no-untyped-def]
    """Return a random slot over budget, where there is one."""
    blocks = s.area.shape[0]
    block = _pick(s, blocks)
    while s.area[block] == 0:
        block = (block + 1) % blocks
    place = _pick(s, BLOCK)
    while s.memory[block * BLOCK + place] + s.pending[block] <= 0:
        place = (place + 1) % BLOCK
    return block * BLOCK + place


@_kernel
def _gap_over(m, s):  # type: ignore[no-untyped-def]
    """Return a tensor held across a slot over budget, that slot or a later read, and the next read after it."""
    over = _slot_over(s)
    for _ in range(TRIES):
        slot = _pick(s, over + 1)
        op = s.run[slot]
        if op < 0 or slot == over:
            continue
        count = m.output_start[op + 1] - m.output_start[op]
        if count == 0:
            continue
        e = m.output_start[op] + _pick(s, count)
        if s.end[slot, m.output_group[e]] > over:
            tensor = m.outputs[e]
            return tensor, over, _next_read(m, s, tensor, over)
    return -1, 0, 0


@_kernel
def _again(m, s, limit):  # type: ignore[no-untyped-def]
    """Insert a recomputation of a random input before a random reader, recursively for its inputs."""
    tensor, low, reader = _gap_over(m, s) if s.counts[AREA] > 0 and _draw(s) < DIRECTED else _any_gap(m, s)
    if tensor < 0 or m.remake[tensor] < 0:
        return False
    slot = _empty_slot(s, low, reader, _draw(s) < 0.8)
    if slot < 0:
        return False
    eager = _draw(s)
    extra = m.time[m.remake[tensor]]
    s.links[0, 0], s.links[0, 1] = m.remake[tensor], slot
    s.run[slot] = RESERVED
    links, done, good = 1, 0, True
    while done < links and good:
        op, slot = s.links[done, 0], s.links[done, 1]
        done += 1
        if s.times_run[op] + links >= s.occurrences.shape[1] or s.fixed_slot[s.lead[op]] >= slot:
            good = False
            break
        for e in range(m.input_start[op], m.input_start[op + 1]):
            tensor = m.inputs[e]
            source, group = _serving(m, s, tensor, slot)
            if source < 0:
                good = False
                break
            again = m.remake[tensor]
            if again < 0 or s.end[source, group] >= slot or links == MOST_LINKS or _draw(s) >= eager:
                continue
            pending = False
            for other in range(links):
                pending = pending or (s.links[other, 0] == again and s.links[other, 1] < slot)
            if pending:
                continue
            place = _empty_slot(s, _last_read(m, s, tensor, source, slot), slot, True)
            if place >= 0:
                s.run[place] = RESERVED
                s.links[links, 0], s.links[links, 1] = again, place
                links += 1
                extra += m.time[again]
    for i in range(links):
        s.run[s.links[i, 1]] = -1
    if not good or extra > limit or s.counts[LOOSE] + links >= s.loose.shape[0]:
        return False
    # An input reserved below its reader goes in first.
    for i in range(1, links):
        op, slot = s.links[i, 0], s.links[i, 1]
        k = i
        while k > 0 and s.links[k - 1, 1] > slot:
            s.links[k, 0], s.links[k, 1] = s.links[k - 1, 0], s.links[k - 1, 1]
            k -= 1
        s.links[k, 0], s.links[k, 1] = op, slot
    for i in range(links):
        _do_insert(m, s, s.links[i, 0], s.links[i, 1], False)
    return True


@_kernel
def _shift(m, s):  # type: ignore[no-untyped-def]
    """Move a recomputation between the making before it and its first reader."""
    if s.counts[LOOSE] == 0:
        return False
    slot = s.loose[_pick(s, s.counts[LOOSE])]
    op = s.run[slot]
    if _is_needed(m, s, slot):
        return False
    low, high = s.fixed_slot[s.lead[op]], s.run.shape[0]
    for e in range(m.output_start[op], m.output_start[op + 1]):
        source, _ = _serving(m, s, m.outputs[e], slot)
        low = max(low, source)
        high = min(high, _next_read(m, s, m.outputs[e], slot))
    place = _near_or_far(s, slot, low, high)
    if place < 0:
        return False
    for e in range(m.input_start[op], m.input_start[op + 1]):
        source, _ = _serving(m, s, m.inputs[e], place)
        if source < 0:
            return False
    _do_remove(m, s, slot)
    _do_insert(m, s, op, place, False)
    return True


@_kernel
def _near_or_far(s, slot, low, high):  # type: ignore[no-untyped-def]
    if _draw(s) < 0.5:
        reach = 2 + _pick(s, 24)
        low, high = max(low, slot - reach), min(high, slot + reach)
    return _empty_slot(s, low, high, False)


@_kernel
def _shift_first(m, s):  # type: ignore[no-untyped-def]
    """Move a first run between the first makings of its inputs and its first reader."""
    op = s.firsts[_pick(s, s.counts[FIRSTS])]
    if s.lead[op] != op:
        return False
    slot, task = s.fixed_slot[op], m.task[op]
    slots = s.run.shape[0]
    low, high = -1, slots
    for e in range(m.input_start[op], m.input_start[op + 1]):
        low = max(low, _next_make(m, s, m.inputs[e], -1))
    for e in range(m.output_start[op], m.output_start[op + 1]):
        high = min(high, _next_read(m, s, m.outputs[e], -1))
    for e in range(m.task_start[task], m.task_start[task + 1]):
        member = m.task_members[e]
        for k in range(min(2, s.times_run[member])):
            if s.occurrences[member, k] != slot:
                high = min(high, s.occurrences[member, k])
    if m.backward[op]:
        low = max(low, s.counts[LAST_FORWARD])
    else:
        high = min(high, s.counts[FIRST_BACKWARD])
    place = _near_or_far(s, slot, low, high)
    if place < 0:
        return False
    _do_remove(m, s, slot)
    _do_insert(m, s, op, place, True)
    return True


@_kernel
def _update_phases(m, s):  # type: ignore[no-untyped-def]
    """Follow a moved first run."""
    old, new = s.log[0, 1], s.log[1, 1]
    if m.backward[s.run[new]]:
        if new < s.counts[FIRST_BACKWARD]:
            s.counts[FIRST_BACKWARD] = new
        elif old == s.counts[FIRST_BACKWARD]:
            while not (s.run[old] >= 0 and s.fixed[old] and m.backward[s.run[old]]):
                old += 1
            s.counts[FIRST_BACKWARD] = old
    elif new > s.counts[LAST_FORWARD]:
        s.counts[LAST_FORWARD] = new
    elif old == s.counts[LAST_FORWARD]:
        while not (
            s.run[old] >= 0 and s.fixed[old] and not m.backward[s.run[old]] and s.lead[s.run[old]] == s.run[old]
        ):
            old -= 1
        s.counts[LAST_FORWARD] = old


@_kernel
def _keep(s):  # type: ignore[no-untyped-def]
    for slot in range(s.run.shape[0]):
        s.kept_run[slot] = s.run[slot]
        s.kept_fixed[slot] = s.fixed[slot]
    s.counts[STALE] = 0
    s.counts[KEPT] += 1


@_kernel
def anneal(m, s, moves, hot, cold, free):  # type: ignore[no-untyped-def]
    """Make random moves while the temperature falls geometrically from hot to cold.

    The energy is the cost plus the weight times the area over budget. The cheapest fitting
    sequence is kept in `kept_run`. With `free`, first runs move too.
    """
    temperature, fall = hot, (cold / hot) ** (64.0 / max(moves, 64))
    for move in range(moves):
        if move % 64 == 63:
            temperature *= fall
        _adapt_weight(m, s)
        cost, area, weight = s.levels[COST], s.counts[AREA], s.levels[WEIGHT]
        limit = -temperature * np.log(1.0 - _draw(s))
        moves_first = free and _draw(s) < SHIFTS_OF_FIRSTS
        s.counts[LOG] = 0
        made = _shift_first(m, s) if moves_first else _change(m, s, limit + weight * area)
        if not made:
            continue
        if s.levels[COST] - cost + weight * (s.counts[AREA] - area) > limit:
            _undo(m, s)
            s.levels[COST] = cost
            continue
        if moves_first:
            _update_phases(m, s)
        if s.counts[STALE] == 1 and (s.counts[AREA] > 0 or s.levels[COST] > s.levels[BEST]):
            _copy_before(s, s.counts[LOG])
        if s.counts[AREA] == 0 and s.levels[COST] < s.levels[BEST] * (1.0 - 1e-12):
            s.levels[BEST] = s.levels[COST]
            s.counts[STALE] = 1
    if s.counts[STALE] == 1:
        _keep(s)


@_kernel
def _adapt_weight(m, s):  # type: ignore[no-untyped-def]
    """Let the weight follow the share of fitting states, half of which should fit."""
    if s.counts[AREA] == 0:
        s.counts[FITTING] += 1
    s.counts[SEEN] += 1
    seen = s.counts[SEEN]
    if seen >= max(512, 4 * m.time.shape[0]):
        share = s.counts[FITTING] / seen
        s.levels[WEIGHT] *= 1.1 if share < 0.4 else 0.92 if share > 0.6 else 1.0
        s.counts[FITTING] = s.counts[SEEN] = 0


@_kernel
def _change(m, s, limit):  # type: ignore[no-untyped-def]
    """Insert, drop or shift a recomputation; insert more often where memory is over budget."""
    kind = _draw(s)
    if kind < (INSERTIONS_OVER if s.counts[AREA] > 0 else INSERTIONS):
        return _again(m, s, limit)
    if kind < 1.0 - SHIFTS:
        return _drop(m, s)
    return _shift(m, s)


@_kernel
def _copy_before(s, log):  # type: ignore[no-untyped-def]
    """Keep the sequence as it stood before the logged move, which leaves the best state."""
    _keep(s)
    for place in range(log - 1, -1, -1):
        op, slot, kind = s.log[place, 0], s.log[place, 1], s.log[place, 2]
        s.kept_run[slot] = -1 if kind == INSERTED else op
        s.kept_fixed[slot] = kind == REMOVED_FIXED
