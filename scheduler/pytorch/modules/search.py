"""Search for the fastest choice of calls to recompute within a budget, and for the one with the smallest peak.

An integer program bounds the memory at some points of the step; the memory of its answer is
counted, the points that exceed the budget are added, and it is solved again, until an answer fits.
Each program is a relaxation, so its bound holds for every choice of calls. Its linear relaxation is
solved first, for a first bound and for answers that are rounded from it, which are often good
enough. A program over the blocks alone is small and soon solved, but bounds nothing. An answer that
does not fit is made to fit by a greedy search, which finds some at once without any program, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from scheduler.pytorch.modules.accounting import Accounts
from scheduler.pytorch.modules.points import Point, Points
from scheduler.pytorch.modules.program import Options, Program
from scheduler.pytorch.modules.regions import Kind, Layout, Regions, execute
from scheduler.pytorch.modules.tightening import Tightening
from scheduler.solvers.deadline import Deadline, clock

TOLERANCE = 1e-9
"""Relative error of bounds in bytes."""
_TIGHTENING_STEPS = 32
"""About how many choices are counted on the way to one that fits."""
_MOST_ROUNDED = 6
"""The most solutions of the relaxation that are rounded to show the points that matter."""
_BLOCKS_SECONDS = 0.25
"""The most for choosing among the blocks; more would hardly improve that choice."""
_BOUND_SECONDS = 0.25
"""The first bound gets at least as long, since nobody knows how good an answer is without one."""
_MOST_BY_HAND = 3
_MOST_RELAXED = 6
_FEWEST_BLOCKS = 16
"""Of the outermost calls, as many levels count as blocks as have this many together."""
_MOST_POINTS = 8
"""Points that are added between two solutions."""


@dataclass(frozen=True)
class Candidate:
    """A choice of calls, counted.

    Attributes
    ----------
    regions : Regions
    time : float
    peak_bytes : int
    memory : list of (int, Point)
        Bytes at every point, resident tensors included.
    """

    regions: Regions
    time: float
    peak_bytes: int
    memory: list[tuple[int, Point]]


@dataclass
class Found:
    """The state of a search.

    Attributes
    ----------
    best : Candidate or None
        The fastest that fits.
    smallest : Candidate
        The one with the smallest peak.
    bound : float
        Proven lower bound on the time, or on the peak in bytes.
    infeasible : bool
        Whether it is proven that none fits.
    programs : int
        Integer programs that were solved.
    """

    smallest: Candidate
    best: Candidate | None = None
    bound: float = 0.0
    infeasible: bool = False
    programs: int = 0


class Chooser:
    """Chooses calls of one step, for any number of budgets."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.options = Options.of(layout)
        self.points = Points(layout, self.options.times, self.options.savings)
        self._accounts = Accounts(layout)
        self.plain = self.candidate({})
        self._tight_points: list[Point] = []
        """The points that mattered to the smallest peak: they matter to budgets close to it as well."""

    def candidate(self, regions: Regions) -> Candidate:
        """Count the time and memory of a choice of calls."""
        execution = execute(self.layout, regions)
        time, amounts = self._accounts.count(execution)
        memory = []
        for (kind, position), root, amount in zip(execution.runs, execution.roots, amounts, strict=True):
            if kind in (Kind.BACKWARD, Kind.GRADIENTS):
                memory.append((amount, Point(kind, position)))
            elif kind not in (Kind.CHECKPOINT, Kind.KEEPING_CHECKPOINT):
                memory.append((amount, Point(Kind.SAVING, position, root)))
        return Candidate(regions, time, max(amounts), memory)

    def fastest(
        self,
        budget_bytes: int,
        *,
        gap: float,
        deadline: Deadline,
        patience: Deadline | None = None,
        starts: Iterable[Candidate] = (),
    ) -> Found:
        """Find the fastest choice that fits a budget; once there is one, the search ends at the deadline `patience`."""
        found = Found(self.plain, bound=self.plain.time)
        for candidate in (*self.by_hand, *starts):
            self._note(found, candidate, budget_bytes)
        blocks, limit = self._program(budget_bytes, self.options.only(self._blocks)), patience or deadline
        self._add(blocks, self.plain, budget_bytes)
        limit = limit.within(min(_BLOCKS_SECONDS, limit.remaining / 4))
        self._solve(found, blocks, budget_bytes, 0.0, limit, proves=False)
        program = self._program(budget_bytes)
        self._add(program, self.plain, budget_bytes)
        seconds = self._round(found, program, budget_bytes, gap, deadline, patience or deadline)
        self.greedy(budget_bytes, deadline, patience=patience, gap=gap, found=found)
        limit = patience if patience is not None and found.best is not None else deadline
        if found.best is None or limit.remaining > seconds:  # the program takes longer than its relaxation
            for point in self._tight_points:
                if point not in program.added:
                    program.add(point)
            self._solve(found, program, budget_bytes, gap, deadline, patience, proves=True)
        return found

    def _round(
        self, found: Found, program: Program, budget_bytes: int, gap: float, deadline: Deadline, patience: Deadline
    ) -> float:
        """Solve the relaxation, and make what it mostly recomputes fit; again with the points that this exceeded.

        Returns the seconds of the last relaxation. The first one is waited for longer than `patience`.
        """
        for _ in range(_MOST_ROUNDED):
            started = clock.now()
            added, rounded = program.relax(deadline.within(max(_BOUND_SECONDS, patience.remaining)))
            seconds = clock.now() - started
            found.bound = max(found.bound, self.plain.time + added)
            candidate = self.candidate(rounded)
            self._note(found, candidate, budget_bytes)
            if not self._is_done(found, gap):
                self._tighten(found, candidate, budget_bytes, patience)
            if self._is_done(found, gap) or patience.passed or not self._add(program, candidate, budget_bytes):
                break
        return seconds

    def _solve(
        self,
        found: Found,
        program: Program,
        budget_bytes: int,
        gap: float,
        deadline: Deadline,
        patience: Deadline | None = None,
        *,
        proves: bool,
    ) -> None:
        """Solve a program until an answer fits, with a bound if it is a relaxation of every choice (`proves`)."""
        while not self._is_done(found, gap):
            limit = patience if patience is not None and found.best is not None else deadline
            if limit.passed:
                break
            found.programs += 1
            result, regions = program.minimize(limit, absolute_gap=gap * self.plain.time)
            if proves:
                found.infeasible = result.infeasible
                if not result.infeasible:
                    found.bound = max(found.bound, self.plain.time + result.bound)
            if not result.found:
                break
            candidate = self.candidate(regions)
            self._note(found, candidate, budget_bytes)
            if proves:
                self._tighten(found, candidate, budget_bytes, limit)
            if self._add(program, candidate, budget_bytes):
                continue
            if candidate.peak_bytes <= budget_bytes:
                if candidate is found.best:
                    found.best = self._relaxed(candidate, budget_bytes, limit)
                break
            if not proves:
                break
            # It exceeds the budget by the tolerance of the solver: leave more than that.
            proves, program = False, program.within(2 * budget_bytes - candidate.peak_bytes)

    def greedy(
        self,
        budget_bytes: int,
        deadline: Deadline,
        *,
        patience: Deadline | None = None,
        gap: float = 0.0,
        found: Found | None = None,
    ) -> Found:
        """Find a fast choice that fits a budget, without a bound; add it to what was found before."""
        if found is None:
            found = Found(self.plain, bound=self.plain.time)
            for candidate in self.by_hand:
                self._note(found, candidate, budget_bytes)
        if not self._is_done(found, gap):
            limit = patience if patience is not None and found.best is not None else deadline
            self._tighten(found, self.plain, budget_bytes, limit)
        if found.best is not None and not self._is_done(found, gap):
            limit = patience or deadline
            limit = limit.within(limit.remaining / 4)
            found.best = self._relaxed(found.best, budget_bytes, limit)
        return found

    def tightened(self, budget_bytes: int, deadline: Deadline) -> Found:
        """Find any choice that fits a budget, or comes close to it: quicker than `greedy`, but slower steps."""
        found = Found(self.plain)
        for candidate in self.by_hand:
            self._note(found, candidate, budget_bytes)
        if found.best is None:
            self._tighten(found, found.smallest, budget_bytes, deadline, relaxes=False)
        return found

    def smallest(self, *, step: int, deadline: Deadline, starts: Iterable[Candidate] = ()) -> Found:
        """Find the choice with the smallest peak, to within `step` bytes."""
        found = Found(self.plain)
        for candidate in (*self.by_hand, *starts):
            self._note(found, candidate, 0)
        # With many calls, there is time to solve few programs, whose first answers do not help.
        self._tighten(found, found.smallest, 0, deadline.within(deadline.remaining / 3), relaxes=False)
        program = self._program(None)
        self._add(program, self.plain, 0)
        resident = self.layout.tree.resident_bytes
        while found.smallest.peak_bytes - found.bound >= step and not deadline.passed:
            found.programs += 1
            gap = step / 2 / max(1, program.limit_bytes)
            result, regions = program.minimize(deadline, absolute_gap=gap)
            if not result.found:
                break
            found.bound = max(found.bound, resident + result.bound * program.limit_bytes)
            candidate = self.candidate(regions)
            self._note(found, candidate, 0)
            reached = resident + math.floor(result.objective * program.limit_bytes * (1 + TOLERANCE))
            if not self._add(program, candidate, reached):
                break
        self._tight_points = [*program.added]
        return found

    def _tighten(
        self, found: Found, candidate: Candidate, budget_bytes: int, deadline: Deadline, *, relaxes: bool = True
    ) -> None:
        """Recompute more calls than a choice that exceeds a budget, until it fits, and note what is found."""
        tighter: Candidate | None = candidate
        seen: set[frozenset[tuple[int, bool]]] = set()
        while tighter is not None and tighter.peak_bytes > budget_bytes and not deadline.passed:
            if frozenset(tighter.regions.items()) in seen:  # what frees memory at one point needs it at another
                break
            seen.add(frozenset(tighter.regions.items()))
            tighter = self._tighter(tighter, budget_bytes)
            if tighter is not None:
                self._note(found, tighter, budget_bytes)
        if relaxes and tighter is not None and tighter is found.best:
            found.best = self._relaxed(tighter, budget_bytes, deadline)

    def _tighter(self, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        """Return a choice that needs less at the peak of another, about half-way to a budget; None if there is none."""
        amount, point = max(candidate.memory, key=itemgetter(0))
        tightening = Tightening(self.layout, self.options, self.points.memory(point), candidate.regions)
        excess = amount - budget_bytes
        at_once = min(excess, max(excess // 2, (self.plain.peak_bytes - budget_bytes) // _TIGHTENING_STEPS))
        return self.candidate(tightening.regions) if tightening.free(excess, at_once=at_once) else None

    def _relaxed(self, best: Candidate, budget_bytes: int, deadline: Deadline) -> Candidate:
        """Spend what is left of a budget, decision by decision."""
        is_better = True
        while is_better:
            is_better = False
            for regions in self._relaxations(best.regions, budget_bytes - best.peak_bytes):
                if deadline.passed:
                    return best
                candidate = self.candidate(regions)
                if candidate.peak_bytes <= budget_bytes and candidate.time < best.time:
                    best, is_better = candidate, True
                    break
        return best

    def _relaxations(self, regions: Regions, spare_bytes: int) -> list[Regions]:
        """Return choices that are faster by one decision and may need only the spare bytes, the fastest first.

        A call is recomputed no longer, or only a call in it is, or it keeps expensive results.
        """
        times, savings, saved_bytes = self.options.times, self.options.savings, self.options.saved_bytes
        found: list[tuple[float, Regions]] = []
        for c in (c for c, keeps in regions.items() if not keeps):
            others = {other: keeps for other, keeps in regions.items() if other != c}
            inside = [d for d in times if self.layout.is_inside(d, c)]
            is_nested = not others.keys().isdisjoint(self.layout.ancestors[c])  # then it matters only for a while
            if is_nested or saved_bytes[c] <= spare_bytes:
                found.append((times[c], others))
            elif others.keys().isdisjoint([*inside, *self.layout.ancestors[c]]):
                parts = [d for d in inside if saved_bytes[c] - saved_bytes[d] <= spare_bytes and times[d] < times[c]]
                found += [(times[c] - times[d], {**others, d: False}) for d in parts]
                if c in savings and self.options.kept_bytes[c] <= spare_bytes:
                    found.append((savings[c], {**others, c: True}))
        return [relaxed for _, relaxed in sorted(found, key=lambda entry: -entry[0])[:_MOST_RELAXED]]

    @cached_property
    def _equal_calls(self) -> list[list[int]]:
        """Calls that are equal and at one depth, such as all blocks: the sets that take longest."""
        equal: defaultdict[object, list[int]] = defaultdict(list)
        for c in self.options.times:
            call = self.layout.tree.calls[c]
            inside = tuple(segment.call - c for segment in self.layout.tree.segments[call.start : call.stop])
            depth = sum(not self.layout.tree.calls[outer].span for outer in self.layout.ancestors[c])
            if not call.span:
                equal[depth, inside].append(c)
        return sorted(equal.values(), key=lambda calls: -sum(self.options.times[c] for c in calls))[:_MOST_BY_HAND]

    @cached_property
    def by_hand(self) -> list[Candidate]:
        """Choices that people make by hand: to recompute equal calls at one depth, such as all blocks; and no call."""
        return [self.plain, *(self.candidate(dict.fromkeys(calls, False)) for calls in self._equal_calls)]

    @cached_property
    def _blocks(self) -> frozenset[int]:
        """The outermost calls that make others, to the depth at which there are several; not the model itself."""
        tree, depths = self.layout.tree, defaultdict(list)
        callers = {call.caller for call in tree.calls}
        for c in self.options.times:
            if c in callers and not tree.calls[c].span:
                depths[len(self.layout.ancestors[c])].append(c)
        found: list[int] = []
        for depth in sorted(depths.keys() - {0}):
            found += depths[depth]
            if len(found) >= _FEWEST_BLOCKS:
                break
        return frozenset(found)

    def _program(self, budget_bytes: int | None, options: Options | None = None) -> Program:
        resident, most = self.layout.tree.resident_bytes, self.plain.peak_bytes
        if options is None:
            return Program(self.points, self.options, resident, budget_bytes, most)
        return Program(Points(self.layout, options.times, options.savings), options, resident, budget_bytes, most)

    def _note(self, found: Found, candidate: Candidate, budget_bytes: int) -> None:
        if candidate.peak_bytes < found.smallest.peak_bytes:
            found.smallest = candidate
        if candidate.peak_bytes <= budget_bytes and (found.best is None or candidate.time < found.best.time):
            found.best = candidate

    def _is_done(self, found: Found, gap: float) -> bool:
        return found.best is not None and found.best.time - found.bound <= gap * found.best.time

    def _add(self, program: Program, candidate: Candidate, budget_bytes: int) -> bool:
        """Add points of a choice that exceed a budget; return whether there are new ones."""
        exceeding = sorted(((m, p) for m, p in candidate.memory if m > budget_bytes), key=lambda entry: -entry[0])
        chosen: list[Point] = []
        apart = max(1, self.layout.length // 16)
        for _, point in exceeding:
            if len(chosen) == _MOST_POINTS:
                break
            if point not in program.added and all(
                abs(point.segment - other.segment) >= apart or point.root != other.root or point.kind is not other.kind
                for other in chosen
            ):
                chosen.append(point)
        for point in chosen:
            program.add(point)
        return bool(chosen)
