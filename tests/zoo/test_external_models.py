"""Models that others wrote train under a plan as without one, in the predicted memory; run by `pytest -m zoo`."""

from __future__ import annotations

import copy

import pytest
import torch

import scheduler as sc
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
from scheduler.pytorch.tracing import capture
from tests.pytorch.models.test_bits import PRECISIONS, InPrecision, Precision
from tests.support.pytorch.planning import check_equal, train
from tests.zoo.models import CASES

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of the libraries, among themselves
]

SHARES = (0.15, 0.4, 0.8)
"""Budgets: from the smallest known peak to that of saving everything."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_as_without_a_plan_and_in_the_predicted_memory(name: str, precision: Precision) -> None:
    case = CASES[name]()
    model = InPrecision(case.model, precision, case.loss)
    plain = copy.deepcopy(model)
    (args, kwargs), *_ = batches = [case.batch(seed) for seed in (1, 2)]
    captured = capture(model, args, kwargs, costs="flops", workspaces=True)
    graph = captured.graph
    smallest = sc.minimum_budget(graph, time_limit=2.0).peak_bytes
    largest = sc.solve(graph, 2**50, solver="save-all").peak_bytes
    expected = train(plain, batches)
    start = copy.deepcopy(model.state_dict())
    for share in SHARES:
        model.load_state_dict(start)
        model.zero_grad()
        plan = sc.make_plan(graph, int(smallest + share * (largest - smallest)), time_limit=4.0)
        planned = build(model, captured, plan.schedule, args, kwargs)
        check_equal(train(planned, batches), expected)
        measured = measure(
            training_step(planned, args, kwargs), resident=resident_tensors(planned, (args, kwargs)), repeats=1
        )
        others = graph.resident_bytes - measured.resident_bytes  # constants of the capture and targets of the loss
        assert measured.live_peak_bytes + others == plan.simulation.live_peak_bytes
        assert measured.allocator_peak_bytes + others <= plan.budget_bytes
