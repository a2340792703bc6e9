"""Search for the largest batch for which a schedule fits a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from scheduler.errors import UnsuitableProblemError
from scheduler.planning.batch_scaling import LEAST_PREDICTED, Growth, structure
from scheduler.problem import Problem
from scheduler.schedule import Schedule, runs_of, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.solvers.smallest_peak import squeeze

_SEARCH_TIME_SHARE = 0.3
"""Share of the remaining time for the schedule search at one batch size, and for the proof of the answer."""


@dataclass(frozen=True)
class LargestBatch:
    """The result of `largest_batch`.

    Attributes
    ----------
    size : int
        Largest batch size for which a fitting schedule is known; 0 if there is none.
    schedule : Schedule or None
        A schedule that fits at this size.
    bound : int or None
        Proven upper bound on the batch size; None if nothing is proven up to the limit.
    next_schedule : Schedule or None
        The schedule with the smallest known peak at `size` + 1; None at the limit.
    """

    size: int
    schedule: Schedule | None
    bound: int | None
    next_schedule: Schedule | None


def largest_batch(
    growth: Growth, budget_bytes: int, *, limit: int, seconds: float, reorder: bool = True
) -> LargestBatch:
    """Find the largest batch for which a schedule fits a budget.

    A batch whose graph has a floor over the budget cannot fit. Below that size, the schedule
    found at one size is tried at others too (by simulation), so that few sizes need a search.
    The graphs at the answer and at one more are traced; if they differ from their prediction,
    the search continues with the traced graphs.

    Memory is assumed to grow with the batch, so sizes beyond the first one that is not known
    to fit are not tried.

    Parameters
    ----------
    growth : Growth
    budget_bytes : int
    limit : int
        Largest batch size to try.
    seconds : float
        Time for the schedule searches, which Ctrl-C ends as well; tracing comes on top.
    reorder : bool
        As for `solve`.
    """
    search = _Search(growth, budget_bytes, limit, seconds, reorder)
    with stopped_by_interrupt(search.whole):
        return search.answer()


class _Search:
    """The state of a search: the schedules found so far, by the structure of their graphs."""

    def __init__(self, growth: Growth, budget_bytes: int, limit: int, seconds: float, reorder: bool) -> None:
        self.growth, self.budget_bytes, self.limit = growth, budget_bytes, limit
        self.seconds, self.reorder = seconds, reorder
        self.whole = Deadline(math.inf)
        """Passes Ctrl-C on to the searches; the time limit is `seconds`."""
        self.most = 0
        """The largest size whose floor is within the budget."""
        self._runs: dict[Hashable, list[Sequence[int]]] = {}

    def answer(self) -> LargestBatch:
        """Return the largest batch whose graph, and that of one more, are traced and not only predicted."""
        for size in range(LEAST_PREDICTED, min(self.limit, LEAST_PREDICTED + 1) + 1):
            self.growth.at(size)
        size = self.run()
        while not all(self.growth.confirm(traced) for traced in (size, size + 1) if 0 < traced <= self.limit):
            size = self.run()
        return LargestBatch(
            size,
            self.best(size)[1] if size else None,
            self.bound(size),
            self.best(size + 1)[1] if size < self.limit else None,
        )

    def run(self) -> int:
        """Return the largest size for which a schedule is known, after trying all larger ones."""
        self.most = self._last(self._may_fit, 1)
        known, untried = self._last(self._fits, 1), self.most
        while known < untried and not self.whole.stopped:
            # Closer to the known end: a success helps at other sizes, a failure takes its full time.
            size = known + -(-(untried - known) // 3)
            if self._attempt(size):
                least = size
            else:
                least, untried = known, size - 1
            # The schedule may fit at a size at which an earlier attempt failed.
            reached = self._last(self._newest_fits, least, self.most)
            if reached > known:
                known = reached
                self._forget_all_but_newest(size)
        if known == 1 and not self._fits(1):
            return int(self._attempt(1))
        return known

    def best(self, size: int) -> tuple[int, Schedule]:
        """Return the smallest peak known at a batch size, and its schedule."""
        problem = self._problem(size)
        schedules = (problem.save_everything, *problem.starts)
        peaks = [(simulate(problem.graph, schedule).peak_bytes, schedule) for schedule in schedules]
        return min(peaks, key=lambda entry: entry[0])

    def bound(self, size: int) -> int | None:
        """Return the size above which no batch fits, as proven; None if that is beyond the limit."""
        if size == self.limit:
            return None
        if not self._may_fit(size + 1):
            return size
        with suppress(UnsuitableProblemError):  # the graph is too large for `ilp`
            proof = load_solver("ilp")(self._problem(size + 1), deadline=self._search_deadline(), seed=0)
            if proof.infeasible:
                return size
        return self.most if self.most < self.limit else None

    def _may_fit(self, size: int) -> bool:
        return self._problem(size).floor.bytes <= self.budget_bytes

    def _fits(self, size: int) -> bool:
        return self.best(size)[0] <= self.budget_bytes

    def _newest_fits(self, size: int) -> bool:
        """Return whether the latest schedule fits; the others are known not to."""
        graph = self.growth.at(size)
        newest = self._runs.get(structure(graph), [])[-1:]
        return any(simulate(graph, schedule_from_runs(graph, runs)).peak_bytes <= self.budget_bytes for runs in newest)

    def _attempt(self, size: int) -> bool:
        """Search for a schedule with a small peak at a batch size, keep it, and return whether it fits."""
        problem = self._problem(size)
        started = clock.now()
        schedule = squeeze(problem, self._search_deadline()).schedule
        self.seconds = max(0.0, self.seconds - (clock.now() - started))
        self._runs.setdefault(structure(problem.graph), []).append(runs_of(problem.graph, schedule))
        return self._newest_fits(size)

    def _forget_all_but_newest(self, size: int) -> None:
        """Of the schedules for graphs like that of `size`, keep only the latest: it fits where no other does."""
        runs = self._runs[structure(self.growth.at(size))]
        del runs[:-1]

    def _search_deadline(self) -> Deadline:
        return self.whole.within(_SEARCH_TIME_SHARE * self.seconds)

    def _problem(self, size: int) -> Problem:
        graph = self.growth.at(size)
        known = self._runs.get(structure(graph), ())
        starts = tuple(schedule_from_runs(graph, runs) for runs in known)
        return Problem(graph, self.budget_bytes, self.reorder, starts=starts)

    def _last(self, holds: Callable[[int], bool], holding: int, most: int | None = None) -> int:
        """Return the largest size up to `most`, or the limit, for which a condition holds."""
        return largest_where(holds, holding, self.limit if most is None else most)


def largest_where(holds: Callable[[int], bool], holding: int, most: int) -> int:
    """Return the largest size up to `most` for which a condition holds.

    The condition is assumed to hold for `holding` and to be monotone. Sizes are doubled
    until it fails, and then bisected.
    """
    failing = most + 1
    seen = False
    while failing - holding > 1:
        size = (holding + failing) // 2 if seen else min(2 * holding, failing - 1)
        if holds(size):
            holding = size
        else:
            failing, seen = size, True
    return holding
