"""How far tracing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NOISE = 0.1
"""Times whose runs scatter by more than this are called noise."""


@dataclass(frozen=True, slots=True)
class TracingProgress:
    """A stage of tracing: how far it is, and for how long it has run.

    Attributes
    ----------
    stage : str
    fraction : float
        Of the stage, between 0 and 1.
    seconds : float
        Since the stage began.
    spread : float or None
        At the end of measuring: the median of repeated runs over the shortest ones, minus 1,
        on average over the time of a step. Above `NOISE`, the machine is too busy for times.
    """

    stage: str
    fraction: float = 0.0
    seconds: float = 0.0
    spread: float | None = None


Progress = Callable[[TracingProgress], None]


def ignore(progress: TracingProgress) -> None:
    """Do nothing with the progress."""
