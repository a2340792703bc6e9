"""Calls that differ from the planned one get their own plan: the numbers of plain autograd, within the budget."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scheduler.errors import BudgetTooSmallError, InvalidOptionError
from scheduler.pytorch import checkpointed
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, training_step
from tests.support.pytorch.planning import check_equal, train
from tests.support.pytorch.regression import batch, mean_square, mlp


def planned_per_call(model: nn.Module, budget: int | str, rows: int, **options: object) -> CheckpointedModule:
    return checkpointed(
        model, budget, (batch(rows, 16),), loss=mean_square, on_mismatch="plan", costs="flops", **options
    )


def plan_count(module: CheckpointedModule) -> int:
    assert module.others is not None
    return 1 + len(module.others.modules)


@pytest.mark.parametrize("granularity", ["operations", "layers"])
def test_each_batch_size_gets_a_plan_and_trains_as_under_autograd(granularity: str) -> None:
    model = mlp(nn.Dropout(0.2), nn.BatchNorm1d(64))
    plain = copy.deepcopy(model)
    module = planned_per_call(model, "200%", 64, granularity=granularity)
    batches = [((batch(rows, 16, seed=rows),), {}) for rows in (64, 48, 96, 48, 64)]
    check_equal(train(module, batches), train(plain, batches, mean_square))
    assert plan_count(module) == 3


def test_every_plan_keeps_the_same_budget_in_bytes() -> None:
    model = mlp(nn.Dropout(0.2))
    largest = checkpointed(model, "80%", (batch(512, 16),), loss=mean_square, costs="flops", time_limit=2.0)
    budget = largest.plan.budget_bytes
    module = planned_per_call(model, budget, 128, time_limit=2.0)
    for rows in (128, 512):
        inputs = (batch(rows, 16),)
        training_step(module, inputs)()  # makes the plan
        with StorageTracker(resident := resident_tensors(module, inputs)) as tracker:
            training_step(module, inputs)()
        assert sum(tensor.untyped_storage().nbytes() for tensor in resident) + tracker.peak_bytes <= budget
    (other,) = module.others.modules
    assert other.plan.overhead > module.plan.overhead == 0
    with pytest.raises(BudgetTooSmallError, match="no schedule fits"):
        module(batch(4096, 16))


def test_training_flags_autocast_and_frozen_parameters_get_plans_of_their_own() -> None:
    model = mlp(nn.Dropout(0.5))
    plain = copy.deepcopy(model)
    module = planned_per_call(model, "200%", 8, solver="save-all")
    x = batch(8, 16)

    def compare() -> None:
        outputs = []
        for target in (module, lambda x: mean_square(plain(x))):
            torch.manual_seed(0)
            outputs.append(target(x))
            outputs[-1].backward()
        assert torch.equal(*outputs)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.equal(ours.grad, theirs.grad), name
            ours.grad = theirs.grad = None

    compare()
    for target in (model, plain):
        target[3].eval()
    compare()
    for target in (model, plain):
        target[0].requires_grad_(False)
    compare()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        compare()
    assert plan_count(module) == 4


@pytest.mark.parametrize(
    ("max_shapes", "expected"),
    [(3, [[9], [9, 10], [10, 9], [9, 11], [9, 11]]), (1, [[], [], [], [], []])],
)
def test_the_least_recently_used_plan_is_dropped(max_shapes: int, expected: list[list[int]]) -> None:
    module = planned_per_call(mlp(), "200%", 8, solver="save-all", max_shapes=max_shapes)
    kept = []
    for rows in (9, 10, 9, 11, 8):
        module(batch(rows, 16)).backward()
        kept.append([other.planned_call.tensors[0][0][0] for other in module.others.modules])
    assert kept == expected


@pytest.mark.parametrize("max_shapes", [0, True, "3", 2.0])
def test_the_number_of_plans_kept_must_be_a_positive_int(max_shapes: object) -> None:
    with pytest.raises(InvalidOptionError, match=f"max_shapes must be an int >= 1, got {max_shapes!r}"):
        planned_per_call(mlp(), "200%", 8, solver="save-all", max_shapes=max_shapes)


def test_planning_other_calls_needs_a_budget() -> None:
    plan = checkpointed(mlp(), "100%", (batch(8, 16),), solver="save-all", costs="flops").plan
    with pytest.raises(InvalidOptionError, match="finished plan"):
        checkpointed(mlp(), plan, (batch(8, 16),), on_mismatch="plan")
