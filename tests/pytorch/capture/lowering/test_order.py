"""The order and the meaning of the operations that a joint graph becomes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler.graph import Graph
from scheduler.pytorch import trace


class Shifting(nn.Module):
    """Reads a buffer, changes it, reads the new value, and has a random call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x * self.weight + self.shift)
        with torch.no_grad():
            self.shift.mul_(2).add_(x.mean(0))
        return F.dropout(y, 0.5, self.training).sum()


def traced() -> Graph:
    return trace(Shifting(), (torch.ones(3, 4),), costs="flops", accumulate_gradients=True)


def test_the_step_around_the_calls_is_in_order():
    kinds = [operation.kind for operation in traced().operations if operation.kind]
    assert kinds == ["snapshot", "update", "save random state", "return", "tangents", "accumulate"]


def test_an_old_value_is_saved_before_its_first_reader_and_replaced_after_its_last():
    graph = traced()
    names = [operation.name for operation in graph.operations]
    readers = [i for i, op in enumerate(graph.operations) if "snapshot:shift" in op.inputs and op.phase == "forward"]
    assert names.index("snapshot:shift") == readers[0] - 1
    new_value = next(op for op in graph.operations if op.name == "update:shift").inputs[0]
    produced = next(i for i, op in enumerate(graph.operations) if new_value in op.outputs)
    assert names.index("update:shift") == max(produced, *readers) + 1


def test_an_accumulated_gradient_is_freed_and_added_to_the_existing_one():
    graph = traced()
    (accumulate,) = (operation for operation in graph.operations if operation.kind == "accumulate")
    gradient, existing = accumulate.inputs
    assert graph.tensor(gradient).role == graph.tensor(existing).role == "gradient"
    assert existing in graph.resident
    assert gradient not in graph.results


def test_roles_are_those_of_the_step():
    roles = {tensor.name: tensor.role for tensor in traced().tensors}
    expected = {
        "parameter:weight": "parameter",
        "buffer:shift": "buffer",
        "input:args[0]": "input",
        "gradient:weight": "gradient",
        "state 1": "random state",
        "tangent 0": "gradient",
        "sum_1:returned": "output",
        "sin": "activation",
    }
    assert {name: roles[name] for name in expected} == expected
