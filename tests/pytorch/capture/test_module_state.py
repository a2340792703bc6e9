"""Modules that keep state between calls are refused if a step depends on it, and are left as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError, ExecutionError
from scheduler.pytorch import checkpointed, profile_layers, trace
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.tracing import capture
from tests.support.pytorch.planning import check_equal, recompute_most, train
from tests.support.pytorch.regression import batch, mean_square


class Keeping(nn.Module):
    """A linear layer with state; subclasses decide which."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.kept: object = None


class KeepsList(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = []

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(self.linear(x).tanh())
        return torch.stack(self.kept).sum(0)


class KeepsSum(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.kept = y.detach() if self.kept is None else self.kept + y.detach()
        return y + self.kept


class KeepsCount(Keeping):
    """Its output grows with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return torch.cat([self.linear(x)] * self.kept)


class KeepsBuffer(Keeping):
    def __init__(self) -> None:
        super().__init__()
        del self.kept

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.register_buffer("kept", y.detach() + getattr(self, "kept", 0))
        return y * self.kept


KEEPING = [KeepsList, KeepsSum, KeepsCount, KeepsBuffer]


@pytest.mark.parametrize("kind", KEEPING)
def test_a_step_that_depends_on_those_before_it_is_refused_and_leaves_nothing_behind(kind: type[Keeping]) -> None:
    model = kind()
    before = dict(vars(model))
    with pytest.raises(CaptureError, match=r"forward changes .*kept.*Pass it as an argument and return it"):
        trace(model, (batch(4, 8),), loss=mean_square, costs="flops")
    assert vars(model) == before
    assert model.kept in ([], None, 0) if hasattr(model, "kept") else kind is KeepsBuffer
    model(batch(4, 8)).sum().backward()


def test_a_sum_that_exists_already_is_refused_as_well():
    model = KeepsSum()
    model(batch(4, 8))
    kept = model.kept
    with pytest.raises(CaptureError, match="forward changes kept"):
        trace(model, (batch(4, 8),), loss=mean_square, costs="flops")
    assert model.kept is kept


@pytest.mark.parametrize("kind", KEEPING[:3])
def test_a_layer_that_depends_on_how_often_it_ran_is_refused(kind: type[Keeping]) -> None:
    layers = [nn.Linear(8, 8), kind()]
    with pytest.raises(ExecutionError, match=r"forward changes 1.Keeps\w+.kept"):
        profile_layers(layers, (batch(4, 8),), loss=mean_square)
    assert layers[1].kept in ([], None, 0)


class KeepsOutput(Keeping):
    """Writes state that is written again before anything reads it, such as an extra output."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = self.linear(x).tanh()
        return self.linear(x) + self.kept.sin()


@pytest.mark.parametrize("calls", [0, 1])
def test_state_that_a_step_writes_before_it_reads_does_not_matter(calls: int) -> None:
    model, plain = KeepsOutput(), KeepsOutput()
    for _ in range(calls):
        model(batch(4, 8)).sum()
    kept = model.kept
    captured = capture(model, (batch(4, 8),), None, mean_square)
    assert model.kept is kept
    module = build(model, captured, recompute_most(captured.graph), (batch(4, 8),), loss=mean_square)
    batches = [((batch(4, 8, seed=seed),), {}) for seed in (1, 2)]
    check_equal(train(module, batches), train(plain, batches, mean_square))


class OnlyCounts(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = 0

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return self.linear(x).tanh()


@pytest.mark.parametrize("granularity", ["operations", "layers"])
def test_a_number_that_only_counts_does_not_matter(granularity: str) -> None:
    model, plain = OnlyCounts(), OnlyCounts()
    layers = model if granularity == "operations" else [model]
    module = checkpointed(
        layers, "100%", (batch(4, 8),), loss=mean_square, granularity=granularity, costs="flops", solver="save-all"
    )
    assert model.kept == 0
    assert torch.equal(module(batch(4, 8, seed=1)), mean_square(plain(batch(4, 8, seed=1))))


class Warms(Keeping):
    """Reads the number that it changes: its output is larger with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 0.5
        return self.linear(x) * self.kept


@pytest.mark.parametrize("granularity", ["operations", "layers"])
def test_a_number_that_a_step_reads_and_changes_is_refused(granularity: str) -> None:
    layers = Warms() if granularity == "operations" else [Warms()]
    with pytest.raises((CaptureError, ExecutionError), match=r"forward changes .*kept"):
        checkpointed(layers, "100%", (batch(4, 8),), loss=mean_square, granularity=granularity, costs="flops")


class FillsOnce(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = torch.arange(8.0)
        return self.linear(x) * self.kept


def test_a_cache_that_is_filled_once_is_read_as_a_constant_once_it_is_there():
    model, plain = FillsOnce(), FillsOnce()
    with pytest.raises(CaptureError, match="call the model once before planning"):
        trace(model, (batch(4, 8),), loss=mean_square, costs="flops")
    model(batch(4, 8))
    for granularity, layers in (("operations", model), ("layers", [model])):
        module = checkpointed(
            layers, "100%", (batch(4, 8),), loss=mean_square, granularity=granularity, costs="flops", solver="save-all"
        )
        loss = module(batch(4, 8, seed=1))
        assert torch.equal(loss, mean_square(plain(batch(4, 8, seed=1))))
