"""Solvers by name; none is imported until it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from scheduler.errors import MissingExtraError, UnknownSolverError
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline

MODULES: dict[str, str] = {
    "save-all": "scheduler.solvers.baselines.save_all",
    "recompute-all": "scheduler.solvers.baselines.recompute_all",
    "segments": "scheduler.solvers.baselines.segments",
    "greedy-segments": "scheduler.solvers.baselines.greedy_segments",
    "revolve": "scheduler.solvers.revolve.solver",
    "mixed": "scheduler.solvers.revolve.mixed",
    "greedy": "scheduler.solvers.greedy",
    "ilp": "scheduler.solvers.ilp.solver",
    "anneal": "scheduler.solvers.anneal.solver",
    "hierarchical": "scheduler.solvers.hierarchical.solver",
    "checkmate": "scheduler.solvers.baselines.checkmate",
    "kusumoto": "scheduler.solvers.baselines.kusumoto",
    "dp": "scheduler.solvers.dp.solver",
    "moccasin": "scheduler.solvers.baselines.moccasin",
    "knapsack": "scheduler.solvers.baselines.knapsack",
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
