"""Bound every schedule in any order by a chain of cuts that linear relaxations choose."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

from scheduler.problem import Problem
from scheduler.schedule import first_runs
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation

MOST_CANDIDATES = 24
LARGEST_SHARE_UNORDERED = 0.1
"""Candidates are tasks of which at most this share of all may first run before as well as after, if enough are."""
CHOICE_SHARE = 0.2
"""Share of the time to choose a cut; the rest is for the integer program."""
LEAST_GAIN = 1e-6
"""A further cut must raise the relaxed bound by this share."""


class AnyOrderBound:
    """A lower bound on the time of every schedule, raised by one cut at a time.

    At the peak of the save-everything step, much may run before as well as after: gradients of
    parameters, for instance. A cut bounds best at a task that nearly all others must precede
    or follow, such as the last ones of the forward phase; which of them, linear relaxations
    tell in milliseconds each.

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
        Whether no further cut raises the bound.
    """

    def __init__(self, problem: Problem, precedence: Precedence) -> None:
        self.problem, self.precedence = problem, precedence
        self.bound = 0.0
        self.cuts: list[int] = []
        self.is_exhausted = False
        self._relaxed_bound = 0.0

    def add_cut(self, suggested: Iterable[int], deadline: Deadline, slack: float = 0.0) -> None:
        """Add the cut that raises the relaxed bound most, and solve the integer program.

        Parameters
        ----------
        suggested : iterable of int
            Tasks that are candidates in addition to those found here.
        deadline : Deadline
        slack : float
            Slack of `CutRelaxation.solve`.
        """
        if deadline.passed:
            return
        chains: dict[tuple[int, ...], float] = {}
        choice = deadline.within(CHOICE_SHARE * deadline.remaining)
        for task in dict.fromkeys((*self._candidates, *suggested)):
            chain = tuple(self.precedence.chain([*self.cuts, task]))
            if len(chain) > len(self.cuts) and not choice.passed:
                line = self._program(chain, deadline).relaxed(choice)
                chains[chain] = -math.inf if line is None else line[0]
        best = max(chains, key=chains.__getitem__, default=())
        if not best or (self.cuts and chains[best] <= self._relaxed_bound * (1 + LEAST_GAIN)):
            self.is_exhausted = True
            return
        self.cuts, self._relaxed_bound = list(best), max(self._relaxed_bound, chains[best])
        answer = self._program(best, deadline).solve(deadline, slack)
        self.bound = max(self.bound, self._relaxed_bound, answer.bound)

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
