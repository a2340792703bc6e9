"""A tiny GPT-2 trained by the Trainer of transformers, which must be installed."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes

ROWS, LENGTH, VOCABULARY = 8, 32, 97
OPTIONS = {"costs": "flops", "solver": "greedy", "time_limit": 2.0}


def tiny_gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=64, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def text(seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


class Trainer(transformers.Trainer):
    """A trainer that notes the loss, and the live bytes at the peak, of every step.

    The first step makes the plan, on fake tensors, which count here like others.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []
        self.peaks: list[int] = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        state = [x for entry in self.optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
        existing = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        standing = [*resident_tensors(model, (inputs, num_items_in_batch)), *state, *existing]
        with StorageTracker(standing) as tracker:
            loss = super().training_step(model, inputs, num_items_in_batch)
        self.losses.append(loss.item())
        self.peaks.append(storage_bytes(standing) + tracker.peak_bytes)
        return loss


def train(folder: Path, *callbacks: object, steps: int, **arguments: object) -> Trainer:
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        seed=1,
        **arguments,
    )
    data = [text(seed) for seed in range(2 * ROWS * steps)]
    trainer = Trainer(model=tiny_gpt2(), args=settings, train_dataset=data, callbacks=list(callbacks))
    trainer.train()
    return trainer
