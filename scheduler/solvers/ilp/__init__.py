"""The solver `ilp`: an integer program with lazily generated cuts."""

from scheduler.solvers.ilp.solver import propose

__all__ = ["propose"]
