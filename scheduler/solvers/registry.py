"""Solvers by name; none is imported until it is asked for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol, cast

from scheduler.errors import MissingExtraError, UnknownSolverError
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers import clock

MODULES: dict[str, str] = {
    "save-all": "scheduler.solvers.save_all",
    "recompute-all": "scheduler.solvers.recompute_all",
    "segments": "scheduler.solvers.segments",
    "greedy-segments": "scheduler.solvers.greedy_segments",
    "revolve": "scheduler.solvers.revolve",
    "mixed": "scheduler.solvers.mixed",
    "greedy": "scheduler.solvers.greedy",
    "cuts": "scheduler.solvers.cuts",
    "anneal": "scheduler.solvers.anneal",
    "blocks": "scheduler.solvers.blocks",
    "milp": "scheduler.solvers.milp",
    "lower-sets": "scheduler.solvers.lower_sets",
    "chain": "scheduler.solvers.chain",
    "intervals": "scheduler.solvers.intervals",
    "knapsack": "scheduler.solvers.knapsack",
    "auto": "scheduler.solvers.auto",
}
"""A new solver is one file with a `propose` function, and one line here."""


class Propose(Protocol):
    """What every solver module offers under the name `propose`."""

    def __call__(self, problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        """Return the best schedule found and what is proven, by the deadline."""


Report = Callable[[Proposal], None]
"""Told by a search what it has so far, so that others beside it know."""


def to_nobody(_: Proposal) -> None:
    """Report to nobody."""


class Deadline:
    """A moment in time that a search must respect, and a word that ends it sooner.

    Parameters
    ----------
    seconds : float
        From now.
    whole : Deadline, optional
        Of the search that this one is a part of: stopped with it.
    """

    def __init__(self, seconds: float, whole: Deadline | None = None) -> None:
        self.end = clock.now() + seconds
        self._whole = whole
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ask the search, from any thread, for its best answer at once."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for the best answer at once."""
        return self._stopped.is_set() or (self._whole is not None and self._whole.stopped)

    @property
    def remaining(self) -> float:
        """Seconds left; 0 once it has passed."""
        return 0.0 if self.stopped else max(0.0, self.end - clock.now())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining <= 0

    def within(self, seconds: float) -> Deadline:
        """Return a deadline that many seconds from now, or this one's end if it is earlier."""
        return Deadline(min(seconds, self.remaining), self)


@contextmanager
def stopped_by_interrupt(deadline: Deadline) -> Iterator[None]:
    """Let the first Ctrl-C end a search with its best answer; a second one raises KeyboardInterrupt.

    Only the main thread hears Ctrl-C; elsewhere, and where the program handles it in its
    own way, nothing changes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def stop(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        deadline.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def solver_names() -> tuple[str, ...]:
    """Return the names of all registered solvers."""
    return tuple(MODULES)


def load_solver(name: str) -> Propose:
    """Return the `propose` function of the solver of that name.

    Raises
    ------
    UnknownSolverError
        If no solver has that name.
    MissingExtraError
        If what it builds on is not installed.
    """
    if name not in MODULES:
        raise UnknownSolverError(f'unknown solver "{name}"; known are {", ".join(MODULES)}')
    try:
        return cast(Propose, import_module(MODULES[name]).propose)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f'"{name}" needs {error.name}, which is not installed: pip install --force-reinstall checkpoint-scheduler'
        ) from error
