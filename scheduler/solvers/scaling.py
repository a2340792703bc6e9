"""Bytes and times in units that integer programs can hold exactly, or rounded in a named direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scheduler.graph import Graph

LARGEST_COEFFICIENT = 2**24
"""Up to this, a tolerance of 1e-6 on a binary stays small against the unit."""


@dataclass(frozen=True, slots=True)
class TimeUnits:
    """Times of the operations, over a power of two.

    Attributes
    ----------
    times : tuple of float
        Whole numbers if `exact`.
    scale : float
        Time of the graph per unit.
    exact : bool
        Every time is a whole number of units.
    """

    times: tuple[float, ...]
    scale: float
    exact: bool


def time_units(graph: Graph, bits: int = LARGEST_COEFFICIENT.bit_length() - 1) -> TimeUnits:
    """Return the times of the operations in units of a power of two.

    Parameters
    ----------
    graph : Graph
    bits : int
        All times together are at most 2^bits units.
    """
    times = [operation.time for operation in graph.operations]
    total = math.fsum(times)
    if total == 0:
        return TimeUnits(tuple(times), 1.0, True)
    quantum = min(_lowest_bit(time) for time in times if time)
    exact = total / quantum <= 2**bits
    scale = quantum if exact else math.ldexp(1.0, math.frexp(total)[1] - bits)
    return TimeUnits(tuple(time / scale for time in times), scale, exact)


def byte_unit(graph: Graph, budget_bytes: int) -> int:
    """Return a power of two that divides all sizes where that keeps the budget a small number of units.

    Parameters
    ----------
    graph : Graph
    budget_bytes : int
        Without the resident tensors; not negative.
    """
    sizes = [size for size in graph.index.storage_bytes if size]
    sizes += [operation.workspace_bytes for operation in graph.operations if operation.workspace_bytes]
    unit = min((size & -size for size in sizes), default=1)
    while budget_bytes // unit > LARGEST_COEFFICIENT:
        unit *= 2
    return unit


def _lowest_bit(value: float) -> float:
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator) / denominator
