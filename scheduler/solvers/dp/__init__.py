"""The exact dynamic program for chains of layers."""

from __future__ import annotations

from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline

__all__ = ["propose"]


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest persistent schedule of a chain; see `scheduler.solvers.dp.solver.propose`.

    Memory: at most 1024 MiB.
    """
    # The solver needs numba, but the costs and runs of a chain, which other solvers use, do not.
    from scheduler.solvers.dp import solver

    return solver.propose(problem, deadline=deadline, seed=seed)
