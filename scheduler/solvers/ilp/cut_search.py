"""Choose the cuts of integer programs: where points exceed the budget, and where linear relaxations price memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.ilp.candidates import Candidates
from scheduler.solvers.ilp.decoding import decode, first_run_order
from scheduler.solvers.ilp.path_rows import CLOSE_PART, relax, tighten
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutAnswer, CutRelaxation, PathRow
from scheduler.solvers.walk import substitutes

MOST_CUTS = 24
"""Largest number of cuts of one program."""
MOST_MOMENTS, MOST_WORK, FEWEST_MOMENTS = 24, 450_000, 2
"""Largest and smallest number of cuts of a linear relaxation; between them, the second over tasks to the power 1.5."""
REFINED_SHARE, LEAST_REFINED = 0.7, 0.005
"""Share of the remaining time for relaxations, and by which part of what the last one adds to the time of the plain
step the next one must raise that."""
MOST_REFINED, SMALL_TASKS = 12, 300
"""Largest number of moments of all but the first, and below how many tasks it is `FEW_CUTS`: programs with these are
solved in smaller steps, and bound better than relaxations with more."""
ROUGH_PART = 0.5
"""In smaller steps, the first relaxation has rows over paths, until these raise it by less than this part."""
PRICED_WINDOWS = 32
"""Moments with a price are near each other if fewer than the number of tasks over this many lie between them."""
LEAST_PRICE = 3e-3
"""A cut whose memory has less than this share of all prices is left out."""
FEW_CUTS = 6
"""Up to so many cuts, moments where points exceed the budget are added one by one: each moves the next point's."""
FIRST_PRICED = 3
"""Number of cuts of the first program that is chosen by prices."""
AFFORDED_SHARE, RELAXED_GROWTH, FAR_GROWTH, NEAR_SIZE = 0.5, 2, 3, 3.0
"""A further relaxation has only so many moments that it should take `AFFORDED_SHARE` of the time: that of the last one,
times the ratio of their sizes to the power `RELAXED_GROWTH`; to `FAR_GROWTH`, if the ratio is over `NEAR_SIZE`."""
UNORDERED_SIZE = 4
"""A task without precedence to a moment has about so many times the rows of one that precedes it."""
SHORT_SHARE, GROWTH = 0.1, 3
"""After a program that took at most this share of the remaining time, the next one has two cuts more, and one more
for each so many; otherwise it has one more."""
LEAST_WHOLE, MOST_WHOLE, WHOLE_WORK = 50, 100, 30_000
"""`most_whole` of programs with more than one cut that do not count: between these two, about the last one over the
number of tasks."""
COUNTED_CUTS, FIRST_COUNTED, MOST_COUNTED = 8, 4, 16
"""Programs that count have at most so many cuts. The first one counts so many operations, and each further one up to
twice as many as the last, until they are so many."""
MOST_TASKS_COUNTED_WHOLE = 1_000
"""In steps of at most so many tasks, programs that count also keep large tensors or not at the cut with the highest
price: in larger ones, they then take too long."""
LEAST_RELAXED = 0.96
"""A program is solved if its relaxation adds at least this share of what that of the priced moments adds to the time
of the plain step; otherwise it gets more cuts."""
KEPT_PARTS = (0.3, 0.7)
"""Parts of a tensor; for each of them, a schedule keeps the tensors of which a relaxation's point keeps more."""
LEAST_GAIN = 1e-6
"""A program that raises the bound by this share has paid."""


@dataclass(frozen=True)
class _Relaxation:
    """A program that was relaxed.

    Attributes
    ----------
    program : CutRelaxation
    added : float
        Seconds by which its bound exceeds the time of the plain step; -inf without a solution.
    prices : dict of int to float
        Those of its cuts that have one.
    seconds : float
        How long it took.
    """

    program: CutRelaxation
    added: float
    prices: dict[int, float]
    seconds: float

    @property
    def is_solved(self) -> bool:
        """Whether it has a bound."""
        return self.added > -math.inf


class CutSearch:
    """A lower bound on the time of every schedule of an order, raised by programs with more and more cuts.

    Memory matters at some moments of good schedules and not at others. The next program has the
    cuts of the best one so far and those moments where the schedule of its point exceeds the
    budget; or those with the highest prices in a linear relaxation with cuts at many moments at
    once: `Candidates.first`, and where points have exceeded the budget. The two ways take turns as
    long as both raise the bound. Where the order is free, the point of the relaxation may escape a
    cut by running another branch of the step first: the moment at which either branch comes first
    replaces it. Programs that take too long decide at fewer of their cuts what is kept: at the
    others, in part.

    Parameters
    ----------
    problem : Problem
    precedence : Precedence
    reduction : Reduction

    Attributes
    ----------
    bound : float
    cuts : list of int
        Those of the last program, each before the next.
    live : tuple of frozenset of int
        Tensors that are live at these in the program's point; none if it has no point.
    is_exhausted : bool
        Whether nothing is left to try.
    relaxed : float
        The best bound of a linear relaxation.
    is_relaxed : bool
        Whether relaxations have no further moments that raise it.
    may_count : bool
        Whether programs that count (further) operations are likely to be solved, and to raise the bound: in large
        steps, where others are not.
    """

    def __init__(self, problem: Problem, precedence: Precedence, reduction: Reduction) -> None:
        self.problem, self.precedence, self.reduction = problem, precedence, reduction
        self.candidates = Candidates(problem, precedence, reduction)
        self._substitutes = substitutes(problem.graph)
        self.bound = 0.0
        self.cuts: list[int] = []
        self.live: tuple[frozenset[int], ...] = ()
        self.is_exhausted = self.is_relaxed = False
        self._best: list[int] = []
        self._exceeded: list[int] = []
        """Where the point with the best cuts exceeds the budget."""
        self._step, self._most = FIRST_PRICED, MOST_CUTS
        self._moments: list[int] = []
        self._last: _Relaxation | None = None
        """That by whose prices programs go."""
        self._lacks_time = False
        """Whether, with more time, the next relaxation would have further moments."""
        self._has_new = False
        """Whether points have exceeded the budget at further moments since all were relaxed at once."""
        self._tried: set[tuple[int, ...]] = set()
        self.relaxed = problem.least_time
        self._paths: dict[PathRow, None] = {}
        """Rows of earlier programs."""
        self._whole = MOST_CUTS
        """At so many cuts of the next program, tensors are kept or not; at the others, also in part."""
        self._goes_by_price = precedence.reorder
        self._counted: list[int] = []
        self.may_count = not self.is_small

    def raise_bound(self, deadline: Deadline, slack: float = 0.0) -> Schedule | None:
        """Solve a program with further cuts; return the schedule of its point, if it has one."""
        began, known = clock.now(), self.bound
        program = self._next_program(deadline)
        if program is None:
            return None
        answer = program.solve(deadline, slack)
        self.bound = max(self.bound, answer.bound)
        chain = self.cuts = program.cuts
        self.live = answer.live or ()
        is_short = clock.now() - began <= SHORT_SHARE * deadline.remaining
        self._choose_whole(len(chain), answer, is_short=is_short)
        self._step = 2 + len(chain) // GROWTH if is_short else 1
        has_paid = self.bound > known * (1 + LEAST_GAIN) or not self._best
        if has_paid or not self._goes_by_price:
            self._goes_by_price = not self._goes_by_price
        if answer.live is None:
            return None
        schedule = self._decode(program, answer.live, answer.has_run)
        exceeded = [moment for moment in self.candidates.exceeded(schedule) if moment not in chain]
        if has_paid:
            self._best, self._exceeded = chain, exceeded
        moments = set(self._moments)
        self._add(exceeded)
        if not moments.issuperset(self._moments):
            self.is_relaxed, self._has_new = False, True
        return schedule

    def count(self, deadline: Deadline, slack: float = 0.0, enough: float = math.inf) -> Schedule | None:
        """Raise the bound, until it exceeds `enough`, by programs that count how often some operations run again.

        They have the cuts with the highest prices, and at the first of these, large tensors are kept or not. Each
        counts further operations: those of which the last point repeats a part, the costliest parts first. Return the
        schedule of the last point, if there is one.
        """
        assert self._last is not None
        priced = self._priced()[:COUNTED_CUTS]
        cuts = self.precedence.chain(priced)
        whole = priced[:1] if self.precedence.tasks <= MOST_TASKS_COUNTED_WHOLE else []
        program, schedule = self._last.program, None
        self.may_count = self.may_count and bool(cuts)
        while self.may_count and self.bound <= enough and not deadline.passed:
            found = [i for i in program.counted_in_part() if i not in self._counted]
            if not found:
                self.may_count = False
                break
            self._counted += found[: max(FIRST_COUNTED, len(self._counted))]
            program = self._program(cuts, deadline, whole, self._counted)
            answer = program.solve(deadline, slack)
            self.bound = max(self.bound, answer.bound)
            self.may_count = answer.exact and len(self._counted) < MOST_COUNTED
            if answer.live is not None:
                schedule = self._decode(program, program.live(0.5), answer.has_run)
        return schedule

    def relax(self, deadline: Deadline) -> CutRelaxation | None:
        """Raise the bound by linear relaxations, and return the last one that did, if any was solved.

        The next programs go by its prices.
        """
        limit = deadline.within(REFINED_SHARE * deadline.remaining)
        self.is_relaxed = self.is_relaxed and not self._lacks_time
        while not (self.is_relaxed or limit.passed):
            self.refine(limit)
        return self._last.program if self._last else None

    def refine(self, deadline: Deadline, most_first: int = MOST_REFINED) -> None:
        """Raise the bound by a first linear relaxation with at most so many moments, or by one with other moments."""
        if self._last is None:
            self._add((*self._best, *self._exceeded, *self.candidates.first()))
        if self._last is None or (self.is_small and self._has_new):
            self._has_new = False
            rough = self._relax(self._moments, deadline, ROUGH_PART if self.is_small else 1.0)
            few = self.precedence.chain(_dearest_first(rough.prices)[:most_first])
            closer = self._relax(few, deadline) if few else rough
            found = closer if closer.is_solved else rough
            if found.is_solved:
                self._go_by(found)
            self.is_relaxed = not (found.is_solved or deadline.passed)
            return
        last, tried = self._last, list[int]()
        has_few = self._most_refined <= FEW_CUTS
        # In a small step, which always has few, the time is better spent on integer programs than on a second attempt.
        for joins in [True] if self.is_small else [True, False] if has_few else [False]:
            cuts = self._refined_cuts(last, deadline, joins=joins)
            found = self._relax(cuts, deadline) if cuts and cuts != tried else last
            if found.added > (1 + LEAST_REFINED) * last.added:
                self._go_by(found)
                return
            tried = cuts
        self.is_relaxed = not deadline.passed

    def relax_at(self, moments: Iterable[int], deadline: Deadline) -> CutRelaxation:
        """Raise the bound by a relaxation with these moments, and return it.

        Of moments without precedence, the earlier ones are taken. If no relaxation has bounded better, those with a
        price are among the moments of the next one.
        """
        known = self.relaxed
        found = self._relax(self.precedence.chain(list(moments)), deadline)
        if self.relaxed > known:
            self._go_by(found)
        return found.program

    def points(self, program: CutRelaxation) -> list[Schedule]:
        """Return schedules that keep what the point of a relaxation keeps more of than some part."""
        return [self._decode(program, program.live(part), program.have_run()) for part in KEPT_PARTS]

    @property
    def is_small(self) -> bool:
        """Whether programs with the moments of few relaxations are solved, and bound better than further ones."""
        return self.precedence.tasks < SMALL_TASKS

    @property
    def is_priced(self) -> bool:
        """Whether a relaxation has priced moments."""
        return self._last is not None

    @property
    def wants_prices(self) -> bool:
        """Whether the next program goes by prices, and more moments may have one."""
        return self._goes_by_price and not self.is_relaxed

    def binding(self) -> list[int]:
        """Return the tasks at which memory matters most, by the prices of their moments or as the last cuts."""
        return [task for moment in self._dearest() or self.cuts for task in self.precedence.members(moment)]

    def _decode(
        self, program: CutRelaxation, live: Sequence[frozenset[int]], has_run: Sequence[frozenset[int]]
    ) -> Schedule:
        graph, cuts = self.problem.graph, program.tasks()
        chosen = {task: i for task, i in program.chosen().items() if i in self._substitutes}
        return decode(graph, cuts, live, first_run_order(graph, self.precedence, cuts, has_run, chosen))

    def _next_program(self, deadline: Deadline) -> CutRelaxation | None:
        """Return the next program: one whose relaxation bounds nearly as well as that of all moments with a price."""
        least = self.problem.least_time
        while not deadline.passed:
            chain = self._next_chain(deadline)
            if chain is None:
                self.is_exhausted = True
                return None
            self._tried.add(tuple(chain))
            whole = sorted(chain, key=lambda task: -self._prices.get(task, 0.0))[: self._whole]
            program = self._program(chain, deadline, whole)
            relaxed = tighten(program, deadline)
            self._paths.update(program.paths)
            if relaxed is None or len(chain) >= len(self._dearest()):
                return program
            self.bound = max(self.bound, relaxed)
            if relaxed - least >= LEAST_RELAXED * (self.relaxed - least):
                return program
            self._step = len(chain) - len(self._best) + max(1, len(chain) // 2)
        return None

    def _choose_whole(self, cuts: int, answer: CutAnswer, *, is_short: bool) -> None:
        """Choose at how many cuts tensors are kept or not: at half as many after a program that takes too long."""
        whole = min(self._whole, cuts)
        if answer.exact:
            self._whole = max(self._whole, 2 * whole) if is_short else self._whole
        elif whole > 1:
            self._whole = whole // 2
        else:
            self._most = cuts

    def _next_chain(self, deadline: Deadline) -> list[int] | None:
        """Return the cuts of the next program; None if there is nothing to try."""
        if not self._tried and not self.precedence.reorder:
            return [self.candidates.peak_task()]
        count = len(self._best) + self._step
        if len(self._dearest()) == 1 and self._exceeded:
            # Relaxed, one moment alone binds: its price says nothing of others.
            self._goes_by_price = False
        for goes_by_price in (self._goes_by_price, not self._goes_by_price):
            self._goes_by_price = goes_by_price
            if goes_by_price:
                self.relax(deadline)
                chain = self._first_untried(self._dearest(), count)
            else:
                fewest = len(self._best) + 1
                chain = self._first_untried([*self._best, *self._exceeded], fewest if fewest <= FEW_CUTS else count)
            if chain is not None:
                return chain
        return self._first_untried([*self._dearest(), *self._moments], count)

    def _first_untried(self, ranked: Sequence[int], count: int) -> list[int] | None:
        """Return the first so many of these moments, or more of them if that has been tried."""
        ranked = list(dict.fromkeys(ranked))
        most = min(self._most, len(ranked))
        for length in range(max(1, min(count, most)), most + 1):
            chain = self.precedence.chain(ranked[:length])
            if tuple(chain) not in self._tried:
                return chain
        return None

    def _dearest(self) -> list[int]:
        """Return the moments that have a price, the dearest first."""
        return self.candidates.apart(self._priced(), PRICED_WINDOWS)

    def _priced(self) -> list[int]:
        return _dearest_first(self._prices)

    @property
    def _prices(self) -> dict[int, float]:
        return self._last.prices if self._last else {}

    def _add(self, tasks: Iterable[int]) -> None:
        """Add moments; if there are too many, those go first that have no price."""
        merged = dict.fromkeys((*self._priced(), *tasks, *self._moments))
        self._moments = self.precedence.chain(list(merged)[: self._most_moments(FEWEST_MOMENTS, MOST_MOMENTS)])

    def _most_moments(self, fewest: int, most: int) -> int:
        return max(fewest, min(most, int(MOST_WORK / self.precedence.tasks**1.5)))

    def _go_by(self, relaxation: _Relaxation) -> None:
        """Let the next programs go by the prices of a relaxation."""
        self._last = relaxation
        self._moments = self.precedence.chain([*relaxation.prices, *self._moments])

    def _refined_cuts(self, last: _Relaxation, deadline: Deadline, *, joins: bool) -> list[int]:
        """Return the priced moments of a relaxation with others at which the schedule of its point exceeds the budget.

        They are as many as are likely to be solved in time. With `joins`, some are joined to the priced ones. An empty
        list if no moment is new.
        """
        affordable = AFFORDED_SHARE * deadline.remaining / last.seconds if last.seconds else math.inf
        growth = min(affordable ** (1 / RELAXED_GROWTH), max(NEAR_SIZE, affordable ** (1 / FAR_GROWTH)))
        room = growth * sum(map(self._size, last.program.cuts))
        priced = _dearest_first(last.prices) or last.program.cuts
        schedule = self._decode(last.program, last.program.live(0.5), last.program.have_run())
        chosen = self.candidates.joined(priced, schedule) if joins else list(priced)
        room -= sum(map(self._size, chosen))
        self._lacks_time = False
        for moment in (*self.candidates.exceeded(schedule), *self._exceeded):
            if len(chosen) < self._most_refined and len(self.precedence.chain([*chosen, moment])) > len(chosen):
                if self._size(moment) <= room:
                    chosen.append(moment)
                    room -= self._size(moment)
                else:
                    self._lacks_time = True
        return [] if chosen == priced else self.precedence.chain(chosen)

    def _size(self, moment: int) -> int:
        """Return a number to which the rows that a moment adds to a relaxation are about in proportion."""
        precedence = self.precedence
        before, after = (of(moment).bit_count() for of in (precedence.before, precedence.after))
        return before + UNORDERED_SIZE * max(0, precedence.tasks - before - after)

    @property
    def _most_refined(self) -> int:
        return FEW_CUTS if self.is_small else self._most_moments(FEW_CUTS, MOST_REFINED)

    def _relax(self, cuts: list[int], deadline: Deadline, least_part: float = CLOSE_PART) -> _Relaxation:
        """Raise the bound by a relaxation, and return it.

        It gets rows over paths until these raise it by at most this part of what all have; from 1 on, it gets none.
        """
        began = clock.now()
        program = self._program(cuts, deadline)
        found = relax(program, deadline, least_part) if least_part < 1 else program.relaxed(deadline)
        self._paths.update(program.paths)
        if found is None:
            return _Relaxation(program, -math.inf, {}, clock.now() - began)
        bound, prices = found
        self.bound, self.relaxed = max(self.bound, bound), max(self.relaxed, bound)
        least = LEAST_PRICE * math.fsum(prices)
        priced = {cut: price for cut, price in zip(cuts, prices, strict=True) if price > least}
        return _Relaxation(program, max(0.0, bound - self.problem.least_time), priced, clock.now() - began)

    def _program(
        self,
        chain: list[int],
        deadline: Deadline,
        whole_cuts: Container[int] | None = None,
        counted: Collection[int] = (),
    ) -> CutRelaxation:
        problem, budgets, most_whole = self.problem, [self.problem.budget_bytes] * len(chain), None
        if counted:
            most_whole = 1
        elif len(chain) > 1:
            most_whole = max(LEAST_WHOLE, min(MOST_WHOLE, WHOLE_WORK // self.precedence.tasks))
        return CutRelaxation(
            problem.graph, self.precedence, chain, budgets, deadline, self.reduction, most_whole, self._paths,
            whole_cuts, counted,
        )  # fmt: skip


def _dearest_first(prices: Mapping[int, float]) -> list[int]:
    return sorted(prices, key=lambda moment: -prices[moment])
