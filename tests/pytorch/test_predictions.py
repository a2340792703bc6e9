"""A plan with workspaces predicts the memory that the allocator holds, as well as the live memory."""

from __future__ import annotations

import pytest

import scheduler as sc
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
from scheduler.pytorch.tracing import capture
from tests.support.pytorch.small_models import SMALL, small_model

pytestmark = pytest.mark.long(15)


@pytest.mark.parametrize("name", SMALL)
def test_the_allocator_holds_the_predicted_memory_and_never_exceeds_the_budget(name: str) -> None:
    case = small_model(name)
    captured = capture(case.module, case.args, case.kwargs, case.loss, costs="flops", workspaces=True)
    solutions = [found for found in sc.frontier(captured.graph, ["75%", "100%"], time_limit=1.0) if found.schedule]
    assert solutions[-1].overhead == 0
    for solution in solutions:
        module = build(case.module, captured, solution.schedule, case.args, case.kwargs, loss=case.loss)
        resident = resident_tensors(module, (case.args, dict(case.kwargs)))
        measured = measure(training_step(module, case.args, case.kwargs), resident=resident, repeats=1)
        # Constants of the capture are resident but not part of the module.
        constants = captured.graph.resident_bytes - measured.resident_bytes
        assert measured.live_peak_bytes + constants == solution.simulation.live_peak_bytes
        assert measured.allocator_peak_bytes + constants == pytest.approx(solution.peak_bytes, rel=0.01)
        assert measured.allocator_peak_bytes <= solution.budget_bytes
