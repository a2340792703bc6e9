"""The memory at each point of a step as a sum over what is held, for every choice of calls to recompute.

A point is one run of a forward segment in a pass, or one backward operation. What is held there
depends on the choice only through conditions such as "the block is not recomputed", so memory is
a constant plus bytes times conditions. It agrees with the simulator for every choice.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from scheduler.pytorch.modules.calls import OUTSIDE
from scheduler.pytorch.modules.regions import Group, Kind, Layout


class Literal(NamedTuple):
    """A decision: that a call is recomputed, or that it is and keeps expensive results."""

    call: int
    keeps: bool = False


class Condition(NamedTuple):
    """Holds if all decisions in `true` are made, and none in `false`."""

    true: frozenset[Literal]
    false: frozenset[Literal]


Holding = frozenset[Condition]
"""Holds if any of the conditions does."""

_NOTHING: frozenset[Literal] = frozenset()
_ALWAYS = Condition(_NOTHING, _NOTHING)


class Point(NamedTuple):
    """A run whose memory is counted.

    Attributes
    ----------
    kind : Kind
        SAVING for a forward run, however it runs; BACKWARD or GRADIENTS.
    segment : int
    root : int
        The pass of a forward run: the region that is recomputed, or `OUTSIDE`.
    """

    kind: Kind
    segment: int
    root: int = OUTSIDE


@dataclass(frozen=True)
class Memory:
    """The memory at a point, without the resident tensors.

    Attributes
    ----------
    constant : int
        Bytes that are held whatever is recomputed.
    held : dict of Holding to int
        Bytes that are held under a condition.
    region : int
        The point is reached only if this call is recomputed; `OUTSIDE` if it always is.
    """

    constant: int
    held: dict[Holding, int]
    region: int = OUTSIDE


class Points:
    """The memory at the points of a step.

    Parameters
    ----------
    layout : Layout
    candidates : iterable of int
        Calls that may be recomputed.
    keepers : iterable of int
        Those that may keep expensive results.
    """

    def __init__(self, layout: Layout, candidates: Iterable[int], keepers: Iterable[int]) -> None:
        self.layout, self.tree = layout, layout.tree
        self.candidates, self.keepers = frozenset(candidates), frozenset(keepers)
        self._simplified: dict[Holding, Holding] = {}
        self.holdings: dict[object, Holding] = {}
        """What earlier points found of groups, by all that it depends on."""
        self._memory: dict[Point, Memory] = {}
        self._parameter_gradients = [0]
        """Bytes of parameter gradients after the backward of the last k segments, per k."""
        for segment in reversed(self.tree.segments):
            self._parameter_gradients.append(self._parameter_gradients[-1] + segment.parameter_gradient_bytes)

    def memory(self, point: Point) -> Memory:
        """Return the memory at a point; it is counted once."""
        if point not in self._memory:
            self._memory[point] = self._count(point)
        return self._memory[point]

    def _count(self, point: Point) -> Memory:
        counter = _Counter(self, point)
        for g in range(len(self.layout.groups)):
            counter.add_group(g)
        counter.add_copies()
        counter.add_run()
        held = counter.simplified
        for conditions, size in counter.held.items():
            held[self.simplify(conditions)] += size
        constant = counter.constant + held.pop(frozenset([_ALWAYS]), 0)
        held.pop(frozenset(), None)
        return Memory(constant, {holding: size for holding, size in held.items() if size}, point.root)

    def gradients_before(self, segment: int) -> int:
        """Return the bytes of gradients when the backward of a segment begins, or once all have ended at 0."""
        length = self.layout.length
        activations = self.tree.segments[segment].gradient_bytes if segment < length else 0
        return activations + self._parameter_gradients[length - segment]

    @cached_property
    def group_calls(self) -> list[frozenset[int]]:
        """Per group: the candidates on which it may depend whether regions or segments hold it."""
        calls = self.tree.calls
        around = [frozenset((*self.layout.ancestors[c], c)) & self.candidates for c in range(len(calls))]
        return [
            frozenset().union(
                *(around[self.tree.segments[j].call] for j in group.savers if self.tree.segments[j].call != OUTSIDE),
                *(around[c] for c in group.calls),
            )
            for group in self.layout.groups
        ]

    @cached_property
    def group_starts(self) -> list[list[int]]:
        """Per group: where the calls begin that hold it if they are recomputed."""
        return [[self.tree.calls[c].start for c in group.calls] for group in self.layout.groups]

    def simplify(self, holding: Holding) -> Holding:
        """Return an equal holding with fewer and weaker conditions; each is simplified once."""
        if holding not in self._simplified:
            self._simplified[holding] = simplify(holding)
        return self._simplified[holding]


def simplify(holding: Holding) -> Holding:
    """Return an equal holding with fewer and weaker conditions.

    Two conditions that differ in one decision, which one demands and the other excludes, are the
    condition without it; and a condition that implies another is left out.
    """
    if len(holding) == 1:
        return holding
    conditions = set(holding)
    demanding: defaultdict[Literal, list[Condition]] = defaultdict(list)
    excluding: defaultdict[Literal, list[Condition]] = defaultdict(list)

    def note(condition: Condition) -> None:
        for literal in condition.true:
            demanding[literal].append(condition)
        for literal in condition.false:
            excluding[literal].append(condition)

    for condition in conditions:
        note(condition)
    pending = [condition for condition in conditions if condition.true]
    while pending:
        one = pending.pop()
        pairs = [(one, other) for literal in one.true for other in excluding[literal]]
        pairs += [(other, one) for literal in one.false for other in demanding[literal]]
        for first, second in pairs:
            if one not in conditions:
                break
            found = _resolve(first, second) if first in conditions and second in conditions else None
            if found is not None and not any(c.true <= found.true and c.false <= found.false for c in conditions):
                conditions = {c for c in conditions if not (c.true >= found.true and c.false >= found.false)} | {found}
                note(found)
                pending.append(found)
    return frozenset(
        c for c in conditions if not any(d != c and d.true <= c.true and d.false <= c.false for d in conditions)
    )


def _resolve(first: Condition, second: Condition) -> Condition | None:
    """Return the condition that holds if either does, whether a decision is made or not; None if there is none."""
    common = first.true & second.false
    if len(common) != 1:
        return None
    true, false = (first.true - common) | second.true, first.false | (second.false - common)
    return None if true & false else Condition(true, false)


class _Counter:
    """Adds up what is held at one point."""

    def __init__(self, points: Points, point: Point) -> None:
        self.points, self.layout, self.tree = points, points.layout, points.tree
        self.point, self.is_forward = point, point.kind is Kind.SAVING
        self.held: Counter[Holding] = Counter()
        self.simplified: Counter[Holding] = Counter()
        self.constant = 0
        root = point.root
        call = None if root == OUTSIDE else self.tree.calls[root]
        self.start, self.stop = (0, self.layout.length) if call is None else (call.start, call.stop)
        """The segments of the pass that runs, at a forward point."""
        self.last = point.segment - (point.kind is Kind.GRADIENTS)
        """The last segment for whose backward something is still held."""
        if self.is_forward:
            self.open = () if call is None else (*self.layout.ancestors[root], root)
        else:
            self.open = self.layout.around[point.segment]
        self.opened = points.candidates.intersection(self.open)
        self._find_conditions()

    def _find_conditions(self) -> None:
        """Find, per call, when its code has run with saving, and when it has begun as a region."""
        self.saving: list[Condition] = []
        self.entered: list[Condition] = []
        for c, call in enumerate(self.tree.calls):
            around = self.saving[call.caller].false if call.caller != OUTSIDE else _NOTHING
            is_cut = c in self.points.candidates and c not in self.open
            self.saving.append(Condition(_NOTHING, around | {Literal(c)} if is_cut else around))
            self.entered.append(Condition(frozenset([Literal(c)]), around))
        if self.point.root != OUTSIDE:
            self.entered[self.point.root] = _ALWAYS

    def add(self, conditions: Iterable[Condition], size: int) -> None:
        """Add bytes that are held if any of the conditions holds."""
        self.held[frozenset(conditions)] += size

    def add_group(self, g: int) -> None:
        """Add the copies of a group that are held before the run."""
        group = self.layout.groups[g]
        if self.is_forward and self.start <= group.born < self.stop:
            self._add_own(group)
            return
        is_held = group.dies >= self.layout.length
        if is_held:
            self.constant += group.size_bytes
            self.add(self._held_again(group), group.size_bytes)
        else:
            self.simplified[self._holding(g)] += group.size_bytes

    def _holding(self, g: int) -> Holding:
        """Return when a group is held that lives no longer than some segments and regions need it."""
        group, points = self.layout.groups[g], self.points
        savers = bisect.bisect_right(group.savers, self._last_saver(group))
        regions = bisect.bisect_right(points.group_starts[g], self.last)
        keepers = self._keepers(group)
        root = self.point.root if self.point.root in group.calls else OUTSIDE
        key = (g, savers, regions, len(keepers), points.group_calls[g] & self.opened, root)
        if key not in points.holdings:
            points.holdings[key] = points.simplify(frozenset((*self._holders(group), *keepers)))
        return points.holdings[key]

    def _last_saver(self, group: Group) -> int:
        """Return the last segment that holds a group because it has saved it."""
        # What the pass itself saves, its region holds anyway.
        return self.start - 1 if self.is_forward and group.born < self.start else self.last

    def _add_own(self, group: Group) -> None:
        """Add the copies of a group that is allocated in the pass that runs."""
        i, root, size = self.point.segment, self.point.root, group.size_bytes
        kept = frozenset([Literal(root, True)]) if group.is_expensive and root in self.points.keepers else _NOTHING
        is_held = group.dies >= self.layout.length
        if is_held and root != OUTSIDE:  # the copy of the first forward; this pass makes another, unless it is kept
            self.constant += size
            if group.born < i:
                self.add([Condition(_NOTHING, kept)], size)
            return
        if group.born < i:
            self.add(([_ALWAYS] if group.dies >= i else self._holders(group)) + self._keepers(group), size)
        elif kept:
            self.add([Condition(kept, _NOTHING)], size)

    def _holders(self, group: Group, within: int = OUTSIDE) -> list[Condition]:
        """Return when segments that saved a group, or regions that it was passed to, in a call, hold it."""
        first = 0 if within == OUTSIDE else self.tree.calls[within].start
        last = self._last_saver(group)
        regions = (c for c in group.calls if c in self.points.candidates and self.layout.is_inside(c, within))
        return [
            *(self._saving(j) for j in group.savers if first <= j <= last),
            *(self.entered[c] for c in regions if self.tree.calls[c].start <= self.last),
        ]

    def _saving(self, segment: int) -> Condition:
        call = self.tree.segments[segment].call
        return self.saving[call] if call != OUTSIDE else _ALWAYS

    def _keepers(self, group: Group) -> list[Condition]:
        """Return when regions that keep expensive results, and have not been recomputed yet, hold a group."""
        if not group.is_expensive:
            return []
        calls = [c for c in self.layout.around[group.born] if c in self.points.keepers]
        if not self.is_forward or self.point.root != OUTSIDE:
            waiting = self.start if self.is_forward else self.point.segment
            calls = [c for c in calls if self.tree.calls[c].stop <= waiting]
        return [Condition(frozenset([Literal(c, True)]), _NOTHING) for c in calls]

    def _held_again(self, group: Group) -> list[Condition]:
        """Return when a recomputation holds a second copy of what is held to the end."""
        conditions = []
        for c in self.open:
            call = self.tree.calls[c]
            if c in self.points.candidates and c != self.point.root and call.start <= group.born < call.stop:
                kept = frozenset([Literal(c, True)]) if group.is_expensive and c in self.points.keepers else _NOTHING
                for true, false in self._holders(group, c):
                    conditions.append(Condition(true | {Literal(c)}, false | kept))
        return conditions

    def add_copies(self) -> None:
        """Add the buffers and random states that regions copied in their first run."""
        root = self.point.root
        last = self.stop - 1 if self.is_forward and root != OUTSIDE else self.last
        for c, call in enumerate(self.tree.calls):
            if call.copied_bytes and c in self.points.candidates and call.start <= last:
                condition = _ALWAYS if c == root else Condition(frozenset([Literal(c)]), _NOTHING)
                self.add([condition], call.copied_bytes)

    def add_run(self) -> None:
        """Add what the run itself needs, and the gradients that are live."""
        i = self.point.segment
        if not self.is_forward:
            after = i if self.point.kind is Kind.GRADIENTS else i + 1
            self.constant += self.points.gradients_before(after)
            if self.point.kind is Kind.BACKWARD:
                self.constant += self.tree.segments[i].backward_peak_bytes
            return
        if self.point.root != OUTSIDE:
            self.constant += self.points.gradients_before(self.stop)
        peaks = self.layout.peaks[i]
        self.constant += peaks.without_saving
        self.add([self._saving(i)], peaks.saving - peaks.without_saving)
        if not self.layout.is_expensive[i]:
            return
        if self.point.root in self.points.keepers:
            keeps = Literal(self.point.root, True)
            self.constant -= peaks.saving - peaks.from_kept
            self.add([Condition(_NOTHING, frozenset([keeps]))], peaks.saving - peaks.from_kept)
        if self.point.root == OUTSIDE:
            keepers = [
                Condition(frozenset([Literal(c, True)]), _NOTHING)
                for c in self.layout.around[i]
                if c in self.points.keepers
            ]
            self.add(keepers, peaks.keeping - peaks.without_saving)
