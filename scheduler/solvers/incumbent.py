"""The best schedule that several solvers have found so far, with all that they have proven."""

from __future__ import annotations

import math
from collections.abc import Mapping
from threading import RLock

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, follows_input_order
from scheduler.simulator import simulate
from scheduler.solution import TOLERANCE, Proposal, is_close_enough, relative_gap


class Incumbent:
    """The best schedule so far and all proven bounds; safe to update from several threads.

    Attributes
    ----------
    orders : dict of str to Graph
        The graph in the order of each search space that keeps one.
    schedule : Schedule or None
    smallest : Schedule or None
        The schedule with the smallest peak, whether it fits or not.
    smallest_peak_bytes : int
        Its peak; at first, that of the save-everything schedule.
    search_space : str
        The search space of the schedule.
    time : float
        The time of the schedule; inf if there is none.
    bounds : dict of str to float
        Proven lower bound on time within each search space.
    global_bound : float
        Proven lower bound on time over all schedules.
    """

    def __init__(self, problem: Problem, orders: Mapping[str, Graph]) -> None:
        self.problem, self.orders = problem, orders
        self.schedule: Schedule | None = None
        self.smallest: Schedule | None = None
        self.smallest_peak_bytes = problem.baseline.peak_bytes
        self.search_space = "input order"
        self.time = math.inf
        self.bounds: dict[str, float] = {}
        self._fastest: dict[str, tuple[float, Schedule]] = {}
        self.global_bound = 0.0
        self.infeasible = False
        self.messages: list[str] = []
        self._lock = RLock()

    @property
    def is_optimal(self) -> bool:
        """Whether the schedule is proven optimal in its own search space, or within the problem's gap."""
        return is_close_enough(self.problem, self.time, self._bound(self.search_space))

    @property
    def gap(self) -> float:
        """Share of the schedule's time by which another one in its search space may be faster at most."""
        return relative_gap(self.time, self._bound(self.search_space))

    @property
    def is_final(self) -> bool:
        """Whether nothing better can be found, or the answer is within the problem's gap."""
        if self.infeasible or relative_gap(self.time, max(self.global_bound, self.problem.least_time)) <= TOLERANCE:
            return True
        any_space = self.problem.gap > 0 or (not self.problem.reorder and self.search_space == "input order")
        return any_space and self.is_optimal

    def update(self, proposal: Proposal) -> None:
        """Take over what is better in a proposal, be it the schedule or a bound."""
        with self._lock:
            space = proposal.search_space
            self.bounds[space] = max(self.bounds.get(space, 0.0), proposal.bound)
            self.global_bound = max(self.global_bound, proposal.global_bound)
            self.infeasible = self.infeasible or proposal.infeasible
            self.offer(proposal.schedule, space)
            self._choose()

    def annotate(self, proposal: Proposal) -> None:
        """Take over the messages of a finished solver."""
        with self._lock:
            self.messages += proposal.messages

    def offer(self, schedule: Schedule | None, space: str = "any order") -> None:
        """Simulate a schedule, and keep it if it fits and is the fastest in its search space."""
        if schedule is None:
            return
        simulation = simulate(self.problem.graph, schedule)
        if space == "any order":
            followed = (order for order, graph in self.orders.items() if follows_input_order(graph, schedule))
            space = next(followed, space)
        with self._lock:
            if simulation.peak_bytes < self.smallest_peak_bytes:
                self.smallest, self.smallest_peak_bytes = schedule, simulation.peak_bytes
            fastest = self._fastest[space][0] if space in self._fastest else math.inf
            if simulation.peak_bytes <= self.problem.budget_bytes and simulation.time < fastest:
                self._fastest[space] = simulation.time, schedule
                self._choose()

    def _choose(self) -> None:
        """Answer with the fastest schedule, or with one that is proven to be close and is as fast within the gap.

        Of equally fast schedules, the one whose search space has the highest bound is the answer.
        """
        if not self._fastest:
            return
        gap, least = self.problem.gap, min(time for time, _ in self._fastest.values())

        def rank(space: str) -> tuple[bool, float, float, bool]:
            time, _ = self._fastest[space]
            is_enough = (
                gap > 0 and (1 - gap) * time <= least and is_close_enough(self.problem, time, self._bound(space))
            )
            return not is_enough, time, -self._bound(space), space == "any order"

        self.search_space = min(self._fastest, key=rank)
        self.time, self.schedule = self._fastest[self.search_space]

    def _bound(self, space: str) -> float:
        return max(self.bounds.get(space, 0.0), self.global_bound, self.problem.least_time)

    def proposal(self) -> Proposal:
        """Return the schedule with the bounds of its search space."""
        return Proposal(
            None if self.infeasible else self.schedule,
            self.search_space,
            max(self.bounds.get(self.search_space, 0.0), self.global_bound),
            self.global_bound,
            infeasible=self.infeasible,
            messages=tuple(self.messages),
            smallest=self.smallest,
        )
