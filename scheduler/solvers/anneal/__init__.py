"""The solver `anneal`: simulated annealing over sequences of runs."""

from scheduler.solvers.anneal.solver import propose

__all__ = ["propose"]
