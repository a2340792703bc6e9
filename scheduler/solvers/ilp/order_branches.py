"""Bound every schedule of any order by branches: in each, some tasks first run in a given order.

Where two branches of a step may run one after the other, memory peaks in either. A program for any
order escapes: its cuts, each before the next, constrain only one of the two. Whichever runs first,
a program that knows it has cuts in both, and bounds much better. Every schedule is in one of the
branches, so the least of their bounds holds for all. This is the disjunctive branching of
scheduling theory (Carlier and Pinson, 1989, "An algorithm for solving the job-shop problem").

What `Reduction` absorbs runs right before its reader in some best schedule. That one is in one of
the branches, whose bound it obeys; others of the same time, in other branches, need not obey theirs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import relative_gap
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.cut_search import REFINED_SHARE, CutSearch
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.relaxation import CutRelaxation

BRANCHING_SHARE = 0.5
"""Share of the time for branching before a program is solved."""
LEAST_GAP = 0.01
"""Pairs are looked for, and operations counted, while the fastest known schedule exceeds the bound by more than this
share: otherwise programs prove it sooner."""
GIVEN_SHARE = 0.1
"""In a large step, share of the time for a relaxation for the input order, whose prices say at which cuts it holds
memory: before, only the peak is known."""
MOST_BRANCHES, MOST_OF_LARGE = 4, 2
"""Each branch needs programs of its own; those of large steps take long."""
LEAST_GAIN = 2e-4
"""By this share of the time of the plain step, the order of a pair must raise the bounds of both branches: the lowest
one is that of the step."""
LEAST_PART = 0.04
"""In a large step, by this part of what the bound adds to the time of the plain step: further moments of the whole step
raise it as much in the time that a second branch takes."""
LEAST_MOVED = 0.3
"""A task has moved if the part of it that has run before a cut differs by this from what the input order says."""
LEAST_BYTES = 0.005
"""Tasks are looked at that take at least this share of what the budget leaves beside resident tensors."""
FEW_UNORDERED = 16
"""Where more tasks than these may precede as well as follow a cut, its order relative to the nearest one decides
little: some with the largest outputs are compared."""
MOST_COMPARED, LARGE_PART = 5, 0.5
"""About so many are compared, evenly spaced, of those with at least this part of the largest output."""
MOST_TRIED = 2
"""After so many cuts without a pair that raises the bounds, a program is solved before others are looked at."""
MOST_PRICED = 6
"""So many of the cuts with the highest prices are those of the relaxations that compare pairs."""


@dataclass
class _Branch:
    """The schedules in which pairs of tasks first run in a given order.

    Attributes
    ----------
    pairs : tuple of (int, int)
        Of each pair, the first task first runs before the second.
    search : CutSearch
    settled : set of int
        Cuts of the input order without a pair left to look at.
    """

    pairs: tuple[tuple[int, int], ...]
    search: CutSearch
    settled: set[int] = field(default_factory=set)


class OrderBranches:
    """A lower bound on the time of every schedule of any order, raised by programs and by branching.

    The cuts of the input order say where branching may help: where they hold memory at a task and
    the relaxation for any order escapes by moving another one to the other side of it, the order of
    the two makes two branches.

    Parameters
    ----------
    problem : Problem
    reduction : Reduction
    given : CutSearch
        That for the input order.

    Attributes
    ----------
    precedence : Precedence
        That of all schedules.
    known : float
        The time of the fastest schedule that is known.
    """

    def __init__(self, problem: Problem, reduction: Reduction, given: CutSearch) -> None:
        self.problem, self.reduction, self.given = problem, reduction, given
        self.precedence = Precedence(problem.graph, reorder=True)
        self._least = LEAST_GAIN * problem.baseline.time
        known = (simulate(problem.graph, start) for start in problem.starts)
        fitting = (simulation.time for simulation in known if simulation.peak_bytes <= problem.budget_bytes)
        self.known = min(fitting, default=math.inf)
        self._has_counted = False
        self._branches = [_Branch((), CutSearch(problem, self.precedence, reduction))]

    @property
    def bound(self) -> float:
        """Lower bound on the time of every schedule."""
        return self._lowest.search.bound

    @property
    def is_exhausted(self) -> bool:
        """Whether nothing is left to try."""
        return self._lowest.search.is_exhausted

    def relax(self, deadline: Deadline) -> None:
        """Raise the bound by linear relaxations."""
        self._lowest.search.relax(deadline)

    def raise_bound(self, deadline: Deadline, slack: float = 0.0) -> Schedule | None:
        """Branch while that raises bounds, and solve a program of the lowest branch; return the schedule of its point.

        None if the program has no point.
        """
        lowest = self._lowest
        if not (lowest.search.is_small or self.given.is_priced) and self._is_far:
            self.given.refine(deadline.within(GIVEN_SHARE * deadline.remaining))
        if not lowest.search.is_priced and self._unsettled(lowest):
            if lowest.search.is_small:
                lowest.search.relax(deadline)
            else:
                lowest.search.refine(deadline, MOST_PRICED)
        if not self._has_counted:  # then its bound is better than those of the relaxations that compare pairs
            self._branch(deadline.within(BRANCHING_SHARE * deadline.remaining))
        self._refine(deadline.within(REFINED_SHARE * deadline.remaining))
        search = self._lowest.search
        if self._counts and search.is_priced:
            self._has_counted = True
            return search.count(deadline, slack, enough=self._second_bound)
        return search.raise_bound(deadline, slack)

    @property
    def comes_first(self) -> bool:
        """Whether its programs come before those for the input order: in large steps, of which few are solved."""
        return self._is_far and not self._lowest.search.is_small

    @property
    def _counts(self) -> bool:
        """Whether the next program counts how often operations run again."""
        return self._is_far and self._lowest.search.may_count

    @property
    def _is_far(self) -> bool:
        return relative_gap(self.known, self.bound) > LEAST_GAP

    @property
    def _second_bound(self) -> float:
        """The bound of the branch that is the lowest once the lowest one is raised; inf if there is no other."""
        return min((branch.search.bound for branch in self._branches if branch is not self._lowest), default=math.inf)

    @property
    def _lowest(self) -> _Branch:
        return min(self._branches, key=lambda branch: branch.search.bound)

    def _branch(self, deadline: Deadline) -> None:
        most = MOST_BRANCHES if self._lowest.search.is_small else MOST_OF_LARGE
        while not deadline.passed and len(self._branches) < most:
            if not self._is_far:
                break
            lowest = self._lowest
            found = self._branches_of(lowest, deadline)
            if not found:
                break
            self._branches.remove(lowest)
            self._branches += found

    def _refine(self, deadline: Deadline) -> None:
        """Relax the lowest branch with further moments, as long as its next program goes by prices.

        The only branch relaxes itself, unless its next program counts.
        """
        while not deadline.passed and self._lowest.search.wants_prices and (len(self._branches) > 1 or self._counts):
            self._lowest.search.refine(deadline)

    def _branches_of(self, branch: _Branch, deadline: Deadline) -> list[_Branch]:
        """Return the two branches of the order of a pair that raises the bounds of both, if there is any."""
        search = branch.search
        for cut in self._unsettled(branch)[:MOST_TRIED]:
            priced = [cut, *search.binding()[:MOST_PRICED]]
            probe = CutSearch(self.problem, search.precedence, self.reduction)
            has_many = search.precedence.unordered[cut] > FEW_UNORDERED
            moved = self._moved(probe.relax_at([cut] if has_many else priced, deadline), cut)
            least = self._least_bound(search, probe.relaxed)
            if has_many:
                moved = [self._best_joined(search, cut, tasks, deadline) for tasks in moved]
            for task in (tasks[0] for tasks in moved if tasks):
                found: list[_Branch] = []
                for pair in ((cut, task), (task, cut)):
                    found.append(self._with_pair(branch, pair, [*priced, task], deadline))
                    if deadline.passed:
                        return []
                    if found[-1].search.relaxed < least:
                        break
                else:
                    return found
            branch.settled.add(cut)
        return []

    def _least_bound(self, search: CutSearch, relaxed: float) -> float:
        """Return the least bound of branches that pay, given a relaxation with the moments of theirs."""
        if search.is_small:
            return search.bound + self._least
        known = max(search.bound, relaxed)
        return known + max(self._least, LEAST_PART * (known - self.problem.least_time))

    def _unsettled(self, branch: _Branch) -> list[int]:
        """Return the cuts of the input order whose order relative to other tasks may be worth two branches."""
        unordered = branch.search.precedence.unordered
        cuts = [cut for cut in self.given.binding() if cut not in branch.settled]
        return [cut for cut in cuts if unordered[cut] and self._has_order(cut)]

    def _moved(self, program: CutRelaxation, cut: int) -> list[list[int]]:
        """Return tasks before a cut in the input order, and after it, that are moved past it, the nearest first."""
        has_run = program.has_run[program.cuts.index(cut)].items()
        moved = [task for task, part in has_run if abs((part.value or 0.0) - (task < cut)) >= LEAST_MOVED]
        moved = sorted(task for task in moved if self._has_order(task) and self._is_large(task))
        return [[task for task in reversed(moved) if task < cut], [task for task in moved if task > cut]]

    def _best_joined(self, search: CutSearch, cut: int, tasks: Sequence[int], deadline: Deadline) -> list[int]:
        """Return the task that bounds best if its first run and the cut's, whichever comes first, are one moment.

        Some of the largest ones are compared. An empty list if none bounds better than all moments so far: branches
        bound little better than such a moment.
        """
        least = LARGE_PART * max(map(self._size, tasks), default=0)
        large = [task for task in tasks if self._size(task) >= least]
        best, most = list[int](), search.bound
        for task in large[:: max(1, (len(large) - 1) // (MOST_COMPARED - 1))]:
            probe = CutSearch(self.problem, search.precedence, self.reduction)
            probe.relax_at([search.precedence.first_of((cut, task))], deadline)
            if probe.relaxed > most:
                best, most = [task], probe.relaxed
        return best

    def _with_pair(self, branch: _Branch, pair: tuple[int, int], moments: Iterable[int], deadline: Deadline) -> _Branch:
        pairs = (*branch.pairs, pair)
        search = CutSearch(self.problem, Precedence(self.problem.graph, reorder=True, pairs=pairs), self.reduction)
        search.bound = branch.search.bound
        search.relax_at(moments, deadline)
        return _Branch(pairs, search)

    def _has_order(self, task: int) -> bool:
        """Return whether a task first runs in every schedule, so that it comes before or after any other such one."""
        return task in self.reduction.necessary and len(self.problem.graph.index.tasks[task]) == 1

    def _is_large(self, task: int) -> bool:
        return self._size(task) >= LEAST_BYTES * (self.problem.budget_bytes - self.problem.graph.resident_bytes)

    def _size(self, task: int) -> int:
        """Return the bytes that a task without alternatives allocates."""
        index = self.problem.graph.index
        return index.allocated_bytes[index.tasks[task][0]]
