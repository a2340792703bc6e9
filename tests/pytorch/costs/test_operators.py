from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, fx, nn

from scheduler.errors import InvalidOptionError
from scheduler.graph import Operation
from scheduler.pytorch import checkpointed, trace
from scheduler.pytorch.capture.exporting import export_joint
from scheduler.pytorch.capture.instructions import Lowered
from scheduler.pytorch.costs.operators import FLOPS_PER_BYTE, flop_cost, with_costs
from scheduler.pytorch.costs.timing import Trials
from scheduler.pytorch.measurement.memory import FlopCounter, training_step
from scheduler.pytorch.tracing import capture


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


def test_an_elementwise_operation_costs_the_bytes_that_it_moves(calls):
    assert flop_cost(calls["relu"]) == FLOPS_PER_BYTE * 2 * (2 * 8 * 16 * 16 * 4)


def test_flops_come_first_and_moved_bytes_break_ties():
    # Small matrices: moving the bytes of a GELU takes longer than a product. Recomputing all but
    # one GELU frees nearly half of the saved bytes, without a FLOP.
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.GELU())))
    args = (torch.ones(64, 16),)
    planned = checkpointed(model, "70%", args, loss=torch.sum, costs="flops", time_limit=3.0)
    counters = {"plain": FlopCounter(), "planned": FlopCounter()}
    for name, step in {
        "plain": training_step(model, args, loss=torch.sum),
        "planned": training_step(planned, args),
    }.items():
        with counters[name]:
            step()
    assert planned.plan.overhead > 0
    assert counters["planned"].flops == counters["plain"].flops > 0


def test_equal_calls_are_measured_once_and_get_one_time():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    graph = trace(model, (torch.ones(2, 8),), loss=torch.sum)
    assert graph.time_unit == "s"
    times = [operation.time for operation in graph.operations if "addmm" in operation.name]
    assert len(times) == 4
    assert len(set(times)) == 1


def test_workspaces_are_measured_by_default_if_times_are():
    # native_dropout of float32 on CPU takes scratch memory in some form, a matrix product none.
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5))
    for options, expected in (({}, True), ({"costs": "flops"}, False), ({"workspaces": False}, False)):
        graph = trace(model, (torch.ones(64, 64),), loss=torch.sum, **options)
        assert any(operation.workspace_bytes for operation in graph.operations) == expected


def test_times_of_other_sizes_are_scaled_to_the_work_beyond_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(rows: int) -> Lowered:
        return capture(nn.Linear(8, 8, bias=False), (torch.ones(rows, 8),), loss=torch.sum).lowered

    def is_product(operation: Operation) -> bool:
        return "mm" in operation.name

    known, other = lowered(4), lowered(16)
    times = [replace(o, time=5.0 if is_product(o) else 1.0) for o in known.graph.operations]
    known = replace(known, graph=replace(known.graph, operations=times, time_unit="s"))
    monkeypatch.setenv("SCHEDULER_COSTS_FILE", "off")
    monkeypatch.setattr(Trials, "times", None)  # nothing is measured
    graph = with_costs(other, "measured", like=known).graph
    assert graph.time_unit == "s"
    # Products of four times as many rows: 1.0, which every call takes, and four times the other 4.0.
    assert {is_product(o): o.time for o in graph.operations if o.time} == {True: 17.0, False: 1.0}


def test_times_of_a_step_with_other_operators_are_measured() -> None:
    args = (torch.ones(4, 8),)
    known, other = (capture(nn.Linear(8, 8, bias=bias), args, loss=torch.sum).lowered for bias in (True, False))
    assert known.graph.time_unit == "FLOP"
    assert all(o.time < 1.0 for o in with_costs(other, "measured", like=known).graph.operations)  # seconds


def test_unknown_costs_are_refused():
    with pytest.raises(InvalidOptionError, match='"measured", "measured-again", "flops" or a Device'):
        trace(nn.Linear(2, 2), (torch.ones(2, 2),), loss=torch.sum, costs="guessed")
