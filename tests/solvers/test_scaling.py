"""The units in which integer programs count bytes and times."""

from __future__ import annotations

import math

import pytest

import scheduler as sc
from scheduler.solvers.scaling import LARGEST_COEFFICIENT, ByteUnits, byte_units, time_units


def graph_of(sizes: list[int], times: list[float], workspace: int = 0) -> sc.Graph:
    """Return a graph with one operation per time, each with a tensor of the size at its position."""
    names = [f"t{k}" for k in range(len(sizes))]
    operations = [
        sc.Operation(f"o{k}", [], [name], time, workspace)
        for k, (name, time) in enumerate(zip(names, times, strict=True))
    ]
    return sc.Graph(operations, [sc.Tensor(n, s) for n, s in zip(names, sizes, strict=True)], results=names)


def test_times_that_share_a_power_of_two_are_integers_in_its_units() -> None:
    units = time_units(graph_of([1, 1, 1], [0.75, 3.0, 0.0]))
    # 0.75 is three quarters.
    assert (units.times, units.scale, units.exact) == ((3.0, 12.0, 0.0), 0.25, True)


def test_times_of_many_digits_are_not_integers_and_lose_nothing() -> None:
    units = time_units(graph_of([1, 1], [math.pi, 1.0]))
    assert not units.exact
    assert [time * units.scale for time in units.times] == [math.pi, 1.0]
    assert 1 <= sum(units.times) <= LARGEST_COEFFICIENT
    assert time_units(graph_of([1, 1], [math.pi, 1.0]), 60).exact


def test_times_with_fractions_may_have_fewer_bits_before_the_point() -> None:
    # pi + 1 lies between 4 and 8, so 20 bits make the unit 2^(3 - 20).
    units = time_units(graph_of([1, 1], [math.pi, 1.0]), fractional_bits=20)
    assert (units.scale, units.exact) == (2.0**-17, False)
    assert time_units(graph_of([1, 1], [3.0, 1.0]), fractional_bits=1).times == (3.0, 1.0)


def test_a_graph_whose_operations_take_no_time_has_a_unit_of_one() -> None:
    assert time_units(graph_of([1], [0.0])).times == (0.0,)


@pytest.mark.parametrize(
    ("sizes", "workspace", "budget", "size", "exact"),
    [
        ([12, 20], 0, 100, 4, True),
        ([12, 20], 2, 100, 2, True),
        ([0, 8], 0, 100, 8, True),
        ([0, 0], 0, 100, 1, True),
        ([3, 5], 0, LARGEST_COEFFICIENT, 1, True),
        ([3, 5], 0, LARGEST_COEFFICIENT * 2, 2, False),
    ],
)
def test_the_unit_is_the_largest_power_of_two_that_divides_all_sizes_unless_the_budget_is_large(
    sizes: list[int], workspace: int, budget: int, size: int, exact: bool
) -> None:
    assert byte_units(graph_of(sizes, [1.0, 1.0], workspace), budget) == ByteUnits(size, exact)
