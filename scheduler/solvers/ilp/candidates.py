"""Find the moments at which integer programs may constrain memory: where schedules need most of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest

import numpy as np

from scheduler.problem import Problem, working_set_bytes
from scheduler.schedule import Schedule, first_runs
from scheduler.simulator import simulate
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction

_WINDOWS = 48
"""Of each window of the order, one task is a candidate."""
LARGEST_SHARE_UNORDERED = 0.15
"""Candidates are tasks of which at most this share of all may first run before as well as after, if there are any."""
NEAR_BUDGET = 0.9
"""Where a schedule fits, tasks are candidates at which it keeps this share of what fits beside their working sets."""
MOST_EXCEEDED = 6
"""Largest number of tasks where a schedule exceeds the budget that become candidates, or are joined to others."""
EXCEEDED_WINDOWS = 12
"""`Candidates.exceeded` are near each other if fewer than the number of tasks over this many lie between them."""
MOST_JOINED = 4
"""Largest number of tasks of a moment."""


class Candidates:
    """The moments at which schedules need most memory.

    Parameters
    ----------
    problem : Problem
    precedence : Precedence
    reduction : Reduction
    """

    def __init__(self, problem: Problem, precedence: Precedence, reduction: Reduction) -> None:
        self.problem, self.precedence, self.reduction = problem, precedence, reduction

    def first(self) -> list[int]:
        """Return moments of the save-everything step, of the largest working sets, and of a known schedule, in turn."""
        first = first_runs(self.problem.graph, self.problem.save_everything)
        rows = [
            self._of(self.problem.save_everything, 1.0),
            self._ordered({task: -self._room[task] for task in first}, first),
            *(self._of(start, NEAR_BUDGET) for start in self.problem.starts[:1]),
        ]
        return [task for row in zip_longest(*rows) for task in row if task is not None]

    def peak_task(self) -> int:
        """Return the task at whose first run the save-everything step needs most memory."""
        memory = self.problem.baseline.memory
        first = first_runs(self.problem.graph, self.problem.save_everything)
        return max(first, key=lambda task: memory[first[task]])

    def exceeded(self, schedule: Schedule) -> list[int]:
        """Return the moments where a schedule exceeds the budget most, few of them near each other."""
        return self.apart(self._of(schedule, 1.0), EXCEEDED_WINDOWS)[:MOST_EXCEEDED]

    def joined(self, moments: Sequence[int], schedule: Schedule) -> list[int]:
        """Return moments with tasks that a schedule runs before or after them to escape them.

        Where the schedule exceeds the budget at a task that may first run before as well as after one of the moments,
        the first of these with which it can is made one moment with it (`Precedence.first_of`), unless that may come
        before as well as after others.
        """
        moments = list(moments)
        kept, first = self._kept(schedule)
        exceeding = _largest({task: share for task, share in kept.items() if share > 1.0}, first)
        for task in exceeding[:MOST_EXCEEDED]:
            for k, moment in enumerate(moments):
                tasks = {*self.precedence.members(moment), task}
                if len(tasks) <= MOST_JOINED and self._may_join(tasks):
                    joined = [*moments[:k], self.precedence.first_of(tasks), *moments[k + 1 :]]
                    if len(self.precedence.chain(joined)) == len(joined):
                        moments = joined
                        break
        return moments

    def apart(self, moments: Iterable[int], windows: int) -> list[int]:
        """Return the same moments, but those near to earlier ones last."""
        apart: list[int] = []
        near: list[int] = []
        for moment in moments:
            place, *_ = self.precedence.members(moment)
            is_near = any(
                abs(place - self.precedence.members(other)[0]) * windows < self.precedence.tasks for other in apart
            )
            (near if is_near else apart).append(moment)
        return apart + near

    @cached_property
    def _needs(self) -> list[int]:
        """Bytes of the working set of each task's default, resident tensors included."""
        return [working_set_bytes(self.problem.graph, operations[0]) for operations in self.problem.graph.index.tasks]

    @cached_property
    def _room(self) -> list[int]:
        """Bytes that the budget leaves for other tensors while each task's default runs."""
        return [max(1, self.problem.budget_bytes - need) for need in self._needs]

    def _of(self, schedule: Schedule, least: float) -> list[int]:
        """Return tasks at which a schedule keeps more than so many times what fits, the largest multiples first.

        At a task: at its first run, or since the one before.
        """
        kept, first = self._kept(schedule)
        return self._ordered({task: share for task, share in kept.items() if share > least}, first)

    def _kept(self, schedule: Schedule) -> tuple[dict[int, float], dict[int, int]]:
        """Return how many times what fits a schedule keeps at each task, and where in it the tasks first run.

        What it keeps is what it needs without the task's working set.
        """
        memory, first = simulate(self.problem.graph, schedule).memory, first_runs(self.problem.graph, schedule)
        begins = [0, *(run + 1 for run in first.values())][:-1]
        most = dict(zip(first, np.maximum.reduceat(memory, begins).tolist(), strict=True))
        return {task: (size - self._needs[task]) / self._room[task] for task, size in most.items()}, first

    def _ordered(self, value: Mapping[int, float], place: Mapping[int, int]) -> list[int]:
        """Return `_largest` of the tasks that few others may precede as well as follow, or of all if there are none."""
        most = LARGEST_SHARE_UNORDERED * self.precedence.tasks
        ordered = {task: size for task, size in value.items() if self.precedence.unordered[task] <= most}
        return _largest(ordered or value, place)

    def _may_join(self, tasks: Collection[int]) -> bool:
        """Return whether the first one of these tasks is a moment."""
        index, necessary = self.problem.graph.index, self.reduction.necessary
        return all(task in necessary and len(index.tasks[task]) == 1 for task in tasks) and not any(
            self.precedence.before(task) >> other & 1 for task in tasks for other in tasks
        )


def _largest(value: Mapping[int, float], place: Mapping[int, int]) -> list[int]:
    """Return the tasks of the largest values, one of each window of the order, the largest first."""
    end = 1 + max(place.values(), default=0)
    found: dict[int, int] = {}
    for task in sorted(value, key=lambda task: -value[task]):
        found.setdefault(place[task] * _WINDOWS // end, task)
    return list(found.values())
