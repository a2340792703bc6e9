"""Choose the cuts of integer programs: where points exceed the budget, and where linear relaxations price memory."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest

import numpy as np

from scheduler.problem import Problem, working_set_bytes
from scheduler.schedule import Schedule, first_runs
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.ilp.decoding import decode, first_run_order
from scheduler.solvers.ilp.path_rows import CLOSE_PART, RELAXED_SHARE, relax, tighten
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutAnswer, CutRelaxation, PathRow

MOST_CUTS = 24
"""Largest number of cuts of one program."""
MOST_MOMENTS, MOST_WORK, FEWEST_MOMENTS = 24, 16_000, 2
"""Largest number of cuts of a linear relaxation: less where their number times that of tasks exceeds the work."""
_WINDOWS = 48
"""Of each window of the order, one task is a candidate."""
LARGEST_SHARE_UNORDERED = 0.15
"""Candidates are tasks of which at most this share of all may first run before as well as after, if there are any."""
NEAR_BUDGET = 0.9
"""Where a schedule fits, tasks are candidates at which it keeps this share of what fits beside their working sets."""
MOST_EXCEEDED = 6
"""Largest number of tasks where a point exceeds the budget that become candidates."""
EXCEEDED_WINDOWS, PRICED_WINDOWS = 12, 32
"""Moments are near each other if fewer than the number of tasks over this many lie between them."""
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
LEAST_RELAXED = 0.97
"""A program is solved if its relaxation adds at least this share of what that of the priced moments adds to the time
of the plain step; otherwise it gets more cuts."""
LEAST_GAIN = 1e-6
"""A program that raises the bound by this share has paid."""


class CutSearch:
    """A lower bound on the time of every schedule of an order, raised by programs with more and more cuts.

    Memory matters at some moments of good schedules and not at others. The next program has the
    cuts of the best one so far and those moments where the schedule of its point exceeds the
    budget; or those with the highest prices in a linear relaxation with cuts at many moments at
    once: where known schedules need most memory, the largest working sets, and where points have
    exceeded the budget. The two ways take turns as long as both raise the bound. Programs that take
    too long decide at fewer of their cuts what is kept: at the others, in part.

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
        self._tried: set[tuple[int, ...]] = set()
        self._relaxed = 0.0
        """The bound of the relaxation that priced the moments."""
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
        order = first_run_order(self.problem.graph, self.precedence, chain, answer.has_run)
        schedule = decode(self.problem.graph, chain, answer.live, order)
        exceeded = self._apart(self._moments_of(schedule, 1.0), EXCEEDED_WINDOWS)[:MOST_EXCEEDED]
        exceeded = [task for task in exceeded if task not in chain]
        if has_paid:
            self._best, self._exceeded = chain, exceeded
        self._add(exceeded)
        return schedule

    def relax(self, deadline: Deadline) -> None:
        """Raise the bound by a linear relaxation; the next programs go by its prices."""
        self._find_prices(deadline)

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
            return [self._peak_task()]
        count = len(self._best) + self._step
        if len(self._dearest()) == 1 and self._exceeded:
            # Relaxed, one moment alone binds: its price says nothing of others.
            self._goes_by_price = False
        for goes_by_price in (self._goes_by_price, not self._goes_by_price):
            self._goes_by_price = goes_by_price
            if goes_by_price:
                if not self._prices or self._prices.keys() != set(self._moments):
                    self._find_prices(deadline)
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

    def _peak_task(self) -> int:
        """Return the task at whose first run the save-everything step needs most memory."""
        memory = self.problem.baseline.memory
        first = first_runs(self.problem.graph, self.problem.save_everything)
        return max(first, key=lambda task: memory[first[task]])

    def _dearest(self) -> list[int]:
        """Return the moments that have a price, the dearest first."""
        priced = [task for task in self._moments if self._prices.get(task, 0.0) > 0]
        return self._apart(sorted(priced, key=lambda task: -self._prices[task]), PRICED_WINDOWS)

    def _apart(self, tasks: Iterable[int], windows: int) -> list[int]:
        """Return the same tasks, but those near to earlier ones last."""
        apart: list[int] = []
        near: list[int] = []
        for task in tasks:
            is_near = any(abs(task - other) * windows < self.precedence.tasks for other in apart)
            (near if is_near else apart).append(task)
        return apart + near

    def _first_moments(self) -> list[int]:
        """Return moments of the save-everything step, of the largest working sets, and of a known schedule, in turn."""
        first = first_runs(self.problem.graph, self.problem.save_everything)
        rows = [
            self._moments_of(self.problem.save_everything, 1.0),
            self._largest({task: -self._room[task] for task in first}, first),
            *(self._moments_of(start, NEAR_BUDGET) for start in self.problem.starts[:1]),
        ]
        return [task for row in zip_longest(*rows) for task in row if task is not None]

    @cached_property
    def _needs(self) -> list[int]:
        """Bytes of the working set of each task's default, resident tensors included."""
        return [working_set_bytes(self.problem.graph, operations[0]) for operations in self.problem.graph.index.tasks]

    @cached_property
    def _room(self) -> list[int]:
        """Bytes that the budget leaves for other tensors while each task's default runs."""
        return [max(1, self.problem.budget_bytes - need) for need in self._needs]

    def _moments_of(self, schedule: Schedule, least: float) -> list[int]:
        """Return the tasks at whose first runs, or since the ones before, a schedule keeps so many times what fits.

        What it keeps is what it needs without the task's working set; the largest multiples come first (`_largest`).
        """
        memory, first = simulate(self.problem.graph, schedule).memory, first_runs(self.problem.graph, schedule)
        begins = [0, *(run + 1 for run in first.values())][:-1]
        most = dict(zip(first, np.maximum.reduceat(memory, begins).tolist(), strict=True))
        kept = {task: (size - self._needs[task]) / self._room[task] for task, size in most.items()}
        return self._largest({task: share for task, share in kept.items() if share > least}, first)

    def _largest(self, value: Mapping[int, float], place: Mapping[int, int]) -> list[int]:
        """Return the tasks of the largest values, one of each window of the order, the largest first."""
        tasks = sorted(value, key=lambda task: -value[task])
        most = LARGEST_SHARE_UNORDERED * self.precedence.tasks
        ordered = [task for task in tasks if self.precedence.unordered[task] <= most]
        end = 1 + max(place.values(), default=0)
        found: dict[int, int] = {}
        for task in ordered or tasks:
            found.setdefault(place[task] * _WINDOWS // end, task)
        return list(found.values())

    def _add(self, tasks: Iterable[int]) -> None:
        """Add moments; if there are too many, those go first that have no price."""
        most = max(FEWEST_MOMENTS, min(MOST_MOMENTS, MOST_WORK // self.precedence.tasks))
        priced = sorted((t for t, price in self._prices.items() if price > 0), key=lambda task: -self._prices[task])
        merged = dict.fromkeys((*priced, *tasks, *self._moments))
        self._moments = self.precedence.chain(list(merged)[:most])

    def _find_prices(self, deadline: Deadline) -> None:
        if not self._prices:
            self._add((*self._best, *self._exceeded, *self._first_moments()))
        self._prices = dict.fromkeys(self._moments, 0.0)
        prices = self._relax(self._moments, deadline, ROUGH_PART)
        if 0 < len(prices) < len(self._moments):
            prices = self._relax(list(prices), deadline.within(RELAXED_SHARE * deadline.remaining)) or prices
        self._prices.update(prices)

    def _relax(self, cuts: list[int], deadline: Deadline, least_part: float = CLOSE_PART) -> dict[int, float]:
        """Raise the bound by a relaxation, and return the cuts that have a price in it, and their prices."""
        program = self._program(cuts, deadline)
        found = relax(program, deadline, least_part)
        self._paths.update(program.paths)
        if found is None:
            return {}
        bound, prices = found
        self.bound, self._relaxed = max(self.bound, bound), max(self._relaxed, bound)
        least = LEAST_PRICE * math.fsum(prices)
        return {cut: price for cut, price in zip(cuts, prices, strict=True) if price > least}

    def _program(self, chain: list[int], deadline: Deadline, whole_cuts: Container[int] | None = None) -> CutRelaxation:
        problem, budgets = self.problem, [self.problem.budget_bytes] * len(chain)
        whole = max(LEAST_WHOLE, min(MOST_WHOLE, WHOLE_WORK // self.precedence.tasks)) if len(chain) > 1 else None
        return CutRelaxation(
            problem.graph, self.precedence, chain, budgets, deadline, self.reduction, whole, self._paths, whole_cuts
        )
