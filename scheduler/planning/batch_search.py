"""The largest batch for which a schedule fits a budget: a search over batch sizes and schedules."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from scheduler.errors import UnsuitableProblemError
from scheduler.planning.batch_scaling import LEAST_PREDICTED, Growth, structure
from scheduler.problem import Problem
from scheduler.schedule import Schedule, runs_of, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.solvers.smallest_peak import squeeze

_SHARE_OF_SLICE = 0.3
"""Of the time left, what the search for a schedule of one batch size may take, and what the proof of the answer may."""


@dataclass(frozen=True)
class LargestBatch:
    """What `largest_batch` finds.

    Attributes
    ----------
    size : int
        0 if no schedule of a batch of one is known.
    schedule : Schedule or None
        It fits, at this size.
    bound : int or None
        Proven: no larger batch fits. None if nothing up to the limit is proven not to.
    next_schedule : Schedule or None
        Of the smallest peak known at `size` + 1; None at the limit.
    """

    size: int
    schedule: Schedule | None
    bound: int | None
    next_schedule: Schedule | None


def largest_batch(
    growth: Growth, budget_bytes: int, *, limit: int, seconds: float, reorder: bool = True
) -> LargestBatch:
    """Find the largest batch for which a schedule of the budget is known.

    No batch fits whose graph has a floor over the budget. From there down, a schedule is
    sought at one size, and serves every size at which the judge says that it fits, so that
    few sizes are searched. The graphs of the answer and of one more are traced; where they
    are not as they were predicted, the search goes on with what they show.

    Memory is taken to grow with the batch: `size` fits and `size` + 1 is not known to, what
    lies beyond is not looked at.

    Parameters
    ----------
    growth : Growth
    budget_bytes : int
    limit : int
        Largest batch looked at.
    seconds : float
        For the search for schedules, which Ctrl-C ends as well; tracing comes on top.
    reorder : bool
    """
    search = _Search(growth, budget_bytes, limit, seconds, reorder)
    with stopped_by_interrupt(search.whole):
        return search.answer()


class _Search:
    """Schedules found so far, by the structure of the graphs that they belong to."""

    def __init__(self, growth: Growth, budget_bytes: int, limit: int, seconds: float, reorder: bool) -> None:
        self.growth, self.budget_bytes, self.limit = growth, budget_bytes, limit
        self.seconds, self.reorder = seconds, reorder
        self.whole = Deadline(math.inf)
        """Only to be stopped: time counts in `seconds`."""
        self.most = 0
        """The last size whose floor is within the budget."""
        self._runs: dict[Hashable, list[Sequence[int]]] = {}

    def answer(self) -> LargestBatch:
        """Return the largest batch of those whose graphs are known for certain."""
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
        """Return the largest size for which a schedule is known, once no larger one is left to try."""
        self.most = self._last(self._may_fit, 1)
        known, untried = self._last(self._fits, 1), self.most
        while known < untried and not self.whole.stopped:
            # Nearer to the known end: a success is made the most of, a failure takes its full time.
            size = known + -(-(untried - known) // 3)
            if self._attempt(size):
                least = size
            else:
                least, untried = known, size - 1
            # It may serve a size at which an earlier attempt failed.
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
        """Return the size above which it is proven that no batch fits; None if that is beyond the limit."""
        if size == self.limit:
            return None
        if not self._may_fit(size + 1):
            return size
        with suppress(UnsuitableProblemError):  # too large a step for `ilp`
            proof = load_solver("ilp")(self._problem(size + 1), deadline=self._slice(), seed=0)
            if proof.infeasible:
                return size
        return self.most if self.most < self.limit else None

    def _may_fit(self, size: int) -> bool:
        return self._problem(size).floor.bytes <= self.budget_bytes

    def _fits(self, size: int) -> bool:
        return self.best(size)[0] <= self.budget_bytes

    def _newest_fits(self, size: int) -> bool:
        """Return whether the schedule found last fits; the others are known not to."""
        graph = self.growth.at(size)
        newest = self._runs.get(structure(graph), [])[-1:]
        return any(simulate(graph, schedule_from_runs(graph, runs)).peak_bytes <= self.budget_bytes for runs in newest)

    def _attempt(self, size: int) -> bool:
        """Look for a schedule that fits a batch size, keep that of the smallest peak, and return whether it fits."""
        problem = self._problem(size)
        begun = time.monotonic()
        schedule = squeeze(problem, self._slice())[1]
        self.seconds = max(0.0, self.seconds - (time.monotonic() - begun))
        self._runs.setdefault(structure(problem.graph), []).append(runs_of(problem.graph, schedule))
        return self._newest_fits(size)

    def _forget_all_but_newest(self, size: int) -> None:
        """Keep, of the schedules for batches like this one, the one found last: it serves where no other does."""
        runs = self._runs[structure(self.growth.at(size))]
        del runs[:-1]

    def _slice(self) -> Deadline:
        return self.whole.within(_SHARE_OF_SLICE * self.seconds)

    def _problem(self, size: int) -> Problem:
        graph = self.growth.at(size)
        known = self._runs.get(structure(graph), ())
        starts = tuple(schedule_from_runs(graph, runs) for runs in known)
        return Problem(graph, self.budget_bytes, self.reorder, starts=starts)

    def _last(self, holds: Callable[[int], bool], holding: int, most: int | None = None) -> int:
        """Return the last size, up to `most` or the limit, for which what holds for `holding` holds.

        It is taken to hold for all sizes up to that one. Sizes are doubled, and then halved.
        """
        failing = (self.limit if most is None else most) + 1
        seen = False
        while failing - holding > 1:
            size = (holding + failing) // 2 if seen else min(2 * holding, failing - 1)
            if holds(size):
                holding = size
            else:
                failing, seen = size, True
        return holding
