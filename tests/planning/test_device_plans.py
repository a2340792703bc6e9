"""Plans for a device with an allocator, by hand-made plans and needs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from scheduler.errors import BudgetTooSmallError
from scheduler.planning import device_plans
from scheduler.planning.fit_answers import Need
from scheduler.solvers.deadline import Deadline


@pytest.mark.parametrize("least", [0.0, 0.95])
def test_budgets_are_lowered_until_the_segments_fit(monkeypatch: pytest.MonkeyPatch, least: float) -> None:
    """Segments keep 4 % of the memory, and a fifth more of what is below it; no plan needs less than `least`."""
    usable, budgets = 10**6, []

    def plan(graph: object, budget: int, seconds: float) -> SimpleNamespace:
        budgets.append(budget)
        if budget < least * usable:
            raise BudgetTooSmallError("no schedule fits")
        return SimpleNamespace(schedule=budget)

    def need(graph: object, budget: int, *others: object) -> Need:
        reserved = budget + usable // 25 + (usable - budget) // 5
        return Need(budget, budget, reserved, usable, 0, 1.0)

    monkeypatch.setattr(device_plans, "_make_plan", plan)
    monkeypatch.setattr(Need, "of", need)
    step = SimpleNamespace(need=Need(2 * usable, 0, 2 * usable, usable, 0, 1.0), device=None, temporary_bytes=0)
    found = device_plans.find_plan(None, step, Deadline(10.0))[1]  # type: ignore[arg-type]
    assert found is not None
    assert found.fits == (not least)
    # A budget that is too small does not end the search.
    assert budgets == ([10**6, 940_000] if found.fits else [10**6, 940_000, 970_000])
