"""Which granularity a step is planned at, and what is said about it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from scheduler import Plan
from scheduler.errors import BudgetTooSmallError, CaptureError, InvalidOptionError, PlanMismatchError
from scheduler.pytorch import checkpointed, plan_step
from scheduler.pytorch.execute.runner import CapturedModule
from scheduler.pytorch.modules.module import ModulesModule
from tests.support.pytorch.regression import mean_square

WIDTH = 16


class Block(nn.Module):
    """A residual block; one that branches on a value cannot be captured."""

    def __init__(self, *, branches: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        if self.branches and x.abs().sum().item() > 1e9:
            return x
        return x + self.inner(x)


def make_model(*, branches: bool) -> nn.Module:
    torch.manual_seed(0)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(branches=branches) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    return Stack()


def make_batch(size: int = 32) -> Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(size))


def test_auto_captures_what_can_be_captured():
    module = checkpointed(make_model(branches=False), "min+50%", (make_batch(),), loss=mean_square, costs="flops")
    assert isinstance(module, CapturedModule)
    assert module.plan is not None
    assert module.plan.granularity == "operations"


def test_auto_plans_by_modules_what_cannot_be_captured_and_says_why_with_the_line():
    line = r"test_granularity\.py:\d+: if self\.branches and x\.abs\(\)\.sum\(\)\.item\(\) > 1e9"
    with pytest.warns(UserWarning, match=rf"by modules, because it cannot be planned by operations: .*{line}"):
        module = checkpointed(make_model(branches=True), "min+50%", (make_batch(),), loss=mean_square, verify=True)
    assert isinstance(module, ModulesModule)
    assert module.plan is not None
    assert module.plan.granularity == "modules"
    assert module.plan.overhead > 0
    module(make_batch()).backward()
    assert module.verify(make_batch()).is_equal


def test_all_plans_of_one_module_keep_the_same_bytes():
    module = checkpointed(
        make_model(branches=True), "min+50%", (make_batch(),), loss=mean_square, granularity="modules"
    )
    first = module.plan
    module(make_batch(34)).backward()
    second = module.plan
    assert first is not None
    assert second is not None
    assert second.budget_bytes == first.budget_bytes >= second.peak_bytes
    assert second.graph.digest != first.graph.digest
    with pytest.raises(BudgetTooSmallError):
        module(make_batch(320))


def test_a_finished_plan_by_modules_is_followed_from_its_file(tmp_path):
    model = make_model(branches=True)
    made = checkpointed(model, "min+50%", (make_batch(),), loss=mean_square, granularity="modules").plan
    assert made is not None
    made.save(tmp_path / "plan.json")
    module = checkpointed(model, Plan.load(tmp_path / "plan.json"), (make_batch(),), loss=mean_square)
    assert isinstance(module, ModulesModule)
    assert module.plan == made
    assert module.verify(make_batch()).is_equal


def test_a_plan_alone_is_made_at_any_granularity():
    captured = plan_step(make_model(branches=False), "80%", (make_batch(),), loss=mean_square, costs="flops")
    assert captured.granularity == "operations"
    layers = plan_step([nn.Linear(WIDTH, WIDTH), nn.Tanh()], "100%", (make_batch(),), loss=mean_square)
    assert layers.granularity == "layers"
    model = make_model(branches=True)
    with pytest.warns(UserWarning, match="planned by modules"):
        plan = plan_step(model, "min+50%", (make_batch(),), loss=mean_square)
    assert plan.granularity == "modules"
    assert checkpointed(model, plan, (make_batch(),), loss=mean_square).plan == plan


def test_a_plan_of_another_granularity_is_no_plan_by_modules():
    model = make_model(branches=False)
    plan = checkpointed(model, "100%", (make_batch(),), loss=mean_square, costs="flops").plan
    assert plan is not None
    with pytest.raises(PlanMismatchError, match='must be of granularity "modules", got "operations"'):
        checkpointed(model, plan, (make_batch(),), loss=mean_square, granularity="modules")


def test_a_list_of_layers_is_no_module():
    with pytest.raises(InvalidOptionError, match=r'"modules" needs an nn\.Module, got list'):
        checkpointed([nn.Linear(4, 4)], "60%", (torch.zeros(2, 4),), granularity="modules")


def test_what_no_granularity_can_plan_is_refused_with_the_first_reason():
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(CaptureError, match=re.escape("no parameter and no input requires a gradient")):
        checkpointed(model, "60%", (torch.zeros(2, 4),), loss=mean_square)


class FlexAttention(nn.Module):
    """Two blocks of attention with a bias for the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            query, key, value = block(x).view(2, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
            x = x + flex_attention(query, key, value, score_mod=_nearer).transpose(1, 2).reshape(x.shape)
        return x.square().mean()


def _nearer(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - 0.1 * (query - key).abs()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore::UserWarning")  # of flex_attention, that a compiled call is faster
@pytest.mark.parametrize("granularity", ["auto", "operations", "modules"])
def test_flex_attention_is_refused_and_the_model_runs_as_before(
    granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)  # refuses CPUs
    model, x = FlexAttention(), torch.randn(2, 128, 32)
    with pytest.raises(CaptureError, match="FlexAttention, which cannot be planned: PyTorch runs it only compiled"):
        checkpointed(model, "min", (x,), granularity=granularity, costs="flops")
    model(x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
