from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.pytorch import checkpointed, plan_step
from scheduler.pytorch.integrations.planned_forward import PlannedForward
from scheduler.pytorch.modules.measuring.recording import record
from tests.support.pytorch.regression import mean_square

OPTIONS = {"costs": "flops", "time_limit": 5.0}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x).tanh())
        return x * scale


def batch(rows: int = 96) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))


def gradients(model: nn.Module, *calls: tuple[Tensor, float]) -> list[Tensor]:
    torch.manual_seed(1)
    model.zero_grad()
    for x, scale in calls:
        model(x, scale=scale).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_planned_forward_replaces_the_modules_own_until_it_is_removed():
    model, plain, seen = Network(), Network(), []
    names, own = list(model.state_dict()), vars(model).copy()
    model.register_forward_hook(lambda *_: seen.append("hook"))
    forward = PlannedForward(model, "70%", **OPTIONS)
    found, expected = gradients(model, (batch(), 2.0)), gradients(plain, (batch(), 2.0))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert forward.planned is not None
    assert seen == ["hook"]
    assert list(model.state_dict()) == names
    forward.remove()
    assert vars(model).keys() == own.keys()
    assert type(model.forward.__func__) is type(Network.forward)


def test_calls_with_other_shapes_get_their_own_plans():
    model, plain = Network(), Network()
    forward = PlannedForward(model, "90%", **OPTIONS)
    calls = [(batch(96), 1.0), (batch(64), 1.0), (batch(96), 3.0), (batch(64), 1.0)]
    found, expected = gradients(model, *calls), gradients(plain, *calls)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(forward.planned.others.modules) == 2


def test_evaluation_runs_the_original_forward():
    model = Network()
    forward = PlannedForward(model, "70%", **OPTIONS)
    expected = copy.deepcopy(Network()).eval()(batch())
    assert torch.equal(model.eval()(batch()), expected)
    with torch.no_grad():
        model.train()(batch())
    assert forward.planned is None
    with pytest.raises(ExecutionError, match="was not called in training"):
        forward.check_applied()


def test_a_forward_that_was_already_replaced_is_restored():
    model = Network()
    model.forward = lambda x: x * sum(p.sum() for p in model.parameters())
    before = model.forward
    forward = PlannedForward(model, "100%", **OPTIONS)
    expected = before(batch())
    assert torch.equal(model(batch()), expected)
    assert forward.planned is not None
    forward.remove()
    assert model.forward is before


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.mix((x @ x.mT).softmax(-1) @ x)


def test_announced_lengths_are_planned_at_the_first_call_the_longest_first():
    model, plain = Reader(), Reader()
    forward = PlannedForward(model, "100%", lengths=[4, 8, 6], solver="save-all", **OPTIONS)
    made = []
    for length in (6, 4, 5, 8):
        tokens = torch.arange(2 * length).view(2, length) % 11
        for module in (model, plain):
            module(tokens).square().mean().backward()
        planned = forward.planned
        made.append([entry.planned_call.tensors[0].shape[1] for entry in (planned, *planned.others.modules)])
    assert made == [[8, 4, 6], [8, 6, 4], [8, 6, 4, 5], [8, 6, 4, 5]]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Branching(Reader):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens if tokens.max().item() > 99 else super().forward(tokens)


@pytest.mark.parametrize(("lengths", "measured"), [(None, 3), ([4, 8, 6], 1)])
def test_a_plan_by_modules_is_measured_for_the_longest_calls_so_far(lengths, measured):
    model, plain = Branching(), Reader()
    options = OPTIONS if lengths is None else {**OPTIONS, "lengths": lengths}
    forward = PlannedForward(model, "min+50%", granularity="modules", **options)
    with mock.patch("scheduler.pytorch.modules.planner.record", wraps=record) as counted:
        for length in (5, 4, 6, 4, 8, 7, 8, 5):
            tokens = torch.arange(2 * length).view(2, length) % 11
            for module in (model, plain):
                module(tokens).square().mean().backward()
    assert counted.call_count == measured
    assert forward.planned.plan.granularity == "modules"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_what_cannot_be_captured_is_planned_by_modules():
    model = Branching()
    forward = PlannedForward(model, "min+50%", **OPTIONS)
    with pytest.warns(UserWarning, match="planned by modules, because"):
        model(torch.ones(2, 4, dtype=torch.long)).sum().backward()
    assert forward.planned.plan.granularity == "modules"


def test_a_plan_by_modules_is_for_the_model_itself_and_for_its_forward_alike():
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))), batch()
    plan = plan_step(model, "min", (x,), loss=mean_square, granularity="modules")
    forward = PlannedForward(model, plan, loss=mean_square)
    model(x).backward()
    assert forward.planned.plan.decisions == plan.decisions != ()
    forward.remove()
    forward = PlannedForward(model, "min", loss=mean_square, granularity="modules")
    model(x).backward()
    forward.remove()
    made = forward.planned.plan
    assert made.graph.name == "Sequential"
    assert {decision.module for decision in made.decisions} <= {name for name, _ in model.named_modules()}
    checkpointed(model, made, (x,), loss=mean_square)(x).backward()


def test_a_granularity_that_trainers_do_not_know_is_rejected():
    forward = PlannedForward(Reader(), "100%", granularity="layers", **OPTIONS)
    with pytest.raises(InvalidOptionError, match='"auto", "operations" or "modules", got \'layers\''):
        forward.module(torch.ones(2, 4, dtype=torch.long))


def test_lengths_without_further_plans_are_rejected():
    forward = PlannedForward(Reader(), "100%", lengths=[4], on_mismatch="plain", **OPTIONS)
    with pytest.raises(InvalidOptionError, match='only on_mismatch="plan" makes plans for other lengths'):
        forward.module(torch.ones(2, 4, dtype=torch.long))
