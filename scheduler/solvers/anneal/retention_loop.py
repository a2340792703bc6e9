"""Compiled kernels of retention annealing: flip decisions to keep or to evict tensors, and decode the result.

A gap is the stretch of the order between one use of a tensor and the next; each has a decision
of `graph_arrays`. Gap t opens when tensor t is first computed, gap `tensors + e` after edge e.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.solvers.anneal.moves import draw, pick
from scheduler.solvers.anneal.state import Flags, Floats, Ints
from scheduler.solvers.graph_arrays import DROP, EVICT, KEEP, GraphArrays, decode_decisions, profile_runs
from scheduler.solvers.jit import compiled, inlined_kernel, inner_kernel

MOST_CHANGES = 64
"""Largest number of decisions that one move changes."""
WEIGHT_STEPS = 250
"""Number of times that a round adapts the weight of memory over budget."""
EVICTIONS_OVER_BUDGET, EVICTIONS = 0.6, 0.3
"""Shares of the moves that evict, if the present schedule is over budget and if it fits."""
SWAP_SHARE = 0.4
"""Share of the moves that change decisions about the inputs of a tensor's producer in the opposite direction."""
SHIFT_SHARE = 0.1
"""Share of the moves that shift a first run, where tasks may be reordered."""
FARTHEST_SHIFT = 32
"""Most steps of a shift."""
MOST_RUNS_RATIO = 8
"""A schedule has at most this many times the runs of the order, and a thousand more."""

LOOSE, CHANGES, FITTING, SEEN, FROM, TO = range(6)
"""Entries of `RetentionState.counts`."""
WEIGHT, BEST = range(2)
"""Entries of `RetentionState.levels`."""

retention_kernel = compiled(nogil=True)
allocating_kernel = compiled(inner=True, nogil=True)
"""For those that only other kernels call, and that create arrays."""


class RetentionModel(NamedTuple):
    """The constant data.

    `graph` is contracted: views are folded into their bases. `views` lists, per operation, the
    views that it needs, in order, and in one more row those that the results are; `base` is the
    tensor that a view reads. `use_operation` and
    `use_gap` list, per tensor, the operations that produce or read it, and the gap that opens
    then. `tensor` is the tensor of each gap, `step_of` the step of each operation in the graph's
    order (-1 for those outside), which shifts change; `budget` is without the resident bytes.
    """

    graph: GraphArrays
    folded: Flags
    view_start: Ints
    views: Ints
    base: Ints
    use_start: Ints
    use_operation: Ints
    use_gap: Ints
    tensor: Ints
    step_of: Ints
    backward: Flags
    budget: int


class RetentionState(NamedTuple):
    """The mutable data.

    `loose` lists the gaps whose tensors are not kept; `place` is the position of each in it, or
    -1. `changed` and `before` log the last move. `version` and `viewed` are scratch space. `kept`
    are the best decisions that fit, `kept_order` the order of the graph then.
    """

    decision: npt.NDArray[np.int8]
    loose: Ints
    place: Ints
    changed: Ints
    before: npt.NDArray[np.int8]
    version: Ints
    viewed: Ints
    kept: npt.NDArray[np.int8]
    kept_order: Ints
    counts: Ints
    levels: Floats
    random: npt.NDArray[np.uint64]


class Outcome(NamedTuple):
    """The runs that decisions lead to, with what `decode_decisions` and `profile_runs` return.

    `area` is the sum over all runs of the bytes over budget.
    """

    runs: Ints
    steps: Ints
    memory: Ints
    ends: Ints
    offset: Ints
    time: float
    area: int


@retention_kernel
def anneal_decisions(m, s, moves, hot, cold, free, window):  # type: ignore[no-untyped-def]
    """Make random moves while the temperature falls geometrically from `hot` to `cold`.

    The energy is the time plus the weight times the area. With `free`, first runs move too. The
    weight is adapted after every `window` moves.
    """
    now = _outcome(m, s, np.inf)
    if now.time == np.inf:
        # Too many runs: start from the save-everything schedule.
        s.decision[:], s.place[:], s.counts[LOOSE] = KEEP, -1, 0
        now = _outcome(m, s, np.inf)
    _keep_if_best(m, s, now)
    for move in range(moves):
        temperature = hot * (cold / hot) ** (move / moves)
        limit = -temperature * np.log(1.0 - draw(s))
        _adapt_weight(s, now.area, window)
        weight = s.levels[WEIGHT]
        s.counts[CHANGES] = s.counts[FROM] = s.counts[TO] = 0
        if not (_shift(m, s) if free and draw(s) < SHIFT_SHARE else _change(m, s, now)):
            _undo(m, s)
            continue
        energy = now.time + weight * now.area + limit
        then = _outcome(m, s, energy)
        if then.time + weight * then.area > energy:
            _undo(m, s)
            continue
        now = then
        _keep_if_best(m, s, now)


@allocating_kernel
def _keep_if_best(m, s, now):  # type: ignore[no-untyped-def]
    if now.area == 0 and now.time < s.levels[BEST] * (1.0 - 1e-12):
        s.levels[BEST] = now.time
        s.kept[:] = s.decision
        s.kept_order[:] = m.graph.order


@inner_kernel
def _adapt_weight(s, area, window):  # type: ignore[no-untyped-def]
    """Adapt the weight so that about half of the states fit."""
    if area == 0:
        s.counts[FITTING] += 1
    s.counts[SEEN] += 1
    if s.counts[SEEN] >= window:
        share = s.counts[FITTING] / s.counts[SEEN]
        s.levels[WEIGHT] *= 1.1 if share < 0.4 else 0.9 if share > 0.6 else 1.0
        s.counts[FITTING] = s.counts[SEEN] = 0


@allocating_kernel
def _outcome(m, s, most):  # type: ignore[no-untyped-def]
    """Return what the decisions lead to; an infinite time and no runs if their time exceeds a limit."""
    graph, tensors = m.graph, m.graph.producer.shape[0]
    most_runs = MOST_RUNS_RATIO * m.graph.order.shape[0] + 1000
    runs, steps, count = decode_decisions(graph, s.decision[tensors:], s.decision[:tensors], most_runs)
    time = np.inf if count < 0 else _time_of(m, s, runs, count)
    if count < 0 or time > most:
        nothing = np.zeros(0, dtype=np.int64)
        return Outcome(nothing, nothing, nothing, nothing, nothing, np.inf, 0)
    runs, steps = runs[:count], steps[:count]
    profile, area = profile_runs(graph, runs), 0
    for p in range(count):
        area += max(0, profile.memory[p] - m.budget)
    return Outcome(runs, steps, profile.memory, profile.ends, profile.offset, time, area)


@inlined_kernel
def _time_of(m, s, runs, count):  # type: ignore[no-untyped-def]
    """Return the time of runs and of the views that are repeated because their base is recomputed."""
    s.version[:] = 0
    s.viewed[:] = -1
    graph, time = m.graph, 0.0
    for p in range(count):
        i = runs[p]
        if m.folded[i]:
            if s.viewed[i] < 0:
                time += _time_of_views(m, s, i)
            continue
        time += _time_of_views(m, s, i) + graph.time[i]
        for k in range(graph.output_start[i], graph.output_start[i + 1]):
            s.version[graph.outputs[k]] += 1
    return time + _time_of_views(m, s, graph.time.shape[0])


@inlined_kernel
def _time_of_views(m, s, row):  # type: ignore[no-untyped-def]
    """Run the views of a row whose base has changed since they last ran; return their time."""
    time = 0.0
    for k in range(m.view_start[row], m.view_start[row + 1]):
        view = m.views[k]
        if s.viewed[view] != s.version[m.base[view]]:
            s.viewed[view] = s.version[m.base[view]]
            time += m.graph.time[view]
    return time


@inner_kernel
def _change(m, s, now):  # type: ignore[no-untyped-def]
    """Make a random move; return False if there is none of the kind drawn."""
    if draw(s) < (EVICTIONS_OVER_BUDGET if now.area > 0 else EVICTIONS):
        return _evict(m, s, now)
    return _restore(m, s)


@inner_kernel
def _evict(m, s, now):  # type: ignore[no-untyped-def]
    """Evict a tensor that is live at a random run, over budget if one is; or drop one that is evicted already."""
    graph = m.graph
    at = pick(s, now.runs.shape[0])
    while now.area > 0 and now.memory[at] <= m.budget:
        at = at + 1 if at + 1 < now.runs.shape[0] else 0
    tensor = gap = -1
    for _ in range(40):
        if gap >= 0 or at == 0:
            break
        begin = pick(s, at)
        outputs = now.offset[begin + 1] - now.offset[begin]
        if outputs == 0:
            continue
        k = pick(s, outputs)
        tensor = graph.outputs[graph.output_start[now.runs[begin]] + k]
        size = graph.storage_bytes[graph.storage[tensor]]
        if now.ends[now.offset[begin] + k] > at and size > 0 and not graph.pinned[tensor]:
            gap = _gap_before(m, s, tensor, now.steps[at])
            if gap >= 0 and s.decision[gap] == DROP:
                gap = -1
    if gap < 0:
        return False
    evicts = s.decision[gap] == KEEP and draw(s) < 0.7
    _decide(s, gap, EVICT if evicts else DROP)
    if draw(s) < SWAP_SHARE:
        producer = graph.producer[tensor]
        for e in range(graph.input_start[producer], graph.input_start[producer + 1]):
            other = _gap_before(m, s, graph.inputs[e], now.steps[at])
            if other >= 0 and s.decision[other] != KEEP and draw(s) < 0.7:
                _decide(s, other, KEEP)
    return True


@inner_kernel
def _restore(m, s):  # type: ignore[no-untyped-def]
    """Keep a tensor in a random gap in which it is not kept, or exchange EVICT and DROP."""
    graph = m.graph
    if s.counts[LOOSE] == 0:
        return False
    gap = s.loose[pick(s, s.counts[LOOSE])]
    if draw(s) >= 0.75:
        _decide(s, gap, DROP if s.decision[gap] == EVICT else EVICT)
        return True
    _decide(s, gap, KEEP)
    if draw(s) < SWAP_SHARE:
        tensor = m.tensor[gap]
        step = 0
        for u in range(m.use_start[tensor], m.use_start[tensor + 1]):
            if m.use_gap[u] == gap:
                step = m.step_of[m.use_operation[u]] + 1
        producer = graph.producer[tensor]
        for e in range(graph.input_start[producer], graph.input_start[producer + 1]):
            other = _gap_before(m, s, graph.inputs[e], step)
            if other >= 0 and s.decision[other] == KEEP and not graph.pinned[graph.inputs[e]] and draw(s) < 0.5:
                _decide(s, other, EVICT)
    return True


@inner_kernel
def _shift(m, s):  # type: ignore[no-untyped-def]
    """Move a first run by some steps, after the first runs that it reads and before those that read it."""
    old = pick(s, m.graph.order.shape[0])
    new = old - FARTHEST_SHIFT + pick(s, 2 * FARTHEST_SHIFT + 1)
    low, high = _steps_for(m, old)
    new = min(max(new, low), high)
    i = m.graph.order[old]
    for step in range(min(old, new), max(old, new) + 1):
        if m.backward[m.graph.order[step]] != m.backward[i]:
            return False
    s.counts[FROM], s.counts[TO] = old, new
    _move_first(m, old, new)
    return old != new


@inner_kernel
def _steps_for(m, old):  # type: ignore[no-untyped-def]
    """Return the first and the last step to which the first run of a step may move."""
    graph, i = m.graph, m.graph.order[old]
    low, high = 0, graph.order.shape[0] - 1
    for e in range(graph.input_start[i], graph.input_start[i + 1]):
        tensor, first = graph.inputs[e], old
        for u in range(m.use_start[tensor], m.use_start[tensor + 1]):
            at = m.step_of[m.use_operation[u]]
            if m.use_gap[u] == tensor and 0 <= at < first:
                first = at
        if first < old:
            low = max(low, first + 1)
    for k in range(graph.output_start[i], graph.output_start[i + 1]):
        tensor = graph.outputs[k]
        for u in range(m.use_start[tensor], m.use_start[tensor + 1]):
            at = m.step_of[m.use_operation[u]]
            if at > old:
                high = min(high, at - 1)
    return low, high


@inner_kernel
def _move_first(m, old, new):  # type: ignore[no-untyped-def]
    """Move the first run of a step to another one, and those in between by one."""
    order, i = m.graph.order, m.graph.order[old]
    direction = 1 if new > old else -1
    for step in range(old, new, direction):
        order[step] = order[step + direction]
        m.step_of[order[step]] = step
    order[new] = i
    m.step_of[i] = new


@inlined_kernel
def _gap_before(m, s, tensor, step):  # type: ignore[no-untyped-def]
    """Return the gap of a tensor that is open just before a step of the order; -1 if there is none yet."""
    latest, gap = -1, -1
    for u in range(m.use_start[tensor], m.use_start[tensor + 1]):
        at = m.step_of[m.use_operation[u]]
        if latest < at < step:
            latest, gap = at, m.use_gap[u]
    return gap


@inlined_kernel
def _decide(s, gap, decision):  # type: ignore[no-untyped-def]
    """Change a decision, and log the one before."""
    if s.counts[CHANGES] == MOST_CHANGES:
        return
    s.changed[s.counts[CHANGES]] = gap
    s.before[s.counts[CHANGES]] = s.decision[gap]
    s.counts[CHANGES] += 1
    _assign(s, gap, decision)


@inlined_kernel
def _assign(s, gap, decision):  # type: ignore[no-untyped-def]
    s.decision[gap] = decision
    if decision != KEEP and s.place[gap] < 0:
        s.place[gap] = s.counts[LOOSE]
        s.loose[s.counts[LOOSE]] = gap
        s.counts[LOOSE] += 1
    elif decision == KEEP and s.place[gap] >= 0:
        last = s.loose[s.counts[LOOSE] - 1]
        s.loose[s.place[gap]] = last
        s.place[last] = s.place[gap]
        s.place[gap] = -1
        s.counts[LOOSE] -= 1


@inner_kernel
def _undo(m, s):  # type: ignore[no-untyped-def]
    """Undo the logged move."""
    for k in range(s.counts[CHANGES] - 1, -1, -1):
        _assign(s, s.changed[k], s.before[k])
    _move_first(m, s.counts[TO], s.counts[FROM])
