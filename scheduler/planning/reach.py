"""The largest size for which a step fits a device, from predicted graphs and known schedules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.planning.batch_scaling import Growth, structure
from scheduler.planning.batch_search import largest_where
from scheduler.planning.fit_answers import Need, Reach
from scheduler.problem import Problem
from scheduler.schedule import Schedule, runs_of, schedule_from_runs
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.smallest_peak import squeeze

_ATTEMPTS = 2
"""Searches for a schedule at sizes at which no known one fits."""
_SHARE = 0.25
"""Share of the remaining time for one such search."""


@dataclass(frozen=True)
class Growths:
    """The graphs of a step by one of its sizes.

    Attributes
    ----------
    plain, plannable : Growth
        As the step runs without a plan, and as a plan runs it.
    """

    plain: Growth
    plannable: Growth


class ReachSearch:
    """Search for the largest size of a growing step that fits.

    Parameters
    ----------
    growths : Growths
    need : callable
        Returns what a schedule of one of its graphs needs.
    start : int
        A size whose graph is known.
    budget_bytes : int
        What the device has.
    limit : int
        Largest size to try.
    unit : int
        Sizes are multiples of it, `start` and `limit` too.
    deadline : Deadline
        No schedule is searched for after it.
    """

    def __init__(
        self,
        growths: Growths,
        need: Callable[[Graph, Schedule], Need],
        budget_bytes: int,
        *,
        start: int,
        limit: int,
        unit: int = 1,
        deadline: Deadline,
    ) -> None:
        self._growths, self._need, self._budget_bytes = growths, need, budget_bytes
        self._unit, self._start, self._limit = unit, start // unit, limit // unit
        self._deadline = deadline
        self._runs: dict[Hashable, list[Sequence[int]]] = {}

    def know(self, graph: Graph, schedule: Schedule) -> None:
        """Try a schedule at other sizes, too."""
        self._runs.setdefault(structure(graph), []).append(runs_of(graph, schedule))

    def reach(self) -> Reach:
        """Return the largest sizes."""
        plain = self._last(self._fits_plainly, self._limit)
        most = self._last(self._may_fit, self._limit)
        planned = self._last(self._fits, most)
        untried = most
        for _ in range(_ATTEMPTS):
            if planned >= untried or self._deadline.passed:
                break
            size = planned + -(-(untried - planned) // 2)
            untried = untried if self._attempt(size) else size - 1
            planned = max(planned, self._last(self._fits, untried))
        bound = (most + 1) * self._unit - 1 if most < self._limit else None
        return Reach(plain * self._unit, planned * self._unit, bound, self._limit * self._unit)

    def schedule_at_start(self) -> Schedule | None:
        """Return a known schedule that fits at the size that the search started from."""
        graph = self._graph(self._start)
        known = (schedule_from_runs(graph, runs) for runs in self._runs.get(structure(graph), ()))
        return next((schedule for schedule in known if self._need(graph, schedule).fits), None)

    def _last(self, holds: Callable[[int], bool], most: int) -> int:
        """Return the largest size up to `most` for which a condition holds, 0 if there is none.

        Sizes near the known one, and above 1, come first: they need the fewest traces.
        """
        start = min(self._start, most)
        if start and holds(start):
            return largest_where(holds, start, most)
        least = min(2, start - 1)
        if least == 2 and holds(2):
            return largest_where(holds, 2, start - 1)
        return int(least > 0 and holds(1))

    def _graph(self, size: int) -> Graph:
        return self._growths.plannable.at(size * self._unit)

    def _fits_plainly(self, size: int) -> bool:
        graph = self._growths.plain.at(size * self._unit)
        return self._need(graph, Problem(graph, self._budget_bytes).save_everything).fits

    def _may_fit(self, size: int) -> bool:
        return Problem(self._graph(size), self._budget_bytes).floor.bytes <= self._budget_bytes

    def _fits(self, size: int) -> bool:
        graph = self._graph(size)
        known = self._runs.get(structure(graph), ())
        return any(self._need(graph, schedule_from_runs(graph, runs)).fits for runs in known) or self._fits_plainly(
            size
        )

    def _attempt(self, size: int) -> bool:
        graph = self._graph(size)
        problem = Problem(graph, self._budget_bytes)
        schedule = squeeze(problem, self._deadline.within(_SHARE * self._deadline.remaining))[1]
        self.know(graph, schedule)
        return self._need(graph, schedule).fits
