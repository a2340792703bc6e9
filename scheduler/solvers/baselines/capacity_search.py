"""A search over one number that a method takes, for the schedule that fits the budget and is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solvers.baselines.kept_sets import schedule_keeping
from scheduler.solvers.deadline import Deadline

KeptSets = Callable[[int], Iterable[frozenset[int]]]
"""From a capacity to the sets of tensors that a method keeps at the end of the forward phase."""

_HALVINGS = 12


@dataclass(frozen=True, order=True, slots=True)
class Judged:
    """What the judge says of a schedule; the smaller, the better.

    Attributes
    ----------
    over_bytes : float
        How far its peak is above the budget; 0 if it fits.
    time : float
    """

    over_bytes: float = float("inf")
    time: float = float("inf")


class CapacitySearch:
    """Kept sets, each simulated once, and the best schedule among them.

    Parameters
    ----------
    problem : Problem

    Attributes
    ----------
    best : Schedule or None
        The fastest schedule that fits, else the one that is least over the budget.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.best: Schedule | None = None
        self._best_key = Judged()
        self._seen: dict[frozenset[int], Judged] = {}

    def run(self, kept_sets: KeptSets, most: int, steps: int, deadline: Deadline) -> None:
        """Try capacities 0 to `most` in equal steps, the largest first; then halve around the best.

        Parameters
        ----------
        kept_sets : KeptSets
        most, steps : int
        deadline : Deadline
            At least one capacity is tried.
        """
        simulated: dict[int, Judged] = {}
        pending = [most * step // steps for step in reversed(range(steps + 1))]
        for _ in range(_HALVINGS):
            for capacity in pending:
                simulated[capacity] = min(map(self.grade, kept_sets(capacity)), default=Judged())
                if deadline.passed:
                    return
            pending = _middles(simulated)

    def grade(self, kept: frozenset[int]) -> Judged:
        """Judge the schedule that keeps a set, and keep it if it is the best so far."""
        if kept not in self._seen:
            graph = self.problem.graph
            schedule = schedule_keeping(graph, kept)
            simulation = simulate(graph, schedule)
            entry = Judged(max(0, simulation.peak_bytes - self.problem.budget_bytes), simulation.time)
            self._seen[kept] = entry
            if entry < self._best_key:
                self.best, self._best_key = schedule, entry
        return self._seen[kept]


def _middles(simulated: dict[int, Judged]) -> list[int]:
    """Return the capacities half way between the best one, the largest of equals, and its neighbors."""
    known = sorted(simulated)
    place = min(range(len(known)), key=lambda k: (simulated[known[k]], -k))
    middles = {(known[place] + known[n]) // 2 for n in (place + 1, place - 1) if 0 <= n < len(known)}
    return sorted(middles - set(known), reverse=True)
