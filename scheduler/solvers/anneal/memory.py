"""Compiled kernels of slot annealing: update memory exactly when runs are inserted or removed.

An insertion or removal moves the ends of only a few instances, and each moved end is one
addition over a contiguous range of slots.
"""

from __future__ import annotations

import numpy as np

from scheduler.solvers.anneal.state import (
    AREA,
    BLOCK,
    COST,
    FIRST_BACKWARD,
    FIRSTS,
    HIDDEN,
    LAST_FORWARD,
    LOG,
    LOOSE,
    kernel,
)
from scheduler.solvers.jit import inlined_kernel, inner_kernel


@inlined_kernel
def _refresh_block(p, block):  # type: ignore[no-untyped-def]
    """Recompute a block's highest memory and its area over budget."""
    memory = p.memory[block]
    highest = memory[0]
    for i in range(1, BLOCK):
        highest = max(highest, memory[i])
    p.highest[block] = highest
    _refresh_area(p, block)


@inlined_kernel
def _refresh_area(p, block):  # type: ignore[no-untyped-def]
    over = np.int64(0)
    if p.highest[block] + p.pending[block] > 0:
        memory, pending = p.memory[block], p.pending[block]
        for i in range(BLOCK):
            over += max(np.int64(0), memory[i] + pending)
    p.counts[AREA] += over - p.area[block]
    p.area[block] = over


@inlined_kernel
def _add_within(p, block, first, stop, amount):  # type: ignore[no-untyped-def]
    """Add to the memory of some slots of a block, counted within it."""
    part = p.memory[block, first:stop]
    for i in range(part.shape[0]):  # from zero: an index that might be negative keeps loops from being vectorized
        part[i] += amount
    _refresh_block(p, block)


@inner_kernel
def _add(p, first, stop, amount):  # type: ignore[no-untyped-def]
    """Add to the memory of slots first .. stop - 1."""
    if first >= stop or amount == 0:
        return
    low, high = first // BLOCK, (stop - 1) // BLOCK
    if low == high:
        _add_within(p, low, first - low * BLOCK, stop - low * BLOCK, amount)
        return
    _add_within(p, low, first - low * BLOCK, BLOCK, amount)
    for block in range(low + 1, high):
        p.pending[block] += amount
        if p.area[block] > 0 or p.highest[block] + p.pending[block] > 0:
            _refresh_area(p, block)
    _add_within(p, high, 0, stop - high * BLOCK, amount)


@inlined_kernel
def _last_run(s, op, before):  # type: ignore[no-untyped-def]
    """Return the last slot before this one that runs an operation; -1 for none."""
    k = s.times_run[op] - 1
    while k >= 0 and s.occurrences[op, k] >= before:
        k -= 1
    return s.occurrences[op, k] if k >= 0 else -1


@inlined_kernel
def serving(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the last slot before this one that produces a tensor, and its group there; -1 for none."""
    best, group = -1, 0
    for e in range(m.producer_start[tensor], m.producer_start[tensor + 1]):
        last = _last_run(s, m.producers[e], slot)
        if last > best:
            best, group = last, m.producer_group[e]
    return best, group


@inlined_kernel
def last_read(m, s, tensor, after, before):  # type: ignore[no-untyped-def]
    """Return the last slot strictly between two slots that reads a tensor, or the first of the two."""
    best = after
    for e in range(m.reader_start[tensor], m.reader_start[tensor + 1]):
        best = max(best, _last_run(s, m.readers[e], before))
    return best


@inlined_kernel
def _next_run(s, ops, slot):  # type: ignore[no-untyped-def]
    """Return the first slot after this one that runs any of these operations; the number of slots for none."""
    best = s.run.shape[0]
    for op in ops:
        for k in range(s.times_run[op]):
            if s.occurrences[op, k] > slot:
                best = min(best, s.occurrences[op, k])
                break
    return best


@inlined_kernel
def next_production(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the first slot after this one that produces a tensor; the number of slots for none."""
    return _next_run(s, m.producers[m.producer_start[tensor] : m.producer_start[tensor + 1]], slot)


@inlined_kernel
def next_read(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the first slot after this one that reads a tensor; the number of slots for none."""
    return _next_run(s, m.readers[m.reader_start[tensor] : m.reader_start[tensor + 1]], slot)


@inlined_kernel
def end_of(m, s, tensor, slot):  # type: ignore[no-untyped-def]
    """Return the last slot that needs the tensor produced at a slot."""
    following = next_production(m, s, tensor, slot)
    if following == s.run.shape[0] and m.is_result[tensor]:
        return following - 1
    return last_read(m, s, tensor, slot, following)


@inlined_kernel
def _need_views(m, s, slot, group, views):  # type: ignore[no-untyped-def]
    """Set the views on an instance that its readers need, and update the cost."""
    row = m.group_views[m.group_start[s.run[slot]] + group]
    changed, k = s.viewed[slot, group] ^ views, m.view_start[row]
    s.viewed[slot, group] = views
    while changed:
        if changed & 1:
            s.levels[COST] += m.view_times[k] if views & 1 else -m.view_times[k]
        changed, views, k = changed >> 1, views >> 1, k + 1


@inner_kernel
def _refresh_instance(m, s, slot, group):  # type: ignore[no-untyped-def]
    """Recompute an instance's end and its views, and move its bytes."""
    op = s.run[slot]
    end, views = slot, 0
    for e in range(m.output_start[op], m.output_start[op + 1]):
        if m.output_group[e] != group:
            continue
        tensor = m.outputs[e]
        following = next_production(m, s, tensor, slot)
        if following == s.run.shape[0] and m.is_result[tensor]:
            end = following - 1
            views |= m.result_views[tensor]
        for r in range(m.reader_start[tensor], m.reader_start[tensor + 1]):
            last = _last_run(s, m.readers[r], following)
            if last > slot:
                end = max(end, last)
                views |= m.reader_views[r]
    _need_views(m, s, slot, group, views)
    old = s.end[slot, group]
    size = m.group_bytes[m.group_start[op] + group]
    if end > old:
        _add(s.profile, old + 1, end + 1, size)
    elif end < old:
        _add(s.profile, end + 1, old + 1, -size)
    s.end[slot, group] = end


@inner_kernel
def insert(m, s, op, slot, fixed):  # type: ignore[no-untyped-def]
    """Insert a run into an empty slot; its inputs must be available there."""
    s.run[slot] = op
    s.fixed[slot] = fixed
    _add(s.profile, slot, slot + 1, HIDDEN + m.workspace[op])
    k = s.times_run[op]
    while k > 0 and s.occurrences[op, k - 1] > slot:
        s.occurrences[op, k] = s.occurrences[op, k - 1]
        k -= 1
    s.occurrences[op, k] = slot
    s.times_run[op] += 1
    for e in range(m.input_start[op], m.input_start[op + 1]):
        source, group = serving(m, s, m.inputs[e], slot)
        if source >= 0 and s.end[source, group] < slot:
            _add(s.profile, s.end[source, group] + 1, slot + 1, m.group_bytes[m.group_start[s.run[source]] + group])
            s.end[source, group] = slot
        if source >= 0:
            _need_views(m, s, source, group, s.viewed[source, group] | m.input_views[e])
    for e in range(m.output_start[op], m.output_start[op + 1]):
        source, group = serving(m, s, m.outputs[e], slot)
        if source >= 0:
            _refresh_instance(m, s, source, group)
    for group in range(m.group_start[op + 1] - m.group_start[op]):
        s.end[slot, group] = slot - (not m.late[m.group_start[op] + group])
        _refresh_instance(m, s, slot, group)
    s.levels[COST] += m.time[op]
    if fixed:
        s.fixed_slot[op] = slot
    else:
        s.loose_place[slot] = s.counts[LOOSE]
        s.loose[s.counts[LOOSE]] = slot
        s.counts[LOOSE] += 1


@inner_kernel
def remove(m, s, slot):  # type: ignore[no-untyped-def]
    """Remove the run of a slot."""
    op = s.run[slot]
    k = s.times_run[op] - 1
    while s.occurrences[op, k] != slot:
        k -= 1
    for later in range(k, s.times_run[op] - 1):
        s.occurrences[op, later] = s.occurrences[op, later + 1]
    s.times_run[op] -= 1
    for group in range(m.group_start[op + 1] - m.group_start[op]):
        place = m.group_start[op] + group
        _add(s.profile, slot + m.late[place], s.end[slot, group] + 1, -m.group_bytes[place])
        _need_views(m, s, slot, group, 0)
    _add(s.profile, slot, slot + 1, -HIDDEN - m.workspace[op])
    s.run[slot] = -1
    for e in range(m.input_start[op], m.input_start[op + 1]):
        source, group = serving(m, s, m.inputs[e], slot)
        if source >= 0 and (s.end[source, group] == slot or m.input_views[e]):
            _refresh_instance(m, s, source, group)
    for e in range(m.output_start[op], m.output_start[op + 1]):
        source, group = serving(m, s, m.outputs[e], slot)
        if source >= 0:
            _refresh_instance(m, s, source, group)
    s.levels[COST] -= m.time[op]
    if not s.fixed[slot]:
        last = s.loose[s.counts[LOOSE] - 1]
        s.loose[s.loose_place[slot]] = last
        s.loose_place[last] = s.loose_place[slot]
        s.counts[LOOSE] -= 1


@kernel
def load(m, s, ops, fixed, slots):  # type: ignore[no-untyped-def]
    """Fill the slots with a sequence of runs."""
    s.run[:] = -1
    s.viewed[:] = 0
    s.times_run[:] = 0
    s.counts[LOOSE] = 0
    s.counts[LOG] = 0
    s.levels[COST] = 0.0
    s.profile.memory[:] = -HIDDEN - m.budget[0]
    s.profile.pending[:] = 0
    s.profile.highest[:] = -HIDDEN - m.budget[0]
    s.profile.area[:] = 0
    s.counts[AREA] = 0
    firsts = 0
    for i in range(ops.shape[0]):
        insert(m, s, ops[i], slots[i], fixed[i])
        if fixed[i]:
            s.firsts[firsts] = ops[i]
            firsts += 1
    s.counts[FIRSTS] = firsts
    _find_phases(m, s)


@inner_kernel
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
