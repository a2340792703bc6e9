"""Choose what a turn from the start begins with: a known schedule that does not fit, or the initial one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.schedule import Schedule


@dataclass(eq=False)
class _Beginning:
    schedule: Schedule | None
    led_to: float = -math.inf
    """Time of what fits that the last turn from here has found, inf if there is nothing; -inf before the first turn."""


class Beginnings:
    """What turns from the start begin with: each known schedule that does not fit, and the initial one (None).

    Each is tried once, and then comes the one whose last turn led to the fastest schedule: which of
    them that is differs from step to step.

    Attributes
    ----------
    least_time : float
        That of the fastest one that does not fit; inf if there is none.
    """

    def __init__(self) -> None:
        self.least_time = math.inf
        self._queue = [_Beginning(None)]
        """The one that was the last to be chosen is at the end."""

    def add(self, schedule: Schedule, time: float) -> None:
        """Add a schedule that does not fit; it comes before those that are there."""
        self._queue.insert(0, _Beginning(schedule))
        self.least_time = min(self.least_time, time)

    @property
    def has_exceeding(self) -> bool:
        """Whether there is one that does not fit."""
        return len(self._queue) > 1

    def next(self, *, in_turn: bool) -> Schedule | None:
        """Return what the next turn begins with; `in_turn`, those that do not fit relieve each other, if there are any.

        Until `record` says what that has led to, the others come first.
        """
        exceeding = [each for each in self._queue if each.schedule is not None]
        chosen = exceeding[0] if in_turn and exceeding else min(self._queue, key=lambda each: each.led_to)
        chosen.led_to = math.inf
        self._queue.remove(chosen)
        self._queue.append(chosen)
        return chosen.schedule

    def record(self, schedule: Schedule | None, led_to: float) -> None:
        """Take note of the time of what fits that a turn from a schedule has found, inf if there is nothing."""
        for each in self._queue:
            if each.schedule is schedule:
                each.led_to = led_to

    def drop(self, schedule: Schedule) -> None:
        """Never choose a schedule again."""
        self._queue = [each for each in self._queue if each.schedule is not schedule]
