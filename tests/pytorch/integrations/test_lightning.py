from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from scheduler.errors import ExecutionError
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes
from tests.support.pytorch.readme_examples import run_example

lightning = pytest.importorskip("lightning.pytorch")

from scheduler.pytorch.integrations.lightning import LightningCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:.*does not have many workers"),
]

STEPS, ROWS = 20, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.branch(x))


def small_resnet() -> nn.Sequential:
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)]
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Block(16) for _ in range(4)), *head)


class Classifier(lightning.LightningModule):
    """A small ResNet that notes the loss, and the live bytes at the peak, of every step.

    The first step makes the plan, on fake tensors, which count here like others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = small_resnet()
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def on_train_batch_start(self, batch: object, _: int) -> None:
        state = [x for entry in self.optimizers().state.values() for x in entry.values() if isinstance(x, Tensor)]
        self.standing = [*resident_tensors(self, batch), *state]
        self.tracker = StorageTracker(self.standing)
        self.tracker.__enter__()

    def on_after_backward(self) -> None:
        self.tracker.__exit__(None, None, None)
        self.peaks.append(storage_bytes(self.standing) + self.tracker.peak_bytes)


class CallsItsModel(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)


def batches() -> DataLoader:
    random = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS * STEPS, 3, 32, 32, generator=random)
    labels = torch.randint(0, 10, (ROWS * STEPS,), generator=random)
    return DataLoader(TensorDataset(images, labels), batch_size=ROWS)


def train(
    folder: Path, model: lightning.LightningModule, *callbacks: object, steps: int = STEPS, **arguments: object
) -> None:
    trainer = lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        max_steps=steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(model, batches())


def test_a_small_resnet_trains_as_without_a_plan_and_within_the_budget(tmp_path):
    callback = LightningCallback("60%", costs="flops", time_limit=5.0, reserve="64KiB")
    planned, plain = Classifier(), Classifier()
    train(tmp_path, planned, callback)
    train(tmp_path, plain)
    assert len(planned.losses) == STEPS
    assert planned.losses == plain.losses
    for (name, one), other in zip(planned.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    plan = callback.forward.planned.plan
    assert any(name.startswith("optimizer:") for name in plan.graph.resident)
    assert max(planned.peaks[1:]) <= plan.budget_bytes < max(plain.peaks)
    assert "forward" not in vars(planned)


def test_a_part_of_the_module_can_be_planned(tmp_path):
    callback = LightningCallback("100%", module="model", costs="flops", time_limit=5.0)
    train(tmp_path, CallsItsModel(), callback, steps=1)
    assert callback.forward.planned is not None


def test_a_forward_that_training_does_not_call_is_an_error(tmp_path):
    model = CallsItsModel()
    with pytest.raises(ExecutionError, match=r"CallsItsModel\.forward was not called in training"):
        train(tmp_path, model, LightningCallback("60%", costs="flops"), steps=1)
    assert "forward" not in vars(model)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_the_example_in_readme_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example("LightningCallback", model=Classifier(), batches=batches())
    (callback,) = [c for c in names["trainer"].callbacks if isinstance(c, LightningCallback)]
    assert names["trainer"].global_step == 20
    assert callback.forward.planned.plan.budget_bytes == 8 * 2**30
