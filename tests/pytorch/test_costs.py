from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from scheduler.errors import InvalidOptionError
from scheduler.pytorch.costs import FLOPS_PER_BYTE, flop_cost, measure_call, time_function
from scheduler.pytorch.joint import export_joint


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        y = self.convolution(x).relu()
        return torch.dropout(y.mean((2, 3)), 0.5, True).sum() + self.embedding(tokens).sum()


@pytest.fixture(scope="module")
def calls() -> dict[str, fx.Node]:
    joint = export_joint(Layer(), (torch.ones(2, 3, 16, 16), torch.zeros(4, dtype=torch.long)), {}, None)
    return {node.name: node for node in joint.module.graph.nodes if node.op == "call_function"}


def test_flops_of_a_convolution_are_exact(calls):
    # 2 FLOPs for each of batch, output channel, pixel, input channel and tap.
    assert flop_cost(calls["convolution"]) == 2 * 2 * 8 * 16 * 16 * 3 * 9


def test_an_elementwise_operation_costs_the_bytes_it_moves(calls):
    assert flop_cost(calls["relu"]) == FLOPS_PER_BYTE * 2 * (2 * 8 * 16 * 16 * 4)


def test_every_call_can_be_measured_without_touching_the_random_state(calls):
    state = torch.get_rng_state()
    for node in calls.values():
        if node.target.__module__ != "_operator":
            assert 0 < measure_call(node) < 1
    assert torch.equal(torch.get_rng_state(), state)


def test_equal_calls_are_measured_once_and_get_one_time():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    joint = export_joint(model, (torch.ones(2, 8),), {}, torch.sum)
    calls = [node for node in joint.module.graph.nodes if node.op == "call_function"]
    time_of, unit = time_function("measured", calls)
    assert unit == "s"
    assert len({time_of(node) for node in calls if node.name.startswith("addmm")}) == 1


def test_unknown_costs_are_refused():
    with pytest.raises(InvalidOptionError, match='"measured" or "flops"'):
        time_function("guessed", [])
