"""Find solvers by name; a solver's module is imported when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Protocol, cast

from scheduler.errors import InvalidOptionError, MissingExtraError, UnknownSolverError
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline, clock

MODULES: dict[str, str] = {
    "save-all": "scheduler.solvers.baselines.save_all",
    "recompute-all": "scheduler.solvers.baselines.recompute_all",
    "segments": "scheduler.solvers.baselines.segments",
    "greedy-segments": "scheduler.solvers.baselines.greedy_segments",
    "revolve": "scheduler.solvers.revolve",
    "mixed": "scheduler.solvers.revolve.mixed",
    "greedy": "scheduler.solvers.greedy",
    "ilp": "scheduler.solvers.ilp",
    "anneal": "scheduler.solvers.anneal",
    "hierarchical": "scheduler.solvers.hierarchical",
    "checkmate": "scheduler.solvers.baselines.checkmate",
    "kusumoto": "scheduler.solvers.baselines.kusumoto",
    "dp": "scheduler.solvers.dp",
    "moccasin": "scheduler.solvers.baselines.moccasin",
    "knapsack": "scheduler.solvers.baselines.knapsack",
    "auto": "scheduler.solvers.auto",
}
"""The solvers of this package. A new one is a module with a `propose` function, and one line here."""


class Propose(Protocol):
    """The type of every solver: a function named `propose`."""

    def __call__(self, problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        """Return the best schedule found and the bounds proven by the deadline."""


REGISTERED: dict[str, Propose] = {}
"""The solvers added by `register_solver`."""


def solver_names() -> tuple[str, ...]:
    """Return the names of all solvers, registered ones included."""
    return (*MODULES, *REGISTERED)


def register_solver(name: str, propose: Propose) -> None:
    """Add a solver under a new name, for `solve` and all other functions that take a solver's name.

    Parameters
    ----------
    name : str
    propose : callable
        Called as `propose(problem, deadline=deadline, seed=seed)`; returns a `Proposal`. Its
        schedule is simulated and its status is computed, but its bounds are trusted.

    Raises
    ------
    InvalidOptionError
        If the name is empty or already taken, or `propose` is not callable.

    Notes
    -----
    The registration applies to this process only; a worker process must repeat it.
    """
    if not isinstance(name, str) or not name:
        raise InvalidOptionError(f"name must be a non-empty str, got {name!r}")
    if not callable(propose):
        raise InvalidOptionError(f"propose must be a function, got {propose!r}")
    if name in solver_names():
        raise InvalidOptionError(f'a solver named "{name}" is already registered: choose another name')
    REGISTERED[name] = propose


def load_solver(name: str) -> Propose:
    """Return the `propose` function of a solver.

    Raises
    ------
    UnknownSolverError
        If no solver has that name.
    MissingExtraError
        If a package that the solver needs is not installed.
    """
    if name in REGISTERED:
        return REGISTERED[name]
    if name not in MODULES:
        raise UnknownSolverError(f'unknown solver "{name}"; known are {", ".join(solver_names())}')
    with imported(name):
        return cast(Propose, import_module(MODULES[name]).propose)


@contextmanager
def imported(solver: str) -> Iterator[None]:
    """Pause the clock while a solver is imported, and turn a missing package into a `MissingExtraError`."""
    is_known = MODULES[solver] in sys.modules
    try:
        with nullcontext() if is_known else clock.paused():
            yield
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f'"{solver}" needs {error.name}, which is not installed: pip install --force-reinstall checkpoint-scheduler'
        ) from error
