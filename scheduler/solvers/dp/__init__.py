"""The exact dynamic program for chains of layers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.solvers.dp.solver import propose

__all__ = ["propose"]


def __getattr__(name: str) -> object:
    # The solver needs numba, but the costs and runs of a chain, which other solvers use, do not.
    if name == "propose":
        from scheduler.solvers.dp.solver import propose

        return propose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
