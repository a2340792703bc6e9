"""Which calls to recompute: as good as trying every choice, with true bounds."""

from __future__ import annotations

import math
from functools import cache

import pytest

from scheduler.errors import BudgetTooSmallError
from scheduler.pytorch.modules.choice import plan_modules
from scheduler.pytorch.modules.lowering import lower
from scheduler.solution import Status
from tests.support.call_trees import Machine, every_choice, random_tree

SEEDS = range(25)


@cache
def every_outcome(seed: int) -> list[tuple[int, float]]:
    """The peak and the time of every choice, by the definition."""
    tree = random_tree(seed, most_calls=5 + seed % 3)
    machines = [Machine(tree, regions) for regions in every_choice(tree)]
    return [(machine.peak_bytes, machine.time) for machine in machines]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_is_that_of_trying_every_choice(seed: int) -> None:
    tree, outcomes = random_tree(seed, most_calls=5 + seed % 3), every_outcome(seed)
    smallest, largest = min(outcomes)[0], max(outcomes)[0]
    lowered = lower(tree)
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        budget = smallest + math.floor(share * (largest - smallest))
        best = min(time for peak, time in outcomes if peak <= budget)
        plan = plan_modules(lowered, budget, gap=0.0)
        assert plan.time == pytest.approx(best)
        assert plan.status is Status.OPTIMAL
        assert plan.bound <= best
        assert plan.peak_bytes <= budget
        rough = plan_modules(lowered, budget, gap=0.1)
        assert rough.bound <= best <= rough.time <= best / (1 - 0.1) + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_peak_is_that_of_trying_every_choice(seed: int) -> None:
    lowered, smallest = lower(random_tree(seed, most_calls=5 + seed % 3)), min(every_outcome(seed))[0]
    assert plan_modules(lowered, "min").peak_bytes == smallest
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_modules(lowered, smallest - 1)
    assert caught.value.proven
    assert f"{smallest} bytes" in str(caught.value)
