"""Units in which integer programs hold bytes and times."""

from __future__ import annotations

import math

import pytest

import scheduler as sc
from scheduler.solvers.scaling import LARGEST_COEFFICIENT, byte_unit, time_units


def graph_of(sizes: list[int], times: list[float], workspace: int = 0) -> sc.Graph:
    """One operation per time, each with a tensor of the size at its place."""
    names = [f"t{k}" for k in range(len(sizes))]
    operations = [
        sc.Operation(f"o{k}", [], [name], time, workspace)
        for k, (name, time) in enumerate(zip(names, times, strict=True))
    ]
    return sc.Graph(operations, [sc.Tensor(n, s) for n, s in zip(names, sizes, strict=True)], results=names)


def test_times_that_share_a_power_of_two_are_whole_numbers_of_it() -> None:
    units = time_units(graph_of([1, 1, 1], [0.75, 3.0, 0.0]))
    # 0.75 is three quarters.
    assert (units.times, units.scale, units.exact) == ((3.0, 12.0, 0.0), 0.25, True)


def test_times_of_many_digits_are_no_whole_numbers_and_stay_exact() -> None:
    units = time_units(graph_of([1, 1], [math.pi, 1.0]))
    assert not units.exact
    assert [time * units.scale for time in units.times] == [math.pi, 1.0]
    assert 1 <= sum(units.times) <= LARGEST_COEFFICIENT
    assert time_units(graph_of([1, 1], [math.pi, 1.0]), 60).exact


def test_free_operations_need_no_unit() -> None:
    assert time_units(graph_of([1], [0.0])).times == (0.0,)


@pytest.mark.parametrize(
    ("sizes", "workspace", "budget", "unit"),
    [
        ([12, 20], 0, 100, 4),
        ([12, 20], 2, 100, 2),
        ([0, 8], 0, 100, 8),
        ([0, 0], 0, 100, 1),
        ([3, 5], 0, LARGEST_COEFFICIENT, 1),
        ([3, 5], 0, LARGEST_COEFFICIENT * 2, 2),
    ],
)
def test_the_byte_is_a_power_of_two_that_divides_all_while_the_budget_is_small(
    sizes: list[int], workspace: int, budget: int, unit: int
) -> None:
    assert byte_unit(graph_of(sizes, [1.0, 1.0], workspace), budget) == unit
