"""A region that keeps expensive results runs their operators once, and is otherwise like any other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scheduler.errors import ExecutionError
from scheduler.graph.decisions import Decision
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors
from scheduler.pytorch.modules.recomputation.kept_results import KeepResults, UseResults
from scheduler.pytorch.modules.replay import Replay
from scheduler.pytorch.torch_private.autograd import TorchDispatchMode


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


class Layer(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.linear(x)).exp()


def compare(inner: Callable[[Tensor], Tensor], *, keeps_expensive: bool = True) -> Counter[str]:
    """Check that a recomputed layer has the gradients of a plain one, and return the operators of the step."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(inner)), torch.randn(3, 8, requires_grad=True)
    torch.manual_seed(1)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with Counting() as counting:
        with Replay(model, [Decision("0", 0, keeps_expensive)]).following():
            loss = model(x).sum()
        found = torch.autograd.grad(loss, [x, *model.parameters()])
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    return counting.counts


def test_expensive_operators_run_once() -> None:
    assert compare(torch.tanh)["aten::addmm"] == 1
    assert compare(torch.tanh)["aten::tanh"] == 2
    assert compare(torch.tanh, keeps_expensive=False)["aten::addmm"] == 2


def test_results_that_are_changed_in_place_are_computed_again() -> None:
    assert compare(torch.relu_)["aten::addmm"] == 2


def test_random_operators_in_between_draw_the_same() -> None:
    assert compare(lambda x: F.dropout(x, 0.5) @ F.dropout(x.T, 0.5))["aten::mm"] == 5  # four are in the backward


def test_attention_with_dropout_draws_the_same() -> None:
    def attend(x: Tensor) -> Tensor:
        heads = x.view(1, 1, 3, 8)
        return F.dropout(F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.3), 0.5)

    compare(attend)


def test_only_expensive_results_and_inputs_are_held() -> None:
    model, x = nn.Sequential(Layer(torch.tanh), nn.Linear(8, 1)), torch.randn(3, 8)
    tracker = StorageTracker(resident_tensors(model, x))
    with tracker, Replay(model, [Decision("0", 0, keeps_expensive=True)]).following():
        output = model(x)
    assert tracker.live_bytes == 4 * (3 * 8 + 3 * 8 + 3)  # result of the product, input of the head, output
    output.sum().backward()


def test_nothing_is_kept_once_the_call_has_been_recomputed() -> None:
    x, kept = torch.randn(3, 3), KeepResults()
    with kept:
        (x @ x).tanh() @ x
    assert len(kept.results) == 2
    with UseResults(kept, "m"):  # which ends early, as torch does once everything is saved again
        x @ x
    assert kept.results == {}


def test_results_that_are_changed_in_place_are_not_kept() -> None:
    x, kept = torch.randn(3, 3), KeepResults()
    with kept:
        (x @ x).relu_()
    assert kept.results == {}


def test_a_graph_that_is_kept_is_recomputed_again() -> None:
    model, x = nn.Sequential(Layer(torch.tanh)), torch.randn(3, 8, requires_grad=True)
    with Replay(model, [Decision("0", 0, keeps_expensive=True)]).following():
        loss = model(x).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_another_route_in_the_recomputation_is_named() -> None:
    routes = iter([torch.tanh, lambda x: x.detach() @ torch.eye(8)])
    model = nn.Sequential(Layer(lambda x: next(routes)(x)))
    with Replay(model, [Decision("0", 0, keeps_expensive=True)]).following():
        loss = model(torch.randn(3, 8)).sum()
    with pytest.raises(ExecutionError, match=r'recomputing a call of "0" runs aten\.mm'):
        loss.backward()


def gated(y: Tensor) -> Tensor:
    """Change a part of a result in place without changing its version, as the cells of GRU and LSTM do."""
    gate, value = y.unsafe_chunk(2, 1)
    return gate.sigmoid_() * value


def test_results_that_change_without_a_new_version_are_computed_again() -> None:
    assert compare(gated)["aten::addmm"] == 2


def test_a_cell_that_keeps_expensive_results_has_the_gradients_of_a_plain_one() -> None:
    torch.manual_seed(0)
    cell, x = nn.GRUCell(4, 4), torch.randn(2, 4)
    expected = torch.autograd.grad(cell(cell(x)).square().sum(), [*cell.parameters()])
    model = nn.Sequential(cell, cell)
    with Replay(model, [Decision("0", number, keeps_expensive=True) for number in range(2)]).following():
        loss = model(x).square().sum()
    assert all(map(torch.equal, torch.autograd.grad(loss, [*cell.parameters()]), expected))
