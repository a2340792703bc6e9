"""Choose what the next turn of annealing does by what has paid so far."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

DISCOUNT = 0.7
"""Weight of a turn relative to the next one of its kind."""


class Kind(Enum):
    """What a turn anneals, and from where."""

    FROM_START = auto()
    """The sequence of runs, from the initial schedule; before that, from each known one that does not fit, after its
    retention decisions."""
    DECISIONS = auto()
    """Retention decisions, from the best schedule."""
    RUNS_FROM_BEST = auto()
    """The sequence of runs, from each known schedule and then from the best one."""
    CROSSED = auto()
    """The sequence of runs, from a crossing of known schedules."""


CREDIT = {Kind.FROM_START: 0.25, Kind.DECISIONS: 0.15, Kind.RUNS_FROM_BEST: 0.25, Kind.CROSSED: 0.25}
"""Number of improvements that each kind is credited with, so that none is ever given up. Decisions get less,
since their turns take longer than those over runs."""


class Choice:
    """Choose kinds of turns, each in proportion to how often its turns have lately found something better.

    First every kind is tried once. Then comes the kind for which the estimated share of turns
    with an improvement, times the number of turns since it was last chosen, is largest. The
    choice depends only on the calls of `record`.
    """

    def __init__(self) -> None:
        self._improved = dict.fromkeys(Kind, 0.0)
        self._tried = dict.fromkeys(Kind, 0.0)
        self._chosen_at: dict[Kind, int] = {}
        self._turns = 0

    def next(self, kinds: Collection[Kind] = tuple(Kind)) -> Kind:
        """Return the kind of the next turn, one of these."""
        untried = [kind for kind in kinds if kind not in self._chosen_at]
        kind = untried[0] if untried else max(kinds, key=self._priority)
        self._chosen_at[kind] = self._turns
        self._turns += 1
        return kind

    def record(self, kind: Kind, *, improved: bool) -> None:
        """Take note of whether a turn found a faster schedule than the best one before it."""
        self._improved[kind] = DISCOUNT * self._improved[kind] + improved
        self._tried[kind] = DISCOUNT * self._tried[kind] + 1

    def _priority(self, kind: Kind) -> float:
        share = (self._improved[kind] + CREDIT[kind]) / (self._tried[kind] + 1)
        return share * (self._turns - self._chosen_at[kind])
