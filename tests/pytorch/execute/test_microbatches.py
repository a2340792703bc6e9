from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import scheduler as sc
from scheduler.pytorch import checkpointed, trace
from scheduler.pytorch.measurement.memory import StorageTracker, storage_bytes
from tests.support.pipelines import one_forward_one_backward
from tests.support.pytorch.regression import mean_square

ROWS, WIDTH, STAGES, MICROBATCHES = 64, 32, 3, 5


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def run(module: nn.Module, model: nn.Module, stage: int) -> tuple[list[Tensor], int]:
    """Run microbatches as 1F1B does at a stage; return the gradients, and the live bytes at the peak."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    running: dict[int, Tensor] = {}
    with StorageTracker(held) as tracker:
        for phase, number in one_forward_one_backward(stage, STAGES, MICROBATCHES):
            if phase == "forward":
                running[number] = module(torch.randn(ROWS, WIDTH))
            else:
                running.pop(number).backward()
    return [parameter.grad for parameter in model.parameters()], storage_bytes(held) + tracker.peak_bytes


@pytest.mark.parametrize("stage", range(STAGES))
def test_a_stage_holds_what_its_plan_claims(stage):
    model, plain, example = network(), network(), torch.randn(ROWS, WIDTH)
    graph = trace(model, (example,), loss=mean_square, costs="flops", accumulate_gradients=True)
    (planned,) = sc.plan_pipeline([graph], "60%", STAGES - stage, time_limit=2.0)
    module = checkpointed(model, planned.plan, (example,), loss=mean_square)
    gradients, peak = run(module, model, stage)
    expected, plain_peak = run(lambda x: mean_square(plain(x)), plain, stage)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    assert 0.9 * planned.peak_bytes < peak <= planned.peak_bytes <= planned.budget_bytes < plain_peak
