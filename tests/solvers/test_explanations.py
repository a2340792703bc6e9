"""Why no schedule fits: an operation, or what is in memory whatever is recomputed."""

from __future__ import annotations

import pytest

import scheduler as sc
from scheduler.errors import BudgetTooSmallError
from scheduler.solvers.explanations import fixed_bytes


def step(*, state: int = 0, reserve: int = 0, batch: int = 1) -> sc.Graph:
    """One layer with a weight of 10 bytes and a gradient as large, and an activation of 2 bytes."""
    tensors = [
        sc.Tensor("x", batch, role="input"),
        sc.Tensor("w", 10, role="parameter"),
        sc.Tensor("state", state, role="optimizer state"),
        sc.Tensor("reserve", reserve, role="reserve"),
        sc.Tensor("y", 2),
        sc.Tensor("g", 10, role="gradient"),
    ]
    operations = [
        sc.Operation("forward", ["x", "w"], ["y"], 1.0),
        sc.Operation("backward", ["x", "y"], ["g"], 1.0, phase="backward"),
    ]
    return sc.Graph(operations, tensors, ["x", "w", "state", "reserve"], ["g"])


def explanation(graph: sc.Graph, budget: int) -> str:
    with pytest.raises(BudgetTooSmallError) as caught:
        sc.make_plan(graph, budget)
    return str(caught.value)


def test_resident_tensors_and_results_are_fixed() -> None:
    assert fixed_bytes(step(state=20)) == {
        "input": 1,
        "parameter": 10,
        "optimizer state": 20,
        "reserve": 0,
        "gradient": 10,
    }


def test_gradients_that_fill_the_floor_are_named_with_what_helps() -> None:
    # Resident are 11 bytes; the backward adds 2 + 10, which are 100 %. A budget of 15 leaves 4 of these 12.
    assert explanation(step(), 15) == (
        'no schedule fits 15 B (33.3%): "backward" alone needs 23 B (100.0%). The smallest possible schedule needs'
        " 23 B (100.0%). Of that, 21 B stay in memory whatever is recomputed, mostly parameters (10 B) and gradients"
        ' (10 B). Set the budget to "min" or 23 bytes, train fewer parameters or in a smaller dtype, or shard them over'
        " several devices. A smaller batch does not make these smaller."
    )


def test_a_budget_above_what_is_fixed_is_too_small_for_an_operation() -> None:
    assert explanation(step(), 22).startswith('no schedule fits 22 B (91.7%): "backward" alone needs 23 B (100.0%).')


@pytest.mark.parametrize(
    ("graph", "help"),
    [
        (step(state=80), "use an optimizer with less state"),
        (step(reserve=80), "lower reserve="),
        (step(batch=80), "use a smaller batch"),
    ],
)
def test_what_helps_depends_on_what_is_large(graph: sc.Graph, help: str) -> None:
    said = explanation(graph, 50)
    assert help in said
    assert ("A smaller batch does not" in said) == ("smaller batch" not in help)


def test_no_schedule_is_explained_by_the_smallest_one_that_any_solver_came_across() -> None:
    graph = sc.zoo.unet()
    with pytest.raises(BudgetTooSmallError) as caught:
        sc.make_plan(graph, "min", solver="save-all", time_limit=2.0)
    smallest = sc.solve(graph, "min", solver="save-all", time_limit=2.0)
    assert smallest.smallest_peak_bytes is not None
    assert smallest.smallest_peak_bytes <= smallest.budget_bytes
    assert "another solver found one" in str(caught.value)
