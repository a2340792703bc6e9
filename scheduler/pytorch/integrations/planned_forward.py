"""Train with a plan in a loop that someone else owns, by replacing the forward of a module.

The module keeps its class, its hooks and its state dict. The first training call makes the
plan; among several processes, one makes it for all. The callbacks for trainers build on this:
`hf_trainer.TransformersCallback` and `lightning.LightningCallback`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.api import SolveOptions
from scheduler.errors import CaptureError, ExecutionError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.arguments import read_arguments
from scheduler.pytorch.checkpointing import checkpointed, plan_step, warn_of_fallback
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.execute.guards import call_key
from scheduler.pytorch.execute.lengths import example_of, longest_first, plan_lengths
from scheduler.pytorch.execute.module import MAX_SHAPES, CheckpointedModule, OnMismatch
from scheduler.pytorch.integrations.distributed import share_plan
from scheduler.pytorch.modules.names import Body
from scheduler.units import parse_bytes


class ForwardOptions(SolveOptions, total=False):
    """The options of `PlannedForward` that the callbacks for trainers pass through."""

    granularity: str
    on_mismatch: OnMismatch
    max_shapes: int
    lengths: Sequence[int]
    costs: Costs
    reserve: int | str


class PlannedForward:
    """A planned forward that replaces the forward of a module.

    In `eval()` and without gradients, the original forward runs.

    Parameters
    ----------
    module : nn.Module
        Its `forward` is replaced until `remove` is called.
    budget : Plan, int or str
        As for `checkpointed`.
    loss : callable, optional
        Computes the loss from the module's outputs; part of the plan.
    wrap : callable, optional
        Converts what the planned module returns into what callers of `module` expect.
    optimizer : torch.optim.Optimizer, optional
    accumulate_gradients : bool
    **options
        `granularity`, `on_mismatch`, `max_shapes`, `costs`, `reserve`, and the options of
        `make_plan`, as for `checkpointed`; the default of `on_mismatch` is "plan" with a budget in
        one process, else "error". `lengths`: the lengths to which batches are padded, as for `plan_lengths`;
        the first training call makes the plans of all of them, the longest first.

    Attributes
    ----------
    planned : CheckpointedModule or None
        None until the first training call.
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
        body, plain = Body(module), module.forward

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
        """Restore the original forward of the module."""
        if self._own is None:
            vars(self.module).pop("forward", None)
        else:
            self.module.forward = self._own

    def check_applied(self) -> None:
        """Raise an `ExecutionError` if the forward has not been called in training."""
        if self.planned is None:
            raise ExecutionError(
                f"{type(self.module).__name__}.forward was not called in training, so no step followed the"
                " plan: name the module that the training step calls"
            )

    def plan(self, body: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> CheckpointedModule:
        """Return the original forward with a plan for this call."""
        options: dict[str, Any] = dict(self.options)
        granularity = options.pop("granularity", "auto")
        if granularity not in ("auto", "operations", "modules"):
            raise InvalidOptionError(f'granularity must be "auto", "operations" or "modules", got {granularity!r}')
        is_shared = _are_several()
        is_budget = not isinstance(self.budget, Plan)
        on_mismatch = options.pop("on_mismatch", "plan" if is_budget and not is_shared else "error")
        lengths, max_shapes = options.pop("lengths", None), options.pop("max_shapes", MAX_SHAPES)
        if is_shared and on_mismatch == "plan":
            raise InvalidOptionError(
                'several processes follow one plan: pass on_mismatch="error", or "plain" to run calls of other shapes'
                " without a plan"
            )
        if lengths is not None and on_mismatch != "plan":
            raise InvalidOptionError(
                f'only on_mismatch="plan" makes plans for other lengths, got on_mismatch="{on_mismatch}": leave lengths'
                " out, or train in one process within a budget"
            )
        if is_budget:
            # The buckets of DistributedDataParallel are gradients that exist before the step adds to them.
            accumulate = self.accumulate_gradients or is_shared
            options |= {"optimizer": self.optimizer, "accumulate_gradients": accumulate}
        if is_shared:
            plan = self._share_plan(granularity, functools.partial(self._make_plan, body, args, kwargs, options))
            return checkpointed(body, plan, args, kwargs, loss=self.loss, on_mismatch=on_mismatch)
        options |= {"loss": self.loss, "on_mismatch": on_mismatch, "max_shapes": max_shapes}
        options["granularity"] = granularity
        if lengths is None:
            return checkpointed(body, self.budget, args, kwargs, **options)
        different = longest_first(lengths, max_shapes)
        example = example_of(call_key(*read_arguments(args, kwargs)), different[0])
        planned = checkpointed(body, self.budget, *example, **options)
        plan_lengths(planned, different)
        return planned

    def _share_plan(self, granularity: str, make: Callable[[str], Plan]) -> Plan:
        """Return the plan that all processes follow.

        One process alone captures a step. To measure one by modules, all processes run it,
        because its forward may wait for the others.
        """
        refusal = None
        if isinstance(self.budget, Plan) or granularity != "modules":
            try:
                return share_plan(lambda: make("operations"))
            except CaptureError as error:
                if granularity == "operations":
                    raise
                refusal = error
        made: list[Plan] = []
        failed: list[Exception] = []
        try:
            made.append(make("modules"))
        except Exception as error:  # whatever it is, the other processes wait
            failed.append(error)

        def first() -> Plan:
            if failed:
                raise refusal if refusal is not None and isinstance(failed[0], CaptureError) else failed[0]
            return made[0]

        plan = share_plan(first)
        if refusal is not None:
            warn_of_fallback("modules", refusal, stacklevel=3)
        return plan

    def _make_plan(
        self,
        body: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        options: dict[str, Any],
        granularity: str,
    ) -> Plan:
        """Return the given plan, or make one for this call."""
        if isinstance(self.budget, Plan):
            return self.budget
        return plan_step(body, self.budget, args, kwargs, loss=self.loss, granularity=granularity, **options)


def with_buckets(options: ForwardOptions, module: nn.Module) -> ForwardOptions:
    """Return options that also reserve the memory for reducing gradients among several processes.

    The buckets of DistributedDataParallel have as many bytes as the gradients, in addition to
    them unless `gradient_as_bucket_view` is set.

    Parameters
    ----------
    options : ForwardOptions
    module : nn.Module
        Contains everything that is trained.
    """
    if not _are_several():
        return options
    gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return {**options, "reserve": parse_bytes(options.get("reserve", 0)) + gradients}


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
