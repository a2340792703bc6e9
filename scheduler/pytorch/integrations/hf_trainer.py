"""A callback that trains within a memory budget under `transformers.Trainer` (extra `trainers`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor, nn

from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.plan import Plan
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.integrations.planned_forward import ForwardOptions, PlannedForward, with_buckets

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.utils.generic import ModelOutput, find_labels
except ImportError as error:
    raise MissingExtraError(
        f"transformers cannot be imported ({error}): pip install checkpoint-scheduler[trainers]"
    ) from error


class TransformersCallback(TrainerCallback):
    """Train the model of a `transformers.Trainer` within a memory budget.

    The first batch makes the plan, which includes the model's own loss. The plan counts the
    optimizer's state and, with gradient accumulation, the existing gradients; among several
    processes, also the buckets in which gradients are reduced. Evaluation runs without a
    plan. Each length to which batches are padded gets a plan of its own, in a fraction of the
    time of the first; `lengths=` makes these plans when training begins, the longest first. With
    `granularity="modules"`, and for models that cannot be captured, a batch that is larger than
    all before it is measured, and smaller ones follow its plan.

    Parameters
    ----------
    budget : Plan, int or str
        As for `checkpointed`.
    **options
        For `PlannedForward`.

    Attributes
    ----------
    forward : PlannedForward or None
        Replaces the model's forward during training; it holds the plan.

    Raises
    ------
    InvalidOptionError
        When training begins, if the trainer checkpoints or compiles the model itself, or does
        not use the model's own loss.
    """

    def __init__(self, budget: Plan | int | str, **options: Unpack[ForwardOptions]) -> None:
        self.budget, self.options = budget, options
        self.forward: PlannedForward | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Replace the forward of the model."""
        for name in ("activation_checkpointing", "gradient_checkpointing", "torch_compile", "label_smoothing_factor"):
            if getattr(args, name, False):
                raise InvalidOptionError(f"{name} interferes with the plan or with the loss in it: turn it off")
        optimizer = kwargs["optimizer"]  # perhaps wrapped by accelerate
        self.forward = _ModelForward(
            kwargs["model"],
            self.budget,
            loss=_own_loss,
            wrap=lambda loss: ModelOutput(loss=loss),
            optimizer=getattr(optimizer, "optimizer", optimizer),
            accumulate_gradients=args.gradient_accumulation_steps > 1,
            **with_buckets(self.options, kwargs["model"]),
        )

    def on_step_end(self, *_: object, **__: object) -> None:
        """Raise an error if the forward was not called."""
        if self.forward is not None:
            self.forward.check_applied()

    def on_train_end(self, *_: object, **__: object) -> None:
        """Restore the original forward of the model."""
        if self.forward is not None:
            self.forward.remove()


class _ModelForward(PlannedForward):
    """The planned forward of a model that computes its own loss."""

    def plan(self, body: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> CheckpointedModule:
        labels = find_labels(type(self.module))
        if not any(kwargs.get(label) is not None for label in labels):
            raise InvalidOptionError(
                f"the model is called with {sorted(kwargs)} and without labels ({', '.join(labels)}), so it does not"
                " compute its own loss: train without compute_loss_func, or use checkpointed"
            )
        return super().plan(body, args, kwargs)


def _own_loss(outputs: Mapping[str, Tensor]) -> Tensor:
    return outputs["loss"]
