"""Every named model, planned for a budget, trains in the predicted memory with the numbers of plain autograd."""

from __future__ import annotations

import pytest

import scheduler as sc
from scheduler.errors import BudgetTooSmallError, OutOfTimeError
from scheduler.pytorch.models.catalog import make_model, model_names
from scheduler.schedule import Schedule
from tests.support.pytorch.planning import check_like_autograd
from tests.support.pytorch.small_models import SMALL, TOLERANCE

pytestmark = pytest.mark.long(25)

FITTING = {**SMALL, "resnet50": {**SMALL["resnet50"], "batch_size": 16}}
"""With smaller batches, the gradients alone are more than 60 % of the memory of a ResNet's step."""


def schedule_within(graph: sc.Graph, budget: str) -> Schedule:
    """Return a schedule within a budget or, if none is known, within the smallest known peak."""
    try:
        plan = sc.make_plan(graph, budget, time_limit=3.0)
    except (BudgetTooSmallError, OutOfTimeError):
        smallest = sc.minimum_budget(graph, time_limit=3.0)
        assert smallest.floor_bytes <= smallest.peak_bytes
        assert smallest.peak_bytes > sc.solve(graph, budget, solver="save-all").budget_bytes
        plan = sc.make_plan(graph, smallest.peak_bytes, time_limit=10.0)
    assert sc.simulate(graph, plan.schedule).peak_bytes <= plan.budget_bytes
    return plan.schedule


@pytest.mark.parametrize("budget", ["80%", "60%"])
@pytest.mark.parametrize("name", SMALL)
def test_a_planned_model_trains_as_under_autograd_in_the_predicted_memory(name: str, budget: str) -> None:
    if name not in model_names():
        pytest.skip("transformers is not installed")
    case = make_model(name, **FITTING[name])
    check_like_autograd(
        case.module,
        lambda graph: schedule_within(graph, budget),
        case.batch(1),
        case.batch(2),
        loss=case.loss,
        tolerance=TOLERANCE.get(name, 0.0),
    )
