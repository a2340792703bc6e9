"""Plans under Inductor: gradients, and the memory held between forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from scheduler.pytorch import backend
from scheduler.pytorch.measurement.memory import resident_tensors, storage_bytes
from scheduler.simulator import simulate
from tests.support.pytorch.regression import batch, mean_square

# Importing Inductor emits warnings about its own use of torch.jit.
pytestmark = [
    pytest.mark.long(40),
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning"),
]


class Changing(nn.Module):
    """Reads a buffer that the backward needs and changes it; has batch norm and optional dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.dropout = dropout
        self.register_buffer("shift", batch(64, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.norm(self.first(x)) + self.shift)
        hidden = nn.functional.dropout(hidden, self.dropout, self.training)
        hidden = torch.sin(self.second(hidden) + self.shift)
        with torch.no_grad():
            self.shift.mul_(0.5)
        return mean_square(hidden)


def held_bytes(loss: Tensor, module: nn.Module, x: Tensor) -> int:
    """Return the bytes that autograd's node and the loss hold in addition to the resident tensors."""
    resident = resident_tensors(module, x)
    return storage_bytes([*resident, *loss.grad_fn.saved_tensors, loss]) - storage_bytes(resident)


def check_gradients(module: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    for (name, ours), theirs in zip(module.named_buffers(), reference.named_buffers(), strict=True):
        torch.testing.assert_close(ours, theirs[1], msg=name)


def test_a_buffer_read_and_then_changed_gives_the_gradients_of_autograd_at_each_batch_size():
    torch.manual_seed(0)
    module = Changing().double()
    plain = copy.deepcopy(module)
    planned = backend("80%", compiler="inductor", solver="greedy", time_limit=2.0)
    compiled = torch.compile(module, backend=planned)
    held = []
    for size in (256, 192):
        x = batch(size, 16).double()
        losses = [compiled(x), plain(x)]
        held.append(held_bytes(losses[0], module, x))
        for target, loss in zip((module, plain), losses, strict=True):
            target.zero_grad()
            loss.backward()
        check_gradients(module, plain)
    assert [graph.saved_bytes for graph in planned.plans] == held
    for graph in planned.plans:
        assert sum(simulate(graph.plan.graph, graph.plan.schedule).recomputed.values()) > 0


class Convolving(nn.Module):
    """A residual block; by default Inductor would save its input and weights in another layout than they have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return mean_square(torch.relu(x + self.second(torch.relu(self.norm(self.first(x))))))


def test_convolutions_save_the_planned_tensors_and_no_copies_in_another_layout():
    torch.manual_seed(0)
    module = Convolving().double()
    plain = copy.deepcopy(module)
    planned = backend("100%", compiler="inductor", solver="save-all")
    x = batch(4, 4, 16, 16).double()
    losses = [torch.compile(module, backend=planned)(x), plain(x)]
    (graph,) = planned.plans
    assert held_bytes(losses[0], module, x) == graph.saved_bytes
    for loss in losses:
        loss.backward()
    check_gradients(module, plain)


def test_random_draws_equal_those_of_inductor_and_are_not_repeated():
    torch.manual_seed(0)
    module = Changing(dropout=0.4).double()
    reference = copy.deepcopy(module)
    x = batch(256, 16).double()
    losses = []
    with torch.no_grad():
        module.shift.zero_()  # stock Inductor reads it after the change, which is then harmless
        reference.shift.zero_()
    planned = backend("80%", compiler="inductor", solver="greedy", time_limit=2.0)
    for compiled in (torch.compile(module, backend=planned), torch.compile(reference)):
        torch.manual_seed(1)
        losses.append(compiled(x))
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    check_gradients(module, reference)
    graph = planned.plans[0].plan.graph
    draws = [operation for operation in graph.operations if "inductor_seeds" in operation.signature]
    assert draws
    assert not any(operation.repeatable for operation in draws)
