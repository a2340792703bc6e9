"""Planned training where something else owns the loop: a planned forward in the place of a module's own.

The module keeps its class, its hooks and its state dict. The plan is made at the first call
that trains; among several processes one makes it for all. The callbacks for trainers build on
this: `transformers_trainer.TransformersCallback` and `lightning_trainer.LightningCallback`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.api import SolveOptions, make_plan
from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch.checkpointing import checkpointed
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.execute.module import CheckpointedModule, OnMismatch
from scheduler.pytorch.integrations.distributed import share_plan
from scheduler.pytorch.tracing import trace
from scheduler.units import parse_bytes


class ForwardOptions(SolveOptions, total=False):
    """Options of `PlannedForward` that callers of trainers' callbacks choose."""

    on_mismatch: OnMismatch
    costs: Costs
    reserve: int | str


class PlannedForward:
    """A planned forward in the place of a module's own.

    In `eval()` and without gradients the module runs as ever.

    Parameters
    ----------
    module : nn.Module
        Its `forward` is replaced, until `remove` is called.
    budget : Plan, int or str
        As for `checkpointed`.
    loss : callable, optional
        Makes the loss of what the module returns.
    wrap : callable, optional
        Makes what the module's callers expect of what the planned one returns.
    optimizer : torch.optim.Optimizer, optional
    accumulate_gradients : bool
    **options
        `on_mismatch`, `costs`, `reserve`, and those of `make_plan`, as for `checkpointed`;
        `on_mismatch` is "plan" by default where it may be: with a budget, in one process.

    Attributes
    ----------
    planned : CheckpointedModule or None
        None until the first call that trains.
    """

    def __init__(
        self,
        module: nn.Module,
        budget: Plan | int | str,
        *,
        loss: Callable[..., Tensor] | None = None,
        wrap: Callable[[Any], object] | None = None,
        optimizer: Optimizer | None = None,
        accumulate_gradients: bool = False,
        **options: Unpack[ForwardOptions],
    ) -> None:
        self.module, self.budget, self.loss = module, budget, loss
        self.optimizer, self.accumulate_gradients, self.options = optimizer, accumulate_gradients, options
        self.planned: CheckpointedModule | None = None
        self._own = vars(module).get("forward")
        body, plain = _Body(module), module.forward

        @functools.wraps(plain)
        def forward(*args: object, **kwargs: object) -> object:
            if not module.training or not torch.is_grad_enabled():
                return plain(*args, **kwargs)
            if self.planned is None:
                self.planned = self.plan(body, args, kwargs)
            outputs = self.planned(*args, **kwargs)
            return outputs if wrap is None else wrap(outputs)

        module.forward = forward

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self._own is None:
            vars(self.module).pop("forward", None)
        else:
            self.module.forward = self._own

    def check_applied(self) -> None:
        """Raise an `ExecutionError` if the forward has not been called in training."""
        if self.planned is None:
            raise ExecutionError(
                f"{type(self.module).__name__}.forward was not called in training, so nothing follows a plan:"
                " name the module that the training step calls"
            )

    def plan(self, body: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> CheckpointedModule:
        """Return the module's own forward under a plan for this call."""
        options: dict[str, Any] = dict(self.options)
        is_shared = _are_several()
        is_made = not isinstance(self.budget, Plan)
        on_mismatch = options.pop("on_mismatch", "plan" if is_made and not is_shared else "error")
        if is_made:
            # Buckets are a standing set of gradients, to which groups are added as they are made.
            existing = self.accumulate_gradients or is_shared
            options |= {"optimizer": self.optimizer, "accumulate_gradients": existing}
        if not is_shared:
            return checkpointed(body, self.budget, args, kwargs, loss=self.loss, on_mismatch=on_mismatch, **options)
        if on_mismatch == "plan":
            raise InvalidOptionError(
                'several processes follow one plan: pass on_mismatch="error", or "plain" to run calls of other shapes'
                " without one"
            )

        def make() -> Plan:
            if isinstance(self.budget, Plan):
                return self.budget
            solving = {name: options.pop(name) for name in SolveOptions.__annotations__ if name in options}
            return make_plan(trace(body, args, kwargs, loss=self.loss, **options), self.budget, **solving)

        return checkpointed(body, share_plan(make), args, kwargs, loss=self.loss, on_mismatch=on_mismatch)


def with_buckets(options: ForwardOptions, module: nn.Module) -> ForwardOptions:
    """Return options that also reserve what reducing gradients among several processes takes.

    DistributedDataParallel keeps as many bytes in its buckets as the gradients have, beside
    them unless `gradient_as_bucket_view` is set.

    Parameters
    ----------
    options : ForwardOptions
    module : nn.Module
        All that is trained.
    """
    if not _are_several():
        return options
    gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return {**options, "reserve": parse_bytes(options.get("reserve", 0)) + gradients}


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _Body(nn.Module):
    """A module without its hooks: calls the forward that the module had when this was made."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = module.forward

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.call(*args, **kwargs)
