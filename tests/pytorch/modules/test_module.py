"""A module that follows a plan by modules: what it covers, and how it keeps its budget."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import BudgetTooSmallError, ExecutionError
from scheduler.plan import Plan
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors
from scheduler.pytorch.modules.choice import plan_modules
from scheduler.pytorch.modules.lowering import LoweredTree, lower
from scheduler.pytorch.modules.measuring.recording import record
from scheduler.pytorch.modules.module import ModulesModule
from tests.support.pytorch.uncapturable import WIDTH, block, mean_square, rows


class Blocks(nn.Module):
    """Four blocks, of which each batch takes a number that its values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.blocks][: 2 if x[0, 0] > 0 else 4]:
            x = x + layer(x)
        return x


def batch(count: int, *, is_short: bool = False) -> Tensor:
    x = rows(count, 10 * count, WIDTH)
    x[0, 0] = 1.0 if is_short else -1.0
    return x


class Planner:
    """Plans by measurement, and remembers what it was asked."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.budget: int | str = "min"
        self.lowered: list[LoweredTree] = []
        self.budgets: list[int | str] = []

    def replan(self, plan: Plan, budget: int | str) -> Plan:
        self.budgets.append(budget)
        return plan_modules(next(one for one in self.lowered if one.graph == plan.graph), budget)

    def remeasure(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Plan:
        self.lowered.append(lower(record(self.model, args, kwargs, mean_square)))
        return plan_modules(self.lowered[-1], self.budget)


def planned(x: Tensor, budget: str = "min+10%") -> tuple[ModulesModule, Planner]:
    torch.manual_seed(0)
    model = Blocks()
    planner = Planner(model)
    planner.budget = budget
    plan = planner.remeasure((x,), {})
    planner.budget = plan.budget_bytes
    return ModulesModule(model, (x,), {}, plan=plan, planner=planner, loss=mean_square), planner


def test_a_step_equals_the_plain_one() -> None:
    module, _ = planned(batch(8))
    assert module.plan.decisions
    assert module.verify(batch(8)).is_equal
    module.zero_grad()
    plain = copy.deepcopy(module.module)
    for seed in (3, 8, 5):
        torch.manual_seed(seed)
        loss = module(batch(seed))
        loss.backward()
        torch.manual_seed(seed)
        expected = mean_square(plain(batch(seed)))
        expected.backward()
        assert torch.equal(loss, expected)
        for parameter, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)


def test_calls_that_are_not_larger_follow_the_plan() -> None:
    module, planner = planned(batch(8))
    for count in (8, 2, 7):
        module(batch(count)).backward()
    assert len(planner.lowered) == 1
    assert planner.budgets == []


def test_a_larger_call_is_measured_before_it_runs() -> None:
    module, planner = planned(batch(6))
    planner.budget = "min"
    module(batch(9)).backward()
    module(batch(8)).backward()
    module(batch(6)).backward()
    assert len(planner.lowered) == 2


def test_without_a_planner_a_larger_call_differs_from_the_plan() -> None:
    module, _ = planned(batch(6))
    module = ModulesModule(module.module, (batch(6),), {}, plan=module.plan, loss=mean_square)
    module(batch(5)).backward()
    with pytest.raises(ExecutionError, match=r"shapes \[\(70, 16\)\], but the plan was made for \[\(60, 16\)\]"):
        module(batch(7))
    module.on_mismatch = "plain"
    assert module(batch(7)).requires_grad


def test_a_route_that_needs_more_than_predicted_makes_the_plan_stricter(caplog: pytest.LogCaptureFixture) -> None:
    module, planner = planned(batch(8, is_short=True), "min")
    first = module.plan
    with caplog.at_level(logging.WARNING, logger="scheduler"):
        for _ in range(3):
            module(batch(8)).backward()
    assert len(planner.budgets) >= 1
    assert planner.budgets[0] < first.budget_bytes
    assert "more than predicted" in caplog.text


def test_a_plan_that_cannot_be_made_stricter_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    module, planner = planned(batch(8, is_short=True), "min")

    smallest = planner.replan(module.plan, "min")

    def refuse(plan: Plan, budget: int | str) -> Plan:
        if budget != "min":
            raise BudgetTooSmallError("no plan fits")
        return smallest

    planner.replan = refuse
    with caplog.at_level(logging.WARNING, logger="scheduler"):
        for _ in range(5):
            module(batch(8)).backward()
    assert caplog.text.count("no plan fits") == 1
    assert module.plan is smallest


def test_forward_saves_what_is_predicted() -> None:
    module, planner = planned(batch(8))
    x = batch(8)
    tracker = StorageTracker(resident_tensors(module, x))
    with tracker:
        loss = module(x)
    decisions = module.plan.decisions
    recomputed = {decision.call for decision in decisions}
    calls = [call for call in planner.lowered[0].layout.tree.calls if call.decision().call in recomputed]
    random_states = sum(call.copied_bytes for call in calls)  # which no operator returns
    assert tracker.live_bytes + random_states == module.plan.simulation.saved_bytes
    loss.backward()


def test_other_modules_are_a_difference() -> None:
    module, _ = planned(batch(8))
    name = next(iter(module.plan.decisions)).module
    number = int(name.split(".")[1])
    before = module.module.blocks[number]
    module.module.blocks[number] = copy.deepcopy(before)
    module(batch(8)).backward()
    module.module.blocks[number] = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(ExecutionError, match=f'module "blocks.{number}" is a Linear, but was a Sequential'):
        module(batch(8))
    module.module.blocks = nn.ModuleList([before])
    with pytest.raises(ExecutionError, match=r'the model has no module "blocks\.'):
        module(batch(8))


def test_evaluation_and_calls_without_gradients_run_plainly() -> None:
    module, planner = planned(batch(4))
    with torch.no_grad():
        assert not module(batch(9)).requires_grad
    module.eval()
    module(batch(9)).backward()
    assert len(planner.lowered) == 1


def test_a_planned_module_inside_another_follows_the_outer_plan() -> None:
    inner, _ = planned(batch(8))
    outer = nn.Sequential(inner)
    planner = Planner(outer)
    planner.remeasure((batch(8),), {})
    assert not any(call.refusal for call in planner.lowered[0].layout.tree.calls)
