"""The temperatures of a round of annealing: they fall geometrically, faster if time runs short."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.solvers.deadline import Deadline, clock


def temperatures(
    hot: float, cold: float, moves: int, most: int, deadline: Deadline
) -> Iterator[tuple[int, float, float]]:
    """Yield the numbers of moves between two readings of the clock, with the temperatures at their start and end.

    Parameters
    ----------
    hot, cold : float
        The temperatures at the start and at the end of the round.
    moves : int
        Of the whole round.
    most : int
        Largest number of moves between two readings.
    deadline : Deadline
    """
    started, available = clock.now(), deadline.remaining
    done, at = 0, 0.0
    while at < 1 and not deadline.stopped:
        count = min(most, moves - done)
        then = min(1.0, at + count / moves)
        yield count, hot * (cold / hot) ** at, hot * (cold / hot) ** then
        done += count
        elapsed = clock.now() - started
        at = max(done / moves, elapsed / available if available > 0 else 1.0)
