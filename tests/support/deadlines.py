"""A deadline that does not depend on the clock."""

from __future__ import annotations

from scheduler.solvers.deadline import Deadline


class CountedDeadline(Deadline):
    """A deadline that passes at the k-th look at it."""

    def __init__(self, looks: int) -> None:
        super().__init__(1e9)
        self.looks = looks

    @property
    def passed(self) -> bool:
        self.looks -= 1
        return self.looks < 0
