"""Recompute more calls, one after the other, until the memory at a point fits a budget.

Each time, the call is taken that frees most bytes there for the time that it adds; a call whose
arguments need more than it frees is recomputed no longer. It is a greedy search: quick, without
a bound, and close to the best choice where few points matter.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from scheduler.pytorch.modules.points import Holding, Literal, Memory
from scheduler.pytorch.modules.program import Options
from scheduler.pytorch.modules.regions import Layout, Regions

_LEAST_SECONDS = 1e-9


class Tightening:
    """Change a choice until one point fits.

    Parameters
    ----------
    layout : Layout
    options : Options
    memory : Memory
        At the point.
    regions : Regions
        The choice at the start.

    Attributes
    ----------
    regions : dict of int to bool
        The choice.
    """

    def __init__(self, layout: Layout, options: Options, memory: Memory, regions: Regions) -> None:
        self.regions = dict(regions)
        self._layout, self._options = layout, options
        self._sizes = memory.held
        self._mentions: defaultdict[int, list[Holding]] = defaultdict(list)
        """Per call: what may depend on whether it is recomputed."""
        for holding in memory.held:
            for call in _calls(holding):
                self._mentions[call].append(holding)
        self._made = {literal for c, keeps in regions.items() for literal in _literals(c, keeps)}
        self._is_held = {holding: _holds(holding, self._made) for holding in memory.held}

    def free(self, needed_bytes: int, *, at_once: int) -> bool:
        """Free some of the bytes that are needed, at least `at_once` if possible; return whether any were."""
        enough = needed_bytes - at_once
        heap: list[tuple[float, int, bool]] = []
        for c in [*self._mentions]:
            self._push(heap, c, needed_bytes)
        is_changed = False
        while heap and needed_bytes > enough:
            score, c, keeps = heapq.heappop(heap)
            again = self._score(c, keeps, needed_bytes)
            if again != score:
                if again < 0:
                    heapq.heappush(heap, (again, c, keeps))
                continue
            is_changed = True
            needed_bytes -= self._make(c, keeps)
            held = (holding for holding in self._mentions[c] if self._is_held[holding])
            for other in {other for holding in held for other in _calls(holding)}:  # others are scored when popped
                self._push(heap, other, needed_bytes)
        return is_changed

    def _push(self, heap: list[tuple[float, int, bool]], c: int, needed_bytes: int) -> None:
        for keeps in (False, True):
            score = self._score(c, keeps, needed_bytes)
            if score < 0:
                heapq.heappush(heap, (score, c, keeps))

    def _score(self, c: int, keeps: bool, needed_bytes: int) -> float:
        """Return minus the bytes that recomputing a call, or not doing so, frees of those needed, per second.

        It is 0 if the call may not be recomputed.
        """
        options, ancestors = self._options, self._layout.ancestors
        if c in self.regions:
            return -max(0, self._freed(c, keeps)) / _LEAST_SECONDS if keeps is self.regions[c] else 0.0
        if c not in options.times or (keeps and c not in options.savings):
            return 0.0
        around = [self.regions[a] for a in ancestors[c] if a in self.regions]
        inside = [other_keeps for d, other_keeps in self.regions.items() if c in ancestors[d]]
        if any(around) or any(inside) or (keeps and (around or inside)):
            return 0.0
        seconds = options.times[c] - (options.savings[c] if keeps else 0.0)
        return -min(self._freed(c, keeps), needed_bytes) / max(seconds, _LEAST_SECONDS)

    def _changed(self, c: int, keeps: bool) -> set[Literal]:
        """Return what is decided if a call is recomputed, or no longer if it was."""
        return self._made.symmetric_difference(_literals(c, keeps))

    def _freed(self, c: int, keeps: bool) -> int:
        """Return the bytes that are not held any more if a call is recomputed, or no longer if it was."""
        made = self._changed(c, keeps)
        return sum(self._sizes[h] * (self._is_held[h] - _holds(h, made)) for h in self._mentions[c])

    def _make(self, c: int, keeps: bool) -> int:
        """Recompute a call, or no longer if it was, and return the bytes that this frees."""
        freed = self._freed(c, keeps)
        self._made = self._changed(c, keeps)
        if self.regions.pop(c, None) is None:
            self.regions[c] = keeps
        for holding in self._mentions[c]:
            self._is_held[holding] = _holds(holding, self._made)
        return freed


def _literals(c: int, keeps: bool) -> tuple[Literal, ...]:
    return (Literal(c), Literal(c, True)) if keeps else (Literal(c),)


def _calls(holding: Holding) -> set[int]:
    return {call for true, false in holding for call, _ in true | false}


def _holds(holding: Holding, made: set[Literal]) -> bool:
    return any(true <= made and false.isdisjoint(made) for true, false in holding)
