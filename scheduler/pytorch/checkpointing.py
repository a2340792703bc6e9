"""Train a model within a memory budget: choose a granularity, plan, and build the module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.api import SolveOptions, make_plan
from scheduler.errors import CaptureError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.device_memory import memory_beside, read_device_memory
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.execute.module import PLANNING, CheckpointedModule, OnMismatch, OtherPlans
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.execute.translation import translate_schedule
from scheduler.pytorch.layerwise.module import checkpointed_layers
from scheduler.pytorch.tracing import capture

Granularity = Literal["auto", "operations", "layers"]


def checkpointed(
    model: nn.Module | Sequence[Callable[..., object]],
    plan_or_budget: Plan | int | str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    granularity: str = "auto",
    on_mismatch: OnMismatch = "error",
    costs: Costs = "measured",
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    accumulate_gradients: bool = False,
    **options: Unpack[SolveOptions],
) -> CheckpointedModule:
    """Return a module that trains `model` within a memory budget.

    It shares the parameters and buffers of `model`: give its `parameters()` or the model's
    to the optimizer. With `loss`, calling it returns the loss; without, what the model
    returns. Gradients, buffers and random state are those of the model itself.

    Parameters
    ----------
    model : nn.Module or list of callable
        A list of layers, each taking what the one before returns, is for granularity "layers".
    plan_or_budget : Plan, int or str
        A plan for this model and these arguments, or a budget in bytes, "8GiB" or "60%".
    args, kwargs
        The arguments of one call, as examples: calls with the same structure, shapes,
        strides, dtypes and devices follow the plan.
    loss : callable, optional
        Makes the scalar loss of the model's outputs.
    granularity : "auto", "operations" or "layers"
        Layers: those of an `nn.Sequential` or a list run as they are, without being captured
        (see `profile_layers`; `costs` plays no part). Auto: what the plan says; for a budget
        operations, or layers for a list and for an `nn.Sequential` that cannot be captured.
    on_mismatch : "error", "plain" or "plan"
        What a call does that the plan does not cover: raise, run the model plainly, or make
        a plan for it, within the same budget (other shapes, training flags, autocast). The
        last `MOST_OTHER_PLANS` are kept: pad to a few lengths if there are many.
        Without gradients, and in `eval()`, the model runs plainly in any case.
    costs : "measured" or "flops"
        As for `trace`; counts only if a budget is given.
    reserve, optimizer, accumulate_gradients
        As for `trace`, with a budget; a plan holds them. A plan for existing gradients may run
        without, and needs less then; another plan with existing gradients needs as much more
        as they have bytes.
    **options
        For `make_plan`, if a budget is given: `solver`, `time_limit` (20 s by default here),
        `order`, `seed`.

    Returns
    -------
    CheckpointedModule

    Raises
    ------
    CaptureError
        If the model cannot be captured, or nothing in it is trainable.
    PlanMismatchError
        If the plan belongs to another model, or to arguments of other shapes.
    BudgetTooSmallError
        If no schedule fits the budget, or none is known.
    InvalidOptionError
        If `granularity` or `on_mismatch` is unknown, or options or `on_mismatch="plan"` come
        with a finished plan, or the size of the optimizer's state cannot be found.
    """
    if granularity not in get_args(Granularity):
        raise InvalidOptionError(f'granularity is "auto", "operations" or "layers", not {granularity!r}')
    if on_mismatch not in get_args(OnMismatch):
        raise InvalidOptionError(f'on_mismatch is "error", "plain" or "plan", not {on_mismatch!r}')
    is_budget = isinstance(plan_or_budget, (int, str))
    if not is_budget and not isinstance(plan_or_budget, Plan):
        raise InvalidOptionError(f"give a plan or a budget, not {type(plan_or_budget).__name__}")
    beside = {"reserve": reserve, "optimizer": optimizer, "accumulate_gradients": accumulate_gradients}
    given = sorted([*options, *(name for name, value in beside.items() if value)])
    if given and not is_budget:
        raise InvalidOptionError(f"options {given} are for making a plan, and a finished plan was given")
    if on_mismatch == "plan":
        if not is_budget:
            raise InvalidOptionError('on_mismatch="plan" makes plans within a budget, and a finished plan was given')
        make = functools.partial(
            checkpointed,
            model,
            plan_or_budget,
            loss=loss,
            granularity=granularity,
            costs=costs,
            reserve=reserve,
            optimizer=optimizer,
            accumulate_gradients=accumulate_gradients,
            **options,
        )
        module = make(args, kwargs)
        module.on_mismatch = on_mismatch
        module.others = OtherPlans(make)
        return module
    if isinstance(plan_or_budget, Plan):
        memory = memory_beside(plan_or_budget.graph)
    else:
        memory = read_device_memory(model, reserve, optimizer, accumulate_gradients)

    def by_layers() -> CheckpointedModule:
        return checkpointed_layers(
            model, plan_or_budget, args, kwargs, loss=loss, on_mismatch=on_mismatch, memory=memory, **options
        )

    route, *others = _routes(model, plan_or_budget, granularity)
    if route == "layers":
        return by_layers()
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(f'granularity "operations" is for an nn.Module, not {type(model).__name__}')
    try:
        captured = capture(model, args, kwargs, loss, costs=costs if is_budget else "flops", memory=memory)
    except CaptureError:
        if not others:
            raise
        return by_layers()
    if isinstance(plan_or_budget, (int, str)):
        plan = make_plan(captured.graph, plan_or_budget, **(PLANNING | options))
    else:
        plan = plan_or_budget
    schedule = translate_schedule(plan.schedule, plan.graph, captured.graph)
    module = build(model, captured, schedule, args, kwargs, loss=loss, on_mismatch=on_mismatch)
    module.plan = plan
    return module


def _routes(model: object, plan_or_budget: Plan | int | str, granularity: str) -> tuple[str, ...]:
    """Return the granularities to try, in that order."""
    if granularity != "auto":
        return (granularity,)
    if isinstance(plan_or_budget, Plan):
        return (plan_or_budget.granularity,)
    if not isinstance(model, nn.Module):
        return ("layers",)
    return ("operations", "layers") if isinstance(model, nn.Sequential) else ("operations",)
