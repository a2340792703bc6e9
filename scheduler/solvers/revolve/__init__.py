"""Binomial checkpointing of uniform chains; `mixed` is a solver of its own."""

from scheduler.solvers.revolve.solver import propose

__all__ = ["propose"]
