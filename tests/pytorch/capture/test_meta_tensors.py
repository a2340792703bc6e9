"""Models that have no data, on device "meta" or fake: captured, planned, and refused where data is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler import make_plan
from scheduler.errors import CaptureError
from scheduler.graph import Graph
from scheduler.pytorch import checkpointed, max_batch, profile_layers, trace
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.networks import GPT2, ConvNet
from scheduler.pytorch.torch_private.tensors import FakeTensorMode

WITHOUT_DATA: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "meta": lambda: torch.device("meta"),
    "fake": FakeTensorMode,
}


def _language_model() -> tuple[nn.Module, tuple[Tensor, ...], None]:
    tokens = torch.zeros(2, 9, dtype=torch.long)
    return GPT2(1, 16, 2, 32, 8, 0.1), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), None


def _image_model() -> tuple[nn.Module, tuple[Tensor, ...], None]:
    return ConvNet(4, 2, 8, 10), (torch.zeros(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)), None


class _Scaled(nn.Module):
    """Reads a tensor that is not registered, and a length from the device of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = [torch.ones(4)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.scale[0]) + torch.arange(4, device=x.device)


def _held_tensors() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Tensor], Tensor]]:
    batch = {"target": torch.zeros(2, dtype=torch.long)}
    return _Scaled(), (torch.zeros(2, 4),), lambda y: F.nll_loss(y.log_softmax(1), batch["target"])


CASES = {"tied weights": _language_model, "batch norm": _image_model, "unregistered tensors": _held_tensors}


def _trace(case: str) -> Graph:
    model, args, loss = CASES[case]()
    return trace(model, args, loss=loss, costs="flops")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("without_data", WITHOUT_DATA)
def test_a_model_without_data_has_the_graph_of_the_real_one(case: str, without_data: str) -> None:
    with WITHOUT_DATA[without_data]():
        model, args, loss = CASES[case]()
    tensors = resident_tensors(model, args)
    graph = trace(model, args, loss=loss, costs="flops")
    assert graph.digest == _trace(case).digest
    assert all(now is before for now, before in zip(resident_tensors(model, args), tensors, strict=True))


def test_a_plan_made_on_device_meta_trains_the_real_model() -> None:
    with torch.device("meta"):
        model, args, _ = _image_model()
    plan = make_plan(trace(model, args, costs="flops"), "min+50%", solver="greedy", time_limit=2)
    assert plan.overhead > 0
    model, args, _ = _image_model()
    step = training_step(checkpointed(model, plan, args), args)
    resident = resident_tensors(model, args)
    with StorageTracker(resident) as tracker:
        step()
    assert storage_bytes(resident) + tracker.peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("granularity", ["auto", "modules", "layers"])
@pytest.mark.parametrize("without_data", WITHOUT_DATA)
def test_a_model_without_data_is_not_trained(without_data: str, granularity: str) -> None:
    with WITHOUT_DATA[without_data]():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        x = torch.zeros(2, 4)
    with pytest.raises(CaptureError, match=rf"cannot be trained: .*{without_data}.*make_plan\(trace\(model"):
        checkpointed(model, "60%", (x,), loss=torch.sum, granularity=granularity)


class _Refusing(nn.Module):
    """Makes a tensor that does not depend on its parameters, uses it with one, and refuses its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        added = self.positions(torch.arange(4, device=self.positions.weight.device))
        raise ValueError(f"the first token is missing in a tensor of {(x + added).dim()} dimensions")


@pytest.mark.parametrize("without_data", WITHOUT_DATA)
def test_a_model_that_fails_by_itself_says_why_without_data_too(without_data: str) -> None:
    with WITHOUT_DATA[without_data]():
        model, x = _Refusing(), torch.zeros(4, 4)
    with pytest.raises(CaptureError, match="the first token is missing in a tensor of 2 dimensions"):
        trace(model, (x,), costs="flops")


def test_a_real_model_is_not_trained_on_arguments_without_data() -> None:
    with pytest.raises(CaptureError, match=r'a tensor of shape \(2, 4\) is on device "meta"'):
        checkpointed(nn.Linear(4, 4), "60%", (torch.zeros(2, 4, device="meta"),), loss=torch.sum)


def test_layers_without_data_are_not_measured() -> None:
    with pytest.raises(CaptureError, match="cannot be measured by layers"):
        profile_layers([nn.Linear(4, 4, device="meta")], (torch.zeros(2, 4, device="meta"),), loss=torch.sum)


def test_the_largest_batch_is_that_of_the_real_model() -> None:
    sizes = []
    for device in ("meta", "cpu"):

        def batch(size: int, device: str = device) -> tuple[tuple[object, ...], dict[str, object]]:
            return (torch.zeros(size, 8, device=device),), {}

        model = nn.Sequential(nn.Linear(8, 8, device=device), nn.Tanh())
        options = {"loss": torch.sum, "costs": "flops", "solver": "greedy", "time_limit": 0.2}
        sizes.append(max_batch(lambda model=model: model, batch, "2KiB", **options).batch_size)
    assert sizes[0] == sizes[1] > 2
