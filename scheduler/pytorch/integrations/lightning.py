"""A callback that trains within a memory budget under Lightning (extra `trainers`)."""

from __future__ import annotations

from typing import Unpack

from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.plan import Plan
from scheduler.pytorch.integrations.planned_forward import ForwardOptions, PlannedForward, with_buckets

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise MissingExtraError(
        f"Lightning cannot be imported ({error}): pip install checkpoint-scheduler[trainers]"
    ) from error


class LightningCallback(Callback):
    """Train a `LightningModule`, or a part of it, within a memory budget.

    The first training call of the forward makes the plan. The plan counts the optimizer's
    state and, with gradient accumulation, the existing gradients; among several processes,
    also the buckets in which gradients are reduced. It does not count what `training_step`
    computes from the outputs of the forward, such as the loss: leave memory for it with
    `reserve=`.

    Parameters
    ----------
    budget : Plan, int or str
        As for `checkpointed`.
    module : str
        The submodule that `training_step` calls, such as "model". The default is the
        LightningModule itself, for a `training_step` that calls `self(batch)`.
    **options
        For `PlannedForward`.

    Attributes
    ----------
    forward : PlannedForward or None
        Replaces the forward of that module during training; it holds the plan.

    Raises
    ------
    InvalidOptionError
        When training begins, if there are several optimizers.
    ExecutionError
        After the first batch, if the forward was not called.
    """

    def __init__(self, budget: Plan | int | str, *, module: str = "", **options: Unpack[ForwardOptions]) -> None:
        self.budget, self.module, self.options = budget, module, options
        self.forward: PlannedForward | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the forward of the module."""
        if len(trainer.optimizers) != 1:
            raise InvalidOptionError(
                f"there must be one optimizer, whose state the plan counts, got {len(trainer.optimizers)}"
            )
        are_gradients = getattr(trainer.strategy.model, "gradient_as_bucket_view", True)
        options = self.options if are_gradients else with_buckets(self.options, pl_module)
        self.forward = PlannedForward(
            pl_module.get_submodule(self.module),
            self.budget,
            optimizer=trainer.optimizers[0],
            accumulate_gradients=trainer.accumulate_grad_batches > 1,
            **options,
        )

    def on_train_batch_end(self, *_: object, **__: object) -> None:
        """Raise an error if the forward was not called."""
        if self.forward is not None:
            self.forward.check_applied()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the original forward of the module."""
        if self.forward is not None:
            self.forward.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the original forward of the module."""
        self.on_train_end(trainer, pl_module)
