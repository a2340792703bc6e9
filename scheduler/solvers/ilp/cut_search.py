"""Choose the cuts of integer programs: where points exceed the budget, and where linear relaxations price memory."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.ilp.candidates import Candidates
from scheduler.solvers.ilp.decoding import decode, first_run_order
from scheduler.solvers.ilp.path_rows import CLOSE_PART, RELAXED_SHARE, relax, tighten
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutAnswer, CutRelaxation, PathRow

MOST_CUTS = 24
"""Largest number of cuts of one program."""
MOST_MOMENTS, MOST_WORK, FEWEST_MOMENTS = 24, 450_000, 2
"""Largest and smallest number of cuts of a linear relaxation; between them, the second over tasks to the power 1.5."""
JOINS_SHARE, LEAST_JOINED = 0.5, 0.01
"""Share of the remaining time for relaxations with joined moments, and by which part of what the last one adds to the
time of the plain step each must raise that."""
PRICED_WINDOWS = 32
"""Moments with a price are near each other if fewer than the number of tasks over this many lie between them."""
LEAST_PRICE = 3e-3
"""A cut whose memory has less than this share of all prices is left out."""
FEW_CUTS = 6
"""Up to so many cuts, moments where points exceed the budget are added one by one: each moves the next point's."""
FIRST_PRICED = 3
"""Number of cuts of the first program that is chosen by prices."""
SHORT_SHARE, GROWTH = 0.1, 3
"""After a program that took at most this share of the remaining time, the next one has two cuts more, and one more
for each so many; otherwise it has one more."""
LEAST_WHOLE, MOST_WHOLE, WHOLE_WORK = 50, 100, 30_000
"""`most_whole` of programs with more than one cut: between these two, about the last one over the number of tasks."""
ROUGH_PART = 0.5
"""Moments are priced in a relaxation with rows over paths until these raise it by less than this part of what all have,
and those that then have a price once more, as closely as a program is relaxed."""
LEAST_RELAXED = 0.96
"""A program is solved if its relaxation adds at least this share of what that of the priced moments adds to the time
of the plain step; otherwise it gets more cuts."""
KEPT_PARTS = (0.3, 0.7)
"""Parts of a tensor; for each of them, a schedule keeps the tensors of which a relaxation's point keeps more."""
LEAST_GAIN = 1e-6
"""A program that raises the bound by this share has paid."""


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
    """

    def __init__(self, problem: Problem, precedence: Precedence, reduction: Reduction) -> None:
        self.problem, self.precedence, self.reduction = problem, precedence, reduction
        self.candidates = Candidates(problem, precedence, reduction)
        self.bound = 0.0
        self.cuts: list[int] = []
        self.live: tuple[frozenset[int], ...] = ()
        self.is_exhausted = False
        self._best: list[int] = []
        self._exceeded: list[int] = []
        """Where the point with the best cuts exceeds the budget."""
        self._step, self._most = FIRST_PRICED, MOST_CUTS
        self._moments: list[int] = []
        self._prices: dict[int, float] = {}
        self._is_joined = True
        """Whether joining further moments has ended by itself, rather than for lack of time."""
        self._tried: set[tuple[int, ...]] = set()
        self._relaxed = problem.least_time
        """The best bound of a linear relaxation."""
        self._paths: dict[PathRow, None] = {}
        """Rows of earlier programs."""
        self._whole = MOST_CUTS
        """At so many cuts of the next program, tensors are kept or not; at the others, also in part."""
        self._goes_by_price = precedence.reorder

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
        self._add(exceeded)
        return schedule

    def relax(self, deadline: Deadline) -> CutRelaxation | None:
        """Raise the bound by linear relaxations, and return one of them, if any was solved.

        The next programs go by their prices.
        """
        if not self._prices:
            self._add((*self._best, *self._exceeded, *self.candidates.first()))
        program, prices = self._relax(self._moments, deadline, ROUGH_PART)
        if 0 < len(prices) < len(self._moments):
            closer = self._relax(list(prices), deadline.within(RELAXED_SHARE * deadline.remaining))
            program, prices = closer if closer[1] else (program, prices)
        if self.precedence.reorder:
            prices = self._join(program, prices, deadline.within(JOINS_SHARE * deadline.remaining))
        self._moments = self.precedence.chain([*prices, *self._moments])
        self._prices = dict.fromkeys(self._moments, 0.0) | prices
        return program if prices else None

    def relax_at(self, moments: Iterable[int], deadline: Deadline) -> CutRelaxation:
        """Raise the bound by a relaxation with these moments, and return it.

        Of moments without precedence, the earlier ones are taken. If no relaxation has bounded better, those with a
        price are among the moments of the next one.
        """
        known = self._relaxed
        program, prices = self._relax(self.precedence.chain(list(moments)), deadline)
        if prices and self._relaxed > known:
            self._prices = dict.fromkeys(program.cuts, 0.0) | prices
            self._add((*program.cuts, *self.candidates.first()))
        return program

    def points(self, program: CutRelaxation) -> list[Schedule]:
        """Return schedules that keep what the point of a relaxation keeps more of than some part."""
        return [self._decode(program, program.live(part), program.have_run()) for part in KEPT_PARTS]

    @property
    def is_priced(self) -> bool:
        """Whether a relaxation has priced moments."""
        return bool(self._prices)

    def binding(self) -> list[int]:
        """Return the tasks at which memory matters most, by the prices of their moments or as the last cuts."""
        return [task for moment in self._dearest() or self.cuts for task in self.precedence.members(moment)]

    def _decode(
        self, program: CutRelaxation, live: Sequence[frozenset[int]], has_run: Sequence[frozenset[int]]
    ) -> Schedule:
        graph, cuts = self.problem.graph, program.tasks()
        return decode(graph, cuts, live, first_run_order(graph, self.precedence, cuts, has_run))

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
            if relaxed - least >= LEAST_RELAXED * (self._relaxed - least):
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
                if not (self._is_joined and self._prices and self._prices.keys() == set(self._moments)):
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
        priced = [task for task in self._moments if self._prices.get(task, 0.0) > 0]
        return self.candidates.apart(sorted(priced, key=lambda task: -self._prices[task]), PRICED_WINDOWS)

    def _add(self, tasks: Iterable[int]) -> None:
        """Add moments; if there are too many, those go first that have no price."""
        most = max(FEWEST_MOMENTS, min(MOST_MOMENTS, int(MOST_WORK / self.precedence.tasks**1.5)))
        priced = sorted((t for t, price in self._prices.items() if price > 0), key=lambda task: -self._prices[task])
        merged = dict.fromkeys((*priced, *tasks, *self._moments))
        self._moments = self.precedence.chain(list(merged)[:most])

    def _join(self, program: CutRelaxation, prices: dict[int, float], deadline: Deadline) -> dict[int, float]:
        """Relax again and again, as long as that raises the bound; return the last prices that did.

        Each time, moments at which the schedule of the last point exceeds the budget are joined to the priced ones,
        or added if these are few.
        """
        self._is_joined = False
        while not deadline.passed:
            known = self._relaxed - self.problem.least_time
            schedule = self._decode(program, program.live(0.5), program.have_run())
            priced = sorted(prices, key=lambda moment: -prices[moment])
            cuts = self.candidates.joined(priced or program.cuts, schedule)
            cuts += self.candidates.exceeded(schedule)[: max(0, FEW_CUTS - len(cuts))]
            cuts = self.precedence.chain(cuts)
            found = (program, {}) if cuts == program.cuts else self._relax(cuts, deadline)
            if self._relaxed - self.problem.least_time <= (1 + LEAST_JOINED) * known:
                self._is_joined = not deadline.passed
                break
            program, prices = found
        return prices

    def _relax(
        self, cuts: list[int], deadline: Deadline, least_part: float = CLOSE_PART
    ) -> tuple[CutRelaxation, dict[int, float]]:
        """Raise the bound by a relaxation; return it, and the cuts that have a price in it, with their prices."""
        program = self._program(cuts, deadline)
        found = relax(program, deadline, least_part)
        self._paths.update(program.paths)
        if found is None:
            return program, {}
        bound, prices = found
        self.bound, self._relaxed = max(self.bound, bound), max(self._relaxed, bound)
        least = LEAST_PRICE * math.fsum(prices)
        return program, {cut: price for cut, price in zip(cuts, prices, strict=True) if price > least}

    def _program(self, chain: list[int], deadline: Deadline, whole_cuts: Container[int] | None = None) -> CutRelaxation:
        problem, budgets = self.problem, [self.problem.budget_bytes] * len(chain)
        whole = max(LEAST_WHOLE, min(MOST_WHOLE, WHOLE_WORK // self.precedence.tasks)) if len(chain) > 1 else None
        return CutRelaxation(
            problem.graph, self.precedence, chain, budgets, deadline, self.reduction, whole, self._paths, whole_cuts
        )
