"""Bound every schedule in any order by a chain of cuts that linear relaxations choose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from scheduler.problem import Problem
from scheduler.schedule import Schedule, first_runs
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.decoding import decode
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation

MOST_CANDIDATES = 24
LARGEST_SHARE_UNORDERED = 0.1
"""Candidates are tasks of which at most this share of all may first run before as well as after, if enough are."""
MOST_EXCEEDED = 6
"""Largest number of tasks where the last point exceeds the budget that are candidates."""
CHOICE_SHARE = 0.2
"""Share of the time to choose a cut; the rest is for the integer program."""
LEAST_GAIN = 1e-6
"""A further cut must raise the bound by this share."""
LARGE_GAIN = 3e-3
"""A cut that raises the bound by this share is kept at once."""
FEWEST_TRIALS, MOST_TRIALS = 3, 8
"""The best of so many cuts is kept, if it raises the bound or after so many in any case."""
MOST_JOINT_CUTS = 6
"""All suggested cuts are tried together if the chain gets no longer than this."""
_WINDOWS = 24
"""Of each window of the order, one task that exceeds the budget is a candidate."""


class AnyOrderBound:
    """A lower bound on the time of every schedule, raised by one cut at a time.

    At the peak of the save-everything step, much may run before as well as after: gradients of
    parameters, for instance. A cut bounds best at a task that nearly all others must precede
    or follow, such as the last ones of the forward phase. Linear relaxations rank the candidates,
    in milliseconds each; integer programs try those that promise most, and each ends as soon as
    one of its points shows that it cannot raise the bound. The best one becomes the next cut.

    Parameters
    ----------
    problem : Problem
    precedence : Precedence
        That of any order.

    Attributes
    ----------
    bound : float
    cuts : list of int
        Tasks, each before the next.
    is_exhausted : bool
        Whether every candidate for the next cut has been tried, and none is left.
    """

    def __init__(self, problem: Problem, precedence: Precedence) -> None:
        self.problem, self.precedence = problem, precedence
        self.bound = 0.0
        self.cuts: list[int] = []
        self.is_exhausted = False
        self._has_risen = False
        self._promise: dict[int, float] = {}
        """The last relaxed bound with each task."""
        self._relaxed: dict[tuple[int, ...], float] = {}
        """The relaxed bounds of longer chains, if they were found."""
        self._tried: dict[tuple[int, ...], tuple[float, list[int]]] = {}
        """Of those whose integer program was solved: the bound, and the tasks at which its point exceeds the budget."""
        self._exceeded: list[int] = []

    def raise_bound(self, suggested: Sequence[int], deadline: Deadline, slack: float = 0.0) -> list[Schedule]:
        """Solve the integer program with the further cut that promises most; keep the best of several cuts.

        Parameters
        ----------
        suggested : sequence of int
            Tasks that are candidates in addition to those found here.
        deadline : Deadline
        slack : float
            Slack of `CutRelaxation.solve`.

        Returns
        -------
        list of Schedule
            The schedule of the program's point, if there is one.
        """
        self._relax(suggested, deadline)
        untried = [chain for chain in self._relaxed if chain not in self._tried]
        if not untried or deadline.passed:
            self.is_exhausted = not untried
            return []
        chain = max(untried, key=self._rank)
        answer = self._program(chain, deadline).solve(deadline, slack, self.bound * (1 + LEAST_GAIN))
        schedules = [] if answer.live is None else [decode(self.problem.graph, chain, answer.live)]
        self._tried[chain] = answer.bound, self._exceeding(schedules)
        risen = max(answer.bound, self._relaxed[chain]) / self.bound - 1 if self.bound else math.inf
        self.bound = max(self.bound, self._relaxed[chain], answer.bound)
        self._has_risen = self._has_risen or risen > LEAST_GAIN
        enough = FEWEST_TRIALS if self._has_risen else MOST_TRIALS
        if risen > LARGE_GAIN or len(self._tried) >= enough or (len(untried) == 1 and self._exceeded):
            self._keep(max(self._tried, key=lambda chain: (self._tried[chain][0], self._relaxed[chain])))
        return schedules

    def _rank(self, chain: tuple[int, ...]) -> tuple[float, int, int]:
        """Return what a chain promises: its relaxed bound; of about equal ones, a short one, where a point exceeds."""
        places = [self._exceeded.index(task) for task in chain if task in self._exceeded]
        place = min(places, default=len(self._exceeded))
        return round(self._relaxed[chain] / (self.problem.least_time or 1.0), 4), -len(chain), -place

    def _keep(self, chain: tuple[int, ...]) -> None:
        self.cuts, self._exceeded, self._has_risen = list(chain), self._tried[chain][1], False
        self._relaxed.clear()
        self._tried.clear()

    def _relax(self, suggested: Sequence[int], deadline: Deadline) -> None:
        """Find the relaxed bound with each task as a further cut, and with all suggested ones."""
        choice = deadline.within(CHOICE_SHARE * deadline.remaining)
        # Those that promised most for the last cut come first, since time may not be enough for all.
        usual = sorted(self._candidates, key=lambda task: -self._promise.get(task, 0.0))
        further = [[task] for task in dict.fromkeys((*self._exceeded, *suggested, *usual))]
        for tasks in [list(suggested), *further]:
            chain = tuple(self.precedence.chain([*self.cuts, *tasks]))
            if len(chain) <= len(self.cuts) or chain in self._relaxed or choice.passed:
                continue
            if len(tasks) == 1 or len(chain) <= MOST_JOINT_CUTS:
                line = self._program(chain, deadline).relaxed(choice)
                self._relaxed[chain] = 0.0 if line is None else line[0]
                self._promise.update({tasks[0]: self._relaxed[chain]} if len(tasks) == 1 else {})

    def _exceeding(self, schedules: list[Schedule]) -> list[int]:
        """Return tasks at whose first runs a schedule exceeds the budget, the largest excess of each window first."""
        found: dict[int, int] = {}
        for schedule in schedules:
            memory, first = simulate(self.problem.graph, schedule).memory, first_runs(self.problem.graph, schedule)
            for task in sorted(first, key=lambda task: -memory[first[task]]):
                if memory[first[task]] > self.problem.budget_bytes and task not in self.cuts:
                    found.setdefault(task * _WINDOWS // self.precedence.tasks, task)
        return list(found.values())[:MOST_EXCEEDED]

    @cached_property
    def _candidates(self) -> list[int]:
        """Tasks at which the save-everything step exceeds the budget: half those of the largest memory, half spread."""
        memory, first = self.problem.baseline.memory, first_runs(self.problem.graph, self.problem.save_everything)
        most = LARGEST_SHARE_UNORDERED * self.precedence.tasks
        over = [task for task, run in first.items() if memory[run] > self.problem.budget_bytes]
        over.sort(key=lambda task: (-memory[first[task]], task))
        ordered = [task for task in over if self.precedence.unordered[task] <= most]
        if len(ordered) >= MOST_CANDIDATES:
            over = ordered
        half = MOST_CANDIDATES // 2
        return over[:half] + over[half :: max(1, -(-len(over) // half))]

    def _program(self, chain: tuple[int, ...], deadline: Deadline) -> CutRelaxation:
        budgets = [self.problem.budget_bytes] * len(chain)
        return CutRelaxation(self.problem.graph, self.precedence, chain, budgets, deadline)
