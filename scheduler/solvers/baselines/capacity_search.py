"""Search over the one parameter of a method for the fastest schedule that fits the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solvers.baselines.kept_sets import schedule_keeping
from scheduler.solvers.deadline import Deadline

KeptSets = Callable[[int], Iterable[frozenset[int]]]
"""A method: from a capacity to the sets of tensors that it keeps at the end of the forward phase."""

_MOST_HALVINGS = 12


@dataclass(frozen=True, order=True, slots=True)
class Cost:
    """The simulated cost of a schedule; smaller is better.

    Attributes
    ----------
    over_bytes : float
        Bytes by which the peak exceeds the budget; 0 if the schedule fits.
    time : float
    """

    over_bytes: float = float("inf")
    time: float = float("inf")


class CapacitySearch:
    """Simulates each kept set once, and keeps the best schedule.

    Parameters
    ----------
    problem : Problem

    Attributes
    ----------
    best : Schedule or None
        The fastest schedule that fits, or else the one that exceeds the budget least.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.best: Schedule | None = None
        self._best_cost = Cost()
        self._seen: dict[frozenset[int], Cost] = {}

    def run(self, kept_sets: KeptSets, most: int, steps: int, deadline: Deadline) -> None:
        """Try capacities 0 to `most` in equal steps, the largest first; then halve around the best.

        Parameters
        ----------
        kept_sets : KeptSets
        most, steps : int
        deadline : Deadline
            At least one capacity is tried.
        """
        costs: dict[int, Cost] = {}
        pending = [most * step // steps for step in reversed(range(steps + 1))]
        for _ in range(_MOST_HALVINGS):
            for capacity in pending:
                costs[capacity] = min(map(self.cost_of, kept_sets(capacity)), default=Cost())
                if deadline.passed:
                    return
            pending = _middles(costs)

    def cost_of(self, kept: frozenset[int]) -> Cost:
        """Return the cost of the schedule that keeps a set, and remember the schedule if it is the best so far."""
        if kept not in self._seen:
            graph = self.problem.graph
            schedule = schedule_keeping(graph, kept)
            simulation = simulate(graph, schedule)
            cost = Cost(max(0, simulation.peak_bytes - self.problem.budget_bytes), simulation.time)
            self._seen[kept] = cost
            if cost < self._best_cost:
                self.best, self._best_cost = schedule, cost
        return self._seen[kept]


def _middles(costs: dict[int, Cost]) -> list[int]:
    """Return the capacities halfway between the best one, the largest of equals, and its neighbors."""
    known = sorted(costs)
    place = min(range(len(known)), key=lambda k: (costs[known[k]], -k))
    middles = {(known[place] + known[n]) // 2 for n in (place + 1, place - 1) if 0 <= n < len(known)}
    return sorted(middles - set(known), reverse=True)
