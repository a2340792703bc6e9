"""Solvers by name; none is imported until it is asked for."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Protocol, cast

from scheduler.errors import UnknownSolverError
from scheduler.problem import Problem
from scheduler.solution import Proposal

MODULES: dict[str, str] = {
    "save-all": "scheduler.solvers.save_all",
    "recompute-all": "scheduler.solvers.recompute_all",
    "segments": "scheduler.solvers.segments",
    "greedy": "scheduler.solvers.greedy",
    "cuts": "scheduler.solvers.cuts",
    "auto": "scheduler.solvers.auto",
}
"""A new solver is one file with a `propose` function, and one line here."""


class Propose(Protocol):
    """What every solver module offers under the name `propose`."""

    def __call__(self, problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        """Return the best schedule found and what is proven, by the deadline."""


class Deadline:
    """A moment in time that a search must respect.

    Parameters
    ----------
    seconds : float
        From now.
    """

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds left; 0 once it has passed."""
        return max(0.0, self.end - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining <= 0

    def within(self, seconds: float) -> Deadline:
        """Return a deadline that many seconds from now, or this one if it is earlier."""
        return Deadline(min(seconds, self.remaining))


def solver_names() -> tuple[str, ...]:
    """Return the names of all registered solvers."""
    return tuple(MODULES)


def load_solver(name: str) -> Propose:
    """Return the `propose` function of the solver of that name.

    Raises
    ------
    UnknownSolverError
        If no solver has that name.
    """
    if name not in MODULES:
        raise UnknownSolverError(f'unknown solver "{name}"; known are {", ".join(MODULES)}')
    return cast(Propose, import_module(MODULES[name]).propose)
