"""Compiled kernels of slot annealing: the random moves, and how to undo them."""

from __future__ import annotations

import numpy as np

from scheduler.solvers.anneal.memory import end_of, insert, last_read, next_production, next_read, remove, serving
from scheduler.solvers.anneal.state import (
    AREA,
    BLOCK,
    FIRST_BACKWARD,
    FIRSTS,
    INSERTED,
    LAST_FORWARD,
    LOG,
    LOOSE,
    MOST_LINKS,
    REMOVED,
    REMOVED_FIXED,
    RESERVED,
)
from scheduler.solvers.jit import inlined_kernel, inner_kernel

DIRECTED_SHARE = 0.7
"""Over budget, the share of insertions that target a slot over budget."""
DIRECTED_TRIES = 40
"""Number of tries to find a tensor that is live at that slot."""
INSERTION_SHARE, INSERTION_SHARE_OVER_BUDGET, SHIFT_SHARE = 0.25, 0.55, 0.25
"""Shares of insertions if the state fits and if it is over budget, and of shifts; all other moves are drops."""


@inner_kernel
def change(m, s, limit):  # type: ignore[no-untyped-def]
    """Insert, drop or shift a recomputation; insert more often where memory is over budget."""
    kind = draw(s)
    if kind < (INSERTION_SHARE_OVER_BUDGET if s.counts[AREA] > 0 else INSERTION_SHARE):
        return _insert_recomputation(m, s, limit)
    if kind < 1.0 - SHIFT_SHARE:
        return _drop(m, s)
    return _shift(m, s)


@inner_kernel
def _insert_recomputation(m, s, limit):  # type: ignore[no-untyped-def]
    """Insert a recomputation of a random input before a random reader, and of its inputs, recursively."""
    tensor, low, reader = _gap_over(m, s) if s.counts[AREA] > 0 and draw(s) < DIRECTED_SHARE else _any_gap(m, s)
    if tensor < 0 or m.recompute[tensor] < 0:
        return False
    slot = _empty_slot(s, low, reader, draw(s) < 0.8)
    if slot < 0:
        return False
    eager = draw(s)
    s.links[0, 0], s.links[0, 1] = m.recompute[tensor], slot
    s.run[slot] = RESERVED
    links, feasible = _link_inputs(m, s, eager)
    extra = 0.0
    for i in range(links):
        s.run[s.links[i, 1]] = -1
        extra += m.time[s.links[i, 0]]
    if not feasible or extra > limit or s.counts[LOOSE] + links >= s.loose.shape[0]:
        return False
    _sort_links(s, links)
    for i in range(links):
        _do_insert(m, s, s.links[i, 0], s.links[i, 1], False)
    return True


@inner_kernel
def _link_inputs(m, s, eager):  # type: ignore[no-untyped-def]
    """Link recomputations of missing inputs to the first link, recursively; return their number and feasibility."""
    links, done = 1, 0
    while done < links:
        op, slot = s.links[done, 0], s.links[done, 1]
        done += 1
        if s.times_run[op] + links >= s.occurrences.shape[1] or s.fixed_slot[s.lead[op]] >= slot:
            return links, False
        for e in range(m.input_start[op], m.input_start[op + 1]):
            tensor = m.inputs[e]
            source, group = serving(m, s, tensor, slot)
            if source < 0:
                return links, False
            producer = m.recompute[tensor]
            if producer < 0 or s.end[source, group] >= slot or links == MOST_LINKS or draw(s) >= eager:
                continue
            if _is_linked(s, links, producer, slot):
                continue
            place = _empty_slot(s, last_read(m, s, tensor, source, slot), slot, True)
            if place >= 0:
                s.run[place] = RESERVED
                s.links[links, 0], s.links[links, 1] = producer, place
                links += 1
    return links, True


@inner_kernel
def _is_linked(s, links, op, slot):  # type: ignore[no-untyped-def]
    """Return whether a link runs an operation before a slot."""
    linked = False
    for i in range(links):
        linked = linked or (s.links[i, 0] == op and s.links[i, 1] < slot)
    return linked


@inner_kernel
def _sort_links(s, links):  # type: ignore[no-untyped-def]
    """Sort the links by their slots, so that inputs are inserted before their readers."""
    for i in range(1, links):
        op, slot = s.links[i, 0], s.links[i, 1]
        k = i
        while k > 0 and s.links[k - 1, 1] > slot:
            s.links[k, 0], s.links[k, 1] = s.links[k - 1, 0], s.links[k - 1, 1]
            k -= 1
        s.links[k, 0], s.links[k, 1] = op, slot


@inner_kernel
def _drop(m, s):  # type: ignore[no-untyped-def]
    """Remove a recomputation, and the recomputed inputs that nothing else reads."""
    if s.counts[LOOSE] == 0:
        return False
    slot = s.loose[pick(s, s.counts[LOOSE])]
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
            source, _ = serving(m, s, m.inputs[e], slot)
            has_space = height < MOST_LINKS and s.counts[LOG] < MOST_LINKS
            if has_space and source >= 0 and not s.fixed[source] and _is_useless(m, s, source):
                s.links[height, 0] = source
                height += 1
    return True


@inner_kernel
def _shift(m, s):  # type: ignore[no-untyped-def]
    """Move a recomputation to another slot between the previous production and its first reader."""
    if s.counts[LOOSE] == 0:
        return False
    slot = s.loose[pick(s, s.counts[LOOSE])]
    op = s.run[slot]
    if _is_needed(m, s, slot):
        return False
    low, high = s.fixed_slot[s.lead[op]], s.run.shape[0]
    for e in range(m.output_start[op], m.output_start[op + 1]):
        source, _ = serving(m, s, m.outputs[e], slot)
        low = max(low, source)
        high = min(high, next_read(m, s, m.outputs[e], slot))
    place = _near_or_far(s, slot, low, high)
    if place < 0:
        return False
    for e in range(m.input_start[op], m.input_start[op + 1]):
        source, _ = serving(m, s, m.inputs[e], place)
        if source < 0:
            return False
    _do_remove(m, s, slot)
    _do_insert(m, s, op, place, False)
    return True


@inner_kernel
def shift_first(m, s):  # type: ignore[no-untyped-def]
    """Move a first run to another slot between the first productions of its inputs and its first reader."""
    op = s.firsts[pick(s, s.counts[FIRSTS])]
    if s.lead[op] != op:
        return False
    slot, task = s.fixed_slot[op], m.task[op]
    slots = s.run.shape[0]
    low, high = -1, slots
    for e in range(m.input_start[op], m.input_start[op + 1]):
        low = max(low, next_production(m, s, m.inputs[e], -1))
    for e in range(m.output_start[op], m.output_start[op + 1]):
        high = min(high, next_read(m, s, m.outputs[e], -1))
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


@inner_kernel
def undo(m, s):  # type: ignore[no-untyped-def]
    """Undo the logged move."""
    for place in range(s.counts[LOG] - 1, -1, -1):
        op, slot, kind = s.log[place, 0], s.log[place, 1], s.log[place, 2]
        if kind == INSERTED:
            remove(m, s, slot)
        else:
            insert(m, s, op, slot, kind == REMOVED_FIXED)
    s.counts[LOG] = 0


@inner_kernel
def update_phases(m, s):  # type: ignore[no-untyped-def]
    """Update the borders of the phases after a first run has moved."""
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


@inner_kernel
def _any_gap(m, s):  # type: ignore[no-untyped-def]
    """Return a random input of a random run, the slot of its previous use or production, and the run's slot."""
    firsts = s.counts[FIRSTS]
    chosen = pick(s, firsts + s.counts[LOOSE])
    reader = s.fixed_slot[s.firsts[chosen]] if chosen < firsts else s.loose[chosen - firsts]
    op = s.run[reader]
    count = m.input_start[op + 1] - m.input_start[op]
    if count == 0:
        return -1, 0, 0
    tensor = m.inputs[m.input_start[op] + pick(s, count)]
    source, _ = serving(m, s, tensor, reader)
    return tensor, last_read(m, s, tensor, source, reader), reader


@inner_kernel
def _gap_over(m, s):  # type: ignore[no-untyped-def]
    """Return a tensor that is live across a slot over budget, that slot, and the next slot that reads it."""
    over = _slot_over(s)
    for _ in range(DIRECTED_TRIES):
        slot = pick(s, over + 1)
        op = s.run[slot]
        if op < 0 or slot == over:
            continue
        count = m.output_start[op + 1] - m.output_start[op]
        if count == 0:
            continue
        e = m.output_start[op] + pick(s, count)
        if s.end[slot, m.output_group[e]] > over:
            tensor = m.outputs[e]
            return tensor, over, next_read(m, s, tensor, over)
    return -1, 0, 0


@inner_kernel
def _slot_over(s):  # type: ignore[no-untyped-def]
    """Return a random slot over budget; there must be one."""
    blocks = s.profile.area.shape[0]
    block = pick(s, blocks)
    while s.profile.area[block] == 0:
        block = (block + 1) % blocks
    place = pick(s, BLOCK)
    while s.profile.memory[block, place] + s.profile.pending[block] <= 0:
        place = (place + 1) % BLOCK
    return block * BLOCK + place


@inner_kernel
def _is_needed(m, s, slot):  # type: ignore[no-untyped-def]
    """Return whether no earlier run could serve the readers of the run of a slot."""
    op = s.run[slot]
    for e in range(m.output_start[op], m.output_start[op + 1]):
        tensor = m.outputs[e]
        source, _ = serving(m, s, tensor, slot)
        if source < 0 and end_of(m, s, tensor, slot) > slot:
            return True
    return False


@inlined_kernel
def _is_useless(m, s, slot):  # type: ignore[no-untyped-def]
    """Return whether nothing reads the outputs of the run of a slot."""
    op = s.run[slot]
    end = slot
    for group in range(m.group_start[op + 1] - m.group_start[op]):
        end = max(end, s.end[slot, group])
    return end == slot


@inlined_kernel
def _empty_slot(s, low, high, near):  # type: ignore[no-untyped-def]
    """Return an empty slot strictly between two slots: the last one or a random one; -1 if none is found."""
    if high - low < 2:
        return -1
    start = high - 1 if near else low + 1 + pick(s, high - low - 1)
    for slot in range(start, max(low, start - BLOCK), -1):
        if s.run[slot] == -1:
            return slot
    return -1


@inner_kernel
def _near_or_far(s, slot, low, high):  # type: ignore[no-untyped-def]
    """Return an empty slot strictly between two slots, half of the time near a given slot; -1 if none is found."""
    if draw(s) < 0.5:
        reach = 2 + pick(s, 24)
        low, high = max(low, slot - reach), min(high, slot + reach)
    return _empty_slot(s, low, high, False)


@inlined_kernel
def _do_insert(m, s, op, slot, fixed):  # type: ignore[no-untyped-def]
    insert(m, s, op, slot, fixed)
    _note(s, op, slot, INSERTED)


@inlined_kernel
def _do_remove(m, s, slot):  # type: ignore[no-untyped-def]
    op, fixed = s.run[slot], s.fixed[slot]
    remove(m, s, slot)
    _note(s, op, slot, REMOVED_FIXED if fixed else REMOVED)


@inlined_kernel
def _note(s, op, slot, kind):  # type: ignore[no-untyped-def]
    place = s.counts[LOG]
    s.log[place, 0], s.log[place, 1], s.log[place, 2] = op, slot, kind
    s.counts[LOG] = place + 1


@inlined_kernel
def draw(s):  # type: ignore[no-untyped-def]
    """Return a random number in [0, 1), from the walker's own xorshift64* generator."""
    x = s.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    s.random[0] = x
    return float((x * np.uint64(2685821657736338717)) >> np.uint64(11)) * 1.1102230246251565e-16


@inlined_kernel
def pick(s, count):  # type: ignore[no-untyped-def]
    """Return a random integer in [0, count)."""
    return min(int(draw(s) * count), count - 1)
