"""The integer program of which calls to recompute: fastest within a budget, or with the smallest peak.

Rows bound the memory at single points, and are added only for points that exceed the budget.
Each row is exact, so a program with some of the rows is a relaxation: its bounds hold for every
choice of calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from scheduler.pytorch.modules.calls import OUTSIDE
from scheduler.pytorch.modules.points import Holding, Literal, Point, Points
from scheduler.pytorch.modules.regions import Layout, Regions
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.integer_program import IntegerProgram, MilpResult, Variable, is_set

_COMMON_SIZE = 1000.0

_Term = tuple[int, Variable, int]
"""The part of the step in which something is held, the variable for it, and 1, or -1 if the variable excludes it."""


@dataclass
class _Sum:
    """A constant, and bytes times variables."""

    constant: int = 0
    coefficients: dict[Variable, int] = field(default_factory=dict)

    def add(self, variable: Variable, size: int) -> None:
        """Add bytes times a variable."""
        self.coefficients[variable] = self.coefficients.get(variable, 0) + size

    @property
    def most(self) -> int:
        """The largest value that it can have."""
        return self.constant + sum(size for size in self.coefficients.values() if size > 0)

    def terms(self, unit: float) -> list[tuple[Variable, float]]:
        """Return the variables with their coefficients, in a unit of bytes."""
        return [(variable, size / unit) for variable, size in self.coefficients.items() if size]


@dataclass(frozen=True)
class Options:
    """The calls that it may pay to recompute.

    Attributes
    ----------
    times : dict of int to float
        Per call that may be recomputed: the time that it adds.
    savings : dict of int to float
        Per call that may keep expensive results: the time that it then saves.
    saved_bytes, kept_bytes : dict of int to int
        Per call: about what it holds more if it is not recomputed, or if it keeps expensive results.
    """

    times: dict[int, float]
    savings: dict[int, float]
    saved_bytes: dict[int, int]
    kept_bytes: dict[int, int]

    @classmethod
    def of(cls, layout: Layout) -> Options:
        """Return the calls whose recomputation frees something that their arguments do not hold."""
        tree = layout.tree
        times: dict[int, float] = {}
        savings: dict[int, float] = {}
        saved_bytes, kept_bytes = {}, {}
        for c, call in reversed([*enumerate(tree.calls)]):  # a call comes after those in it
            segments = range(call.start, call.stop)
            if call.refusal or not any(_frees(layout, c, i) for i in segments) or _never_pays(layout, c, times):
                continue
            times[c] = sum(tree.segments[i].forward_time for i in segments)
            expensive = [tree.segments[i] for i in segments if layout.is_expensive[i]]
            groups = {g for i in segments for g in layout.saved[i]} - set(layout.held[c])
            inputs = sum(layout.groups[g].size_bytes for g in layout.held[c])
            saved_bytes[c] = sum(layout.groups[g].size_bytes for g in groups) - inputs
            if expensive:
                savings[c] = sum(min(segment.expensive_time, segment.forward_time) for segment in expensive)
                born = [layout.groups[g] for i in segments for g in layout.born[i]]
                kept_bytes[c] = sum(group.size_bytes for group in born if group.is_expensive)
        return cls(times, savings, saved_bytes, kept_bytes)

    def only(self, calls: Collection[int]) -> Options:
        """Return the options of some calls."""
        return replace(
            self,
            times={c: time for c, time in self.times.items() if c in calls},
            savings={c: time for c, time in self.savings.items() if c in calls},
        )


def _frees(layout: Layout, call: int, segment: int) -> bool:
    """Return whether a segment saves what the arguments of a call do not hold, or needs more memory to save it."""
    peaks = layout.peaks[segment]
    return peaks.saving > peaks.without_saving or any(call not in layout.groups[g].calls for g in layout.saved[segment])


def _never_pays(layout: Layout, c: int, options: Iterable[int]) -> bool:
    """Return whether recomputing a call needs as much memory at every point, whatever else is recomputed.

    It is so for a call of one segment, such as a dropout, if what nobody but the call would hold for
    it is at least as large as what is freed: arguments that die in it, and that nothing saves.
    """
    call, groups = layout.tree.calls[c], layout.groups
    i = call.start
    if call.stop - i != 1 or any(layout.is_inside(option, c) for option in options):
        return False
    if layout.peaks[i].saving > layout.peaks[i].without_saving or layout.is_expensive[i]:
        return False
    own = (groups[g] for g in layout.held[c] if groups[g].dies == i and not groups[g].savers)
    held = sum(group.size_bytes for group in own if group.calls == (c,))
    return held >= sum(groups[g].size_bytes for g in layout.saved[i] if c not in groups[g].calls)


class Program:
    """Minimize the time that is added within a budget, or the peak if there is none.

    Parameters
    ----------
    points : Points
        Of the calls in `options`; programs for several budgets share it.
    options : Options
    resident_bytes : int
    budget_bytes : int or None
        None to minimize the peak.
    most_bytes : int
        A peak that can be reached, such as that of saving everything.
    """

    def __init__(
        self,
        points: Points,
        options: Options,
        resident_bytes: int,
        budget_bytes: int | None,
        most_bytes: int,
    ) -> None:
        layout, self.points, self.options = points.layout, points, options
        self.resident_bytes, self.most_bytes = resident_bytes, most_bytes
        self.added: dict[Point, None] = {}
        self.program = IntegerProgram("modules")
        # Solvers have absolute tolerances: bytes and seconds are scaled to numbers of a common size.
        self.unit = max(1.0, most_bytes / _COMMON_SIZE)
        self.time_unit = sum(options.times.values()) / _COMMON_SIZE or 1.0
        self.peak = None if budget_bytes is not None else self.program.fraction("peak", 1.0)
        self.limit_bytes = most_bytes - resident_bytes if budget_bytes is None else budget_bytes - resident_bytes
        costs = 0.0 if self.peak is not None else 1 / self.time_unit
        self.variables: dict[Literal, Variable] = {}
        for c, time in options.times.items():
            self.variables[Literal(c)] = self.program.binary(f"recompute_{c}", costs * time)
        for c, time in options.savings.items():
            self.variables[Literal(c, True)] = self.program.binary(f"keep_{c}", -costs * time)
        self.terms: dict[Holding, _Term] = {}
        self.subtotals: dict[object, Variable] = {}
        self.parts = _parts(layout)
        self.rivals = _rivals(layout, options)
        self._add_rules(layout)

    def _add_rules(self, layout: Layout) -> None:
        """A region that keeps expensive results is recomputed, and no other region is around or inside it."""
        chains = {
            tuple(a for a in (*layout.ancestors[c], c) if Literal(a) in self.variables) for c, _ in self.variables
        }
        added: set[tuple[int, tuple[int, ...]]] = set()
        for chain in chains:
            for c in chain:
                keepers = tuple(a for a in chain if a != c and Literal(a, True) in self.variables)
                if keepers and (c, keepers) not in added:
                    added.add((c, keepers))
                    terms = [(self.variables[Literal(a, True)], 1.0) for a in keepers]
                    self.program.at_most("keep_alone", [(self.variables[Literal(c)], 1.0), *terms], 1.0)
        for (c, keeps), variable in self.variables.items():
            if keeps:
                self.program.at_most("keep_recomputes", [(variable, 1.0), (self.variables[Literal(c)], -1.0)], 0.0)

    def within(self, budget_bytes: int) -> Program:
        """Return a program for another budget, with the points that were added to this one."""
        program = Program(self.points, self.options, self.resident_bytes, budget_bytes, self.most_bytes)
        for point in self.added:
            program.add(point)
        return program

    def add(self, point: Point) -> None:
        """Bound the memory at a point."""
        self.added[point] = None
        memory = self.points.memory(point)
        parts: defaultdict[int, _Sum] = defaultdict(_Sum)
        parts[OUTSIDE].constant = memory.constant
        for holding, size in memory.held.items():
            if holding not in self.terms:
                self.terms[holding] = self._term(holding)
            number, variable, sign = self.terms[holding]
            part = parts[number]
            part.add(variable, sign * size)
            part.constant += size if sign < 0 else 0
        row = parts.pop(OUTSIDE)
        for part in parts.values():
            row.add(self._subtotal(part), part.most)
        if memory.region != OUTSIDE:  # bound only if the region is recomputed
            slack = max(0, row.most - (0 if self.peak is not None else self.limit_bytes))
            row.add(self.variables[Literal(memory.region)], slack)
            row.constant -= slack
        if self.peak is not None:
            row.add(self.peak, -self.limit_bytes)
        most = (0 if self.peak is not None else self.limit_bytes) - row.constant
        self.program.at_most("memory", row.terms(self.unit), most / self.unit)

    def _term(self, holding: Holding) -> _Term:
        literal, sign = _single(holding)
        variable = self._holding(holding) if literal is None else self.variables[literal]
        return self._part(holding), variable, 1 if literal is None else sign

    def _part(self, holding: Holding) -> int:
        """Return the part of the step in which all calls are made that a holding depends on; `OUTSIDE` if none."""
        parts = {self.parts[c] for true, false in holding for c, _ in true | false} - {OUTSIDE}
        return parts.pop() if len(parts) == 1 else OUTSIDE

    def _subtotal(self, part: _Sum) -> Variable:
        """Return a variable for the bytes that one part of the step holds, as a share of the most; rows share it."""
        key = (part.constant, frozenset(part.coefficients.items()))
        if key not in self.subtotals:
            self.subtotals[key] = total = self.program.fraction("held_by_part")
            terms = [(total, part.most / self.unit), *((v, -size) for v, size in part.terms(self.unit))]
            self.program.at_least("held_by_part", terms, part.constant / self.unit)
        return self.subtotals[key]

    def _holding(self, holding: Holding) -> Variable:
        """Return a variable that is at least 1 if something is held.

        If a call keeps results, no call around or inside it is recomputed. So a condition fails then
        that demands one of these, or that the call is not recomputed: what is held is at least the
        sum of this condition and of the calls that hold it because they keep results.
        """
        held = self.program.fraction("held")
        keepers = {c for true, false in holding if len(true) == 1 and not false for c, keeps in true if keeps}
        rows: dict[frozenset[tuple[Literal, int]], int] = {}
        for true, false in holding:
            weights = Counter(true)
            weights.subtract(false)
            rivals = {keeper for c, _ in true for keeper in self.rivals[c]}
            excluded = {c for c, keeps in false if not keeps}
            for c in (*(keepers & (rivals | excluded)), *(rivals & excluded)):  # the latter fail by `true` alone
                weights[Literal(c, True)] += 1
            rows[frozenset(weights.items())] = 1 - len(true)
        for row, least in rows.items():
            terms = [(self.variables[literal], -float(weight)) for literal, weight in row if weight]
            self.program.at_least("held", [(held, 1.0), *terms], float(least))
        return held

    def relax(self, deadline: Deadline) -> tuple[float, Regions]:
        """Let calls be recomputed in part; return the least time that is then added, and the calls that mostly are.

        That is 0 and no calls if nothing is found in time.
        """
        found = self.program.relax(deadline, "memory") if self.added else None
        return (0.0, {}) if found is None else (max(0.0, found.objective) * self.time_unit, self._regions())

    def minimize(self, deadline: Deadline, *, absolute_gap: float) -> tuple[MilpResult, Regions]:
        """Solve the program with the points added so far; return the result, and the calls to recompute.

        Bound, objective and gap are in the unit of time, or shares of the most bytes for the peak.
        """
        unit = self.time_unit if self.peak is None else 1.0
        solved = self.program.minimize(deadline, absolute_gap=absolute_gap / unit)
        result = replace(solved, bound=solved.bound * unit, objective=solved.objective * unit)
        return result, self._regions() if result.found else {}

    def _regions(self) -> Regions:
        """Return the calls that are recomputed in the solution, and whether they keep expensive results."""
        # That a call keeps results comes after that it is recomputed, and replaces it.
        return {call: keeps for (call, keeps), variable in self.variables.items() if is_set(variable)}


def _parts(layout: Layout) -> list[int]:
    """Return, per call, the one around it among the calls that the busiest call makes; `OUTSIDE` if there is none."""
    calls = layout.tree.calls
    callers: list[int] = []
    """Per call, the one that makes it; a span makes no calls itself."""
    for call in calls:
        is_in_span = call.caller != OUTSIDE and calls[call.caller].span
        callers.append(callers[call.caller] if is_in_span else call.caller)
    counts = Counter(caller for caller, call in zip(callers, calls, strict=True) if not call.span)
    busiest = counts.most_common(1)[0][0] if counts else OUTSIDE
    parts: list[int] = []
    for c, call in enumerate(calls):
        is_part = callers[c] == busiest and not call.span
        parts.append(c if is_part else OUTSIDE if call.caller == OUTSIDE else parts[call.caller])
    return parts


def _rivals(layout: Layout, options: Options) -> list[set[int]]:
    """Return, per call, those around or inside it that may keep expensive results."""
    rivals = [options.savings.keys() & ancestors for ancestors in map(set, layout.ancestors)]
    for c in options.savings:
        for outer in layout.ancestors[c]:
            rivals[outer].add(c)
    return rivals


def _single(holding: Holding) -> tuple[Literal | None, int]:
    """Return the only decision that something depends on, and 1 or -1 for made or not made."""
    if len(holding) == 1:
        ((true, false),) = holding
        if len(true) + len(false) == 1:
            return (next(iter(true)), 1) if true else (next(iter(false)), -1)
    return None, 0
