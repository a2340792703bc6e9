"""The compiled main loop of slot annealing: accept worse moves less and less often."""

from __future__ import annotations

import numpy as np

from scheduler.solvers.anneal.moves import change, draw, shift_first, undo, update_phases
from scheduler.solvers.anneal.state import (
    AREA,
    BEST,
    COST,
    FITTING,
    INSERTED,
    KEPT,
    LOG,
    REMOVED_FIXED,
    SEEN,
    STALE,
    WEIGHT,
    kernel,
)
from scheduler.solvers.jit import inner_kernel

FIRST_RUN_SHARE = 0.4
"""Share of the moves that shift a first run, if tasks may be reordered."""
WINDOW_MOVES, LEAST_WINDOW, MOST_WINDOW = 4, 512, 12_000
"""The weight is adapted after so many moves per operation, at least and at most so many: a round of a large graph, cut
short on a slow machine, would else be over before anything fits."""


@kernel
def anneal(m, s, moves, hot, cold, free):  # type: ignore[no-untyped-def]
    """Make random moves while the temperature falls geometrically from `hot` to `cold`.

    The energy is the cost plus the weight times the area over budget. `kept_run` holds the
    cheapest sequence that fits. With `free`, first runs move too.
    """
    temperature, fall = hot, (cold / hot) ** (64.0 / max(moves, 64))
    for move in range(moves):
        if move % 64 == 63:
            temperature *= fall
        _adapt_weight(m, s)
        cost, area, weight = s.levels[COST], s.counts[AREA], s.levels[WEIGHT]
        limit = -temperature * np.log(1.0 - draw(s))
        moves_first = free and draw(s) < FIRST_RUN_SHARE
        s.counts[LOG] = 0
        moved = shift_first(m, s) if moves_first else change(m, s, limit + weight * area)
        if not moved:
            continue
        if s.levels[COST] - cost + weight * (s.counts[AREA] - area) > limit:
            undo(m, s)
            s.levels[COST] = cost
            continue
        if moves_first:
            update_phases(m, s)
        if s.counts[STALE] == 1 and (s.counts[AREA] > 0 or s.levels[COST] > s.levels[BEST]):
            _copy_before(s, s.counts[LOG])
        if s.counts[AREA] == 0 and s.levels[COST] < s.levels[BEST] * (1.0 - 1e-12):
            s.levels[BEST] = s.levels[COST]
            s.counts[STALE] = 1
    if s.counts[STALE] == 1:
        _keep(s)


@inner_kernel
def _adapt_weight(m, s):  # type: ignore[no-untyped-def]
    """Adapt the weight so that about half of the states fit; raise it faster as long as none does."""
    if s.counts[AREA] == 0:
        s.counts[FITTING] += 1
    s.counts[SEEN] += 1
    seen = s.counts[SEEN]
    if seen >= max(LEAST_WINDOW, min(WINDOW_MOVES * m.time.shape[0], MOST_WINDOW)):
        share = s.counts[FITTING] / seen
        s.levels[WEIGHT] *= 1.5 if share == 0.0 else 1.1 if share < 0.4 else 0.92 if share > 0.6 else 1.0
        s.counts[FITTING] = s.counts[SEEN] = 0


@inner_kernel
def _keep(s):  # type: ignore[no-untyped-def]
    for slot in range(s.run.shape[0]):
        s.kept_run[slot] = s.run[slot]
        s.kept_fixed[slot] = s.fixed[slot]
    s.counts[STALE] = 0
    s.counts[KEPT] += 1


@inner_kernel
def _copy_before(s, log):  # type: ignore[no-untyped-def]
    """Keep the sequence from before the logged move, which leaves the best state."""
    _keep(s)
    for place in range(log - 1, -1, -1):
        op, slot, kind = s.log[place, 0], s.log[place, 1], s.log[place, 2]
        s.kept_run[slot] = -1 if kind == INSERTED else op
        s.kept_fixed[slot] = kind == REMOVED_FIXED
