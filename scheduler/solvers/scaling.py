"""Bytes and times in units of a power of two, small enough for the coefficients of an integer program."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.graph import Graph

LARGEST_COEFFICIENT = 2**24
"""Largest coefficient for which a tolerance of 1e-6 on a binary variable stays well below one unit."""


@dataclass(frozen=True, slots=True)
class TimeUnits:
    """The times of the operations in units of a power of two.

    Attributes
    ----------
    times : tuple of float
        In units; integers if `exact`.
    scale : float
        The graph's time per unit.
    exact : bool
        Whether every time is an integer number of units.
    """

    times: tuple[float, ...]
    scale: float
    exact: bool


@dataclass(frozen=True, slots=True)
class ByteUnits:
    """The unit in which a program counts bytes.

    Attributes
    ----------
    size : int
        Bytes per unit, a power of two.
    exact : bool
        Whether every storage and every workspace is an integer number of units.
    """

    size: int
    exact: bool


def time_units(
    graph: Graph, bits: int = LARGEST_COEFFICIENT.bit_length() - 1, *, fractional_bits: int | None = None
) -> TimeUnits:
    """Return the times of the operations in units of a power of two.

    Parameters
    ----------
    graph : Graph
    bits : int
        If the sum of all times is at most 2^bits units, the unit divides every time.
    fractional_bits : int, optional
        Otherwise times have fractions, and their sum is below 2^fractional_bits units; by default `bits`.
    """
    times = [operation.time for operation in graph.operations]
    total = math.fsum(times)
    if total == 0:
        return TimeUnits(tuple(times), 1.0, True)
    quantum = common_power_of_two(times)
    exact = total / quantum <= 2**bits
    if fractional_bits is None:
        fractional_bits = bits
    scale = quantum if exact else math.ldexp(1.0, math.frexp(total)[1] - fractional_bits)
    return TimeUnits(tuple(time / scale for time in times), scale, exact)


def byte_units(graph: Graph, budget_bytes: int) -> ByteUnits:
    """Return the largest power of two that divides all sizes, or a larger one that keeps the budget small.

    Parameters
    ----------
    graph : Graph
    budget_bytes : int
        Bytes in addition to the resident ones; at least 0 and at most `LARGEST_COEFFICIENT` units.
    """
    sizes = [size for size in graph.index.storage_bytes if size]
    sizes += [operation.workspace_bytes for operation in graph.operations if operation.workspace_bytes]
    exact = size = min((size & -size for size in sizes), default=1)
    while budget_bytes // size > LARGEST_COEFFICIENT:
        size *= 2
    return ByteUnits(size, size == exact)


def common_power_of_two(times: Iterable[float]) -> float:
    """Return the largest power of two of which every time is a multiple; at least one time must not be 0."""
    return min(_lowest_bit(time) for time in times if time)


def _lowest_bit(value: float) -> float:
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator) / denominator
