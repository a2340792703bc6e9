"""Outputs whose gradients come from outside of the step that is measured."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from scheduler.errors import CaptureError
from scheduler.pytorch.modules.recomputation.frozen_arguments import freeze


def loss_outside(outputs: object) -> Tensor:
    """Return the loss if it is what a model returned, else a scalar that stands for a loss computed from it.

    The scalar holds the outputs, as the caller of the model does, and its backward gives a gradient
    of ones to each output that requires one.

    Parameters
    ----------
    outputs : object
        Tensors, anywhere in containers and other objects.

    Raises
    ------
    CaptureError
        If none of them requires a gradient.
    """
    if isinstance(outputs, Tensor) and outputs.numel() == 1:
        return outputs
    _, tensors = freeze((outputs,), {})
    trained = [tensor for tensor in dict.fromkeys(tensors) if tensor.requires_grad]
    if not trained:
        raise CaptureError(
            f"no tensor among the outputs (a {type(outputs).__name__}) requires a gradient, so there is no backward to"
            " plan: call requires_grad_(True) on what is to be trained"
        )
    return cast("Tensor", _LossOutside.apply(outputs, *trained))  # type: ignore[no-untyped-call]


class _LossOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: object, *trained: Tensor) -> Tensor:
        ctx.outputs, ctx.trained = outputs, trained
        return torch.zeros((), device=trained[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.ones_like(tensor) for tensor in ctx.trained)
