"""A small ResNet trained by the Trainer of Lightning, which must be installed."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes

ROWS, BATCHES = 4, 20


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


def batches() -> DataLoader:
    random = torch.Generator().manual_seed(1)
    images = torch.randn(ROWS * BATCHES, 3, 32, 32, generator=random)
    labels = torch.randint(0, 10, (ROWS * BATCHES,), generator=random)
    return DataLoader(TensorDataset(images, labels), batch_size=ROWS)


def train(folder: Path, model: lightning.LightningModule, *callbacks: object, steps: int, **arguments: object) -> None:
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
