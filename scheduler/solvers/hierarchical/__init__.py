"""The solver `hierarchical`: deep networks, one distinct block at a time."""

from scheduler.solvers.hierarchical.solver import propose

__all__ = ["propose"]
