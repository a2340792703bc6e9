from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn

import scheduler as sc
from scheduler.errors import BudgetTooSmallError, InvalidOptionError, OutOfTimeError, UnknownModelError
from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, training_step
from scheduler.pytorch.models.catalog import ModelCase, make_model, model_names
from tests.support.pytorch.planning import (
    SCHEDULES,
    Comparison,
    check_equal,
    recompute_most,
    train_with_optimizer,
)
from tests.support.pytorch.small_models import SMALL, small_model

pytestmark = pytest.mark.long(30)


def schedule_within(graph: sc.Graph, budget: str) -> sc.Schedule:
    """Return a schedule within a budget or, if none is known, within the smallest known peak."""
    try:
        plan = sc.make_plan(graph, budget, time_limit=1.0)
    except (BudgetTooSmallError, OutOfTimeError):
        smallest = sc.minimum_budget(graph, time_limit=1.0)
        assert smallest.floor_bytes <= smallest.peak_bytes
        assert smallest.peak_bytes > sc.solve(graph, budget, solver="save-all").budget_bytes
        plan = sc.make_plan(graph, smallest.peak_bytes, time_limit=10.0)
    assert sc.simulate(graph, plan.schedule).peak_bytes <= plan.budget_bytes
    return plan.schedule


WAYS = SCHEDULES | {budget: functools.partial(schedule_within, budget=budget) for budget in ("80%", "60%")}


@functools.cache  # the models are small
def comparison(name: str) -> Comparison:
    # With a smaller batch, the gradients alone are more than 60 % of the memory of a ResNet's step.
    case = small_model(name, **{"batch_size": 16} if name == "resnet50" else {})
    return Comparison(case.module, case.batch(1), case.batch(2), loss=case.loss)


@pytest.mark.parametrize("schedule", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", SMALL)
def test_a_model_trains_like_autograd_in_the_predicted_memory(name, schedule):
    comparison(name).check(schedule)


@pytest.mark.parametrize("name", SMALL)
def test_a_loop_with_an_optimizer_and_a_learning_rate_schedule_follows_the_plan(name):
    compared = comparison(name)
    module = compared.planned(recompute_most(compared.captured.graph))  # any mismatch is an error
    plain = copy.deepcopy(compared.model)
    outcome = train_with_optimizer(module, compared.batches, steps=3)
    check_equal(outcome, train_with_optimizer(plain, compared.batches, compared.loss, steps=3))
    assert all(map(torch.equal, module.parameters(), plain.parameters()))


@pytest.mark.parametrize("budget", ["80%", "60%"])
@pytest.mark.parametrize("name", ["convnet", "unet"])
def test_a_budget_is_never_exceeded(name, budget):
    case = small_model(name)
    module = checkpointed(case.module, budget, case.args, solver="greedy", costs="flops", time_limit=2.0)
    with StorageTracker(resident_tensors(module, case.args)) as tracker:
        training_step(module, case.args)()
    measured = module.plan.graph.resident_bytes + tracker.peak_bytes
    assert measured == module.plan.peak_bytes
    assert measured <= module.plan.budget_bytes


@pytest.mark.parametrize("name", ["gpt2", "resnet50", "convnet"])
def test_the_layers_of_a_model_are_the_model(name):
    case = small_model(name)
    layered = case.layered()
    assert len(layered.module) >= 4
    losses, gradients = [], []
    for module, args in ((case.module, case.args), (layered.module, layered.args)):
        torch.manual_seed(3)
        module.zero_grad()
        loss = module(*args)
        loss.backward()
        losses.append(loss)
        gradients.append([parameter.grad.clone() for parameter in case.module.parameters()])
    assert torch.equal(*losses)
    assert all(map(torch.equal, *gradients))


def test_a_model_that_is_not_a_sequence_of_layers_is_rejected():
    with pytest.raises(InvalidOptionError, match=r'"unet" is not a sequence of layers.*plan its operations'):
        small_model("unet").layered()


def test_every_named_model_is_tested():
    assert set(model_names()) <= set(SMALL)


def test_batches_differ_by_seed_and_weights_by_the_models_seed():
    case = make_model("convnet", batch_size=2, width=4, depth=2, size=8)
    (one, _), (other, _) = case.batch(1)[0], case.batch(2)[0]
    assert one.shape == other.shape
    assert not torch.equal(one, other)
    assert torch.equal(case.batch(1)[0][0], one)
    weights = [
        make_model("convnet", seed=seed, batch_size=2, width=4, depth=2, size=8).module.classifier.weight
        for seed in (0, 0, 1)
    ]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_making_a_model_does_not_draw_from_the_global_generator():
    state = torch.get_rng_state()
    make_model("convnet", batch_size=2, width=4, depth=2, size=8)
    assert torch.equal(torch.get_rng_state(), state)


def make_linear(size: int = 3) -> ModelCase:
    return ModelCase(nn.Linear(size, 1), (torch.ones(2, size),), loss=torch.sum)


def make_tuple() -> tuple[nn.Module, tuple[object, ...], None, object]:
    return nn.Linear(3, 1), (torch.ones(2, 3),), None, torch.sum


def make_none() -> None:
    return None


def test_a_factory_is_found_by_its_path():
    case = make_model(f"{__name__}:make_linear", size=5)
    assert case.module.in_features == 5
    assert make_model(f"{__name__}:make_tuple").loss is torch.sum


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt9", "the names are gpt2, resnet50, unet, convnet"),
        ("no_such_package:make", "cannot find"),
        (f"{__name__}:missing", "cannot find"),
        (f"{__name__}:SMALL", "not callable"),
    ],
)
def test_an_unknown_model_is_rejected_with_the_known_names(name, message):
    with pytest.raises(UnknownModelError, match=message):
        make_model(name)


def test_a_factory_that_returns_no_model_is_rejected():
    with pytest.raises(InvalidOptionError, match=r"must return a ModelCase or \(module, args\).*got NoneType"):
        make_model(f"{__name__}:make_none")


def test_options_that_a_factory_does_not_take_are_rejected():
    with pytest.raises(InvalidOptionError, match="color"):
        make_model("convnet", color="red")


def test_a_case_without_other_batches_raises_an_error_when_asked_for_one():
    with pytest.raises(InvalidOptionError, match="only one batch"):
        make_linear().batch(1)
