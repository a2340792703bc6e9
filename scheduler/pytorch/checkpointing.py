"""Train a model within a memory budget: capture its step, plan it, and build the module that follows the plan.

`checkpointed` makes a `PlanRequest`, which one of the routes at the end of this file turns into
a module: by operations, by modules or by layers. Calls that the first plan does not cover take the
same way. `plan_step` returns the plan alone.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Unpack, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from scheduler.api import TRAINING_GAP, SolveOptions
from scheduler.errors import CaptureError, InvalidBudgetError, InvalidOptionError, PlanMismatchError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.plan import Plan
from scheduler.planning.shape_planner import ShapePlanner
from scheduler.pytorch.capture.device_memory import DeviceMemory, device_memory_of, read_device_memory
from scheduler.pytorch.capture.exporting.failures import check_has_data
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.costs.progress import TracingProgress, ignore
from scheduler.pytorch.execute.codegen import generate
from scheduler.pytorch.execute.module import MAX_SHAPES, CheckpointedModule, OnMismatch, OtherPlans
from scheduler.pytorch.execute.runner import CapturedModule
from scheduler.pytorch.execute.translation import translate_schedule
from scheduler.pytorch.layerwise.module import LayeredModule
from scheduler.pytorch.layerwise.profiling import profile
from scheduler.pytorch.layerwise.program import translate_layers
from scheduler.pytorch.measurement.fragmentation import warn_of_fragmentation
from scheduler.pytorch.measurement.free_memory import device_budget
from scheduler.pytorch.measurement.memory import resident_tensors
from scheduler.pytorch.modules.module import ModulesModule
from scheduler.pytorch.modules.planner import ModulePlanner
from scheduler.pytorch.shape_variants import ShapeVariants
from scheduler.pytorch.tracing import capture_watched
from scheduler.solution import Progress as SearchProgress
from scheduler.units import parse_bytes

Granularity = Literal["auto", "operations", "modules", "layers"]

PLANNING_DEFAULTS: SolveOptions = {"gap": TRAINING_GAP}
"""Options of `make_plan` where a model is about to be trained; `solve` by itself searches longer."""


def checkpointed(
    model: nn.Module | Sequence[Callable[..., object]],
    plan_or_budget: Plan | int | str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    granularity: str = "auto",
    on_mismatch: OnMismatch = "error",
    max_shapes: int = MAX_SHAPES,
    costs: Costs = "measured",
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    accumulate_gradients: bool = False,
    verify: bool = False,
    progress: Callable[[TracingProgress | SearchProgress], None] | None = None,
    **options: Unpack[SolveOptions],
) -> CheckpointedModule:
    """Return a module that trains `model` within a memory budget.

    The module shares the parameters and buffers of `model`: give the `parameters()` of either
    to the optimizer. With `loss`, calling the module returns the loss; without, it returns what
    the model returns. Gradients, buffers and random state are those of the model itself.

    Read anew at every call: parameters, buffers, the tensors in the arguments (also in fields of
    dataclasses and other objects), and all tensors that the model and the loss find in closures,
    globals, defaults, partials, containers, and attributes of modules and objects. Compared with
    the planned call: the shapes, dtypes and devices of all these tensors, and everything else
    that the code reads, such as numbers, flags, strings and NumPy arrays; and each condition on
    values in the arguments, such as whether an attention mask hides anything. A difference is a
    mismatch (see `on_mismatch`), so a number that a schedule changes at every step should be a
    tensor: `weight = torch.tensor(0.1)`, and `weight.fill_(0.2)` later.

    Parameters
    ----------
    model : nn.Module or list of callable
        A list of layers, each of which takes what the one before returns, needs granularity
        "layers" or "auto".
    plan_or_budget : Plan, int or str
        A plan for this model and these arguments, or a budget: bytes, "8GiB", "60%", "min" or
        "min+10%" as for `solve`, or "auto": the memory of the model's device that is free now,
        and what the step already holds there.
    args, kwargs
        The arguments of one call, as examples: calls with the same structure, shapes,
        strides, dtypes and devices follow the plan.
    loss : callable, optional
        Computes the scalar loss from the model's outputs.
    granularity : "auto", "operations", "modules" or "layers"
        "operations" captures the step, and plans each of its operations. "modules" measures one
        step, and recomputes some calls of modules under `torch.utils.checkpoint`: for any model
        that trains, and calls of any shape. "layers" runs the layers of an `nn.Sequential` or a
        list as they are (see `profile_layers`). `costs` has an effect on operations only. "auto"
        follows the plan; with a budget, it chooses operations, or layers for a list. For a step
        that cannot be captured, or that reads what no guard can watch, it chooses layers for an
        `nn.Sequential` and modules for others, and a warning says why.
    on_mismatch : "error", "plain" or "plan"
        What to do with a call that the plan does not cover: raise an error, run the model
        without a plan, or make a plan for it within the same bytes (other shapes, training
        flags, autocast); only if none fits, a budget such as "min" is raised. The schedules of
        the shapes before are where its search begins, so it takes a fraction of the first.
        `plan_lengths` makes such plans before training. Without gradients, and in `eval()`, the
        model always runs without a plan.
    max_shapes : int
        With `on_mismatch="plan"`: the number of plans that are kept. The first always is; of
        the others, the least recently used is dropped first.
    costs : "measured" or "flops"
        As for `trace`; used only if a budget is given. Times of further sizes of a planned step
        are scaled from those of the first by FLOPs and bytes, not measured.
    reserve, optimizer, accumulate_gradients
        As for `trace`; only with a budget, because a plan contains them. A plan made for
        existing gradients may run without them, and then needs less memory; another plan that
        runs with existing gradients needs as many bytes more as they have.
    verify : bool
        Whether to compare the first step that follows the plan with a plain one: loss or outputs,
        gradients, buffers and random states, bit for bit. A difference is an error; if two plain
        steps differ in the same values, it is a warning. The model is left as after one step.
        That first call needs the memory of a step without a plan; `CheckpointedModule.verify`
        does the same for any later step.
    progress : callable, optional
        Called as `progress` of `trace` while the step is captured and measured, and as that of
        `solve` while a plan is searched for.
    **options
        For `make_plan`, if a budget is given: `solver`, `time_limit` (4 s and the time of five steps
        by default here, and at most 20 s; by modules 2 s and one step, once there is an answer),
        `gap` (0.005 by default here: the search ends within half a percent of the optimum),
        `reorder`, `seed`.

    Returns
    -------
    CheckpointedModule

    Raises
    ------
    CaptureError
        If the model itself fails on these arguments, if it cannot be captured, or if nothing in it
        is trainable.
    PlanMismatchError
        If the plan is for another model, or for arguments of other shapes.
    InvalidBudgetError
        If the budget cannot be understood, or is "auto" and the model is on several devices.
    BudgetTooSmallError
        If no schedule fits the budget, or none is known.
    InvalidOptionError
        If `granularity` or `on_mismatch` is unknown, `max_shapes` is not a positive int, or
        `progress` is not a function, if options or `on_mismatch="plan"` come with a finished
        plan, or if the size of the optimizer's state cannot be found.
    """
    request = PlanRequest(
        model=model,
        plan_or_budget=plan_or_budget,
        loss=loss,
        granularity=granularity,
        on_mismatch=on_mismatch,
        costs=costs,
        reserve=reserve,
        optimizer=optimizer,
        accumulate_gradients=accumulate_gradients,
        verify=verify,
        progress=ignore if progress is None else progress,
        options=options,
        planner=None,
    )
    if not isinstance(plan_or_budget, Plan):
        budget = device_budget(plan_or_budget, model, (args, kwargs), optimizer)
        request = replace(request, planner=ShapePlanner(budget, PLANNING_DEFAULTS | options, progress))
    others = None
    if on_mismatch == "plan":
        if isinstance(model, nn.Module):
            request = replace(request, variants=ShapeVariants(model, loss))
        make = functools.partial(_build_module, replace(request, on_mismatch="error"))
        others = OtherPlans(make, max_shapes=max_shapes)
    return _build_module(request, args, kwargs, others)


class PlanOptions(SolveOptions, total=False):
    """The options of `checkpointed` that a plan depends on."""

    loss: Callable[..., Tensor] | None
    granularity: str
    costs: Costs
    reserve: int | str
    optimizer: Optimizer | None
    accumulate_gradients: bool
    progress: Callable[[TracingProgress | SearchProgress], None] | None


def plan_step(
    model: nn.Module | Sequence[Callable[..., object]],
    budget: int | str,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    **options: Unpack[PlanOptions],
) -> Plan:
    """Return the plan that `checkpointed` makes, at any granularity.

    It is for a file, or for several processes that follow one plan: `checkpointed` takes it in
    place of a budget.

    Parameters
    ----------
    model, budget, args, kwargs
        As for `checkpointed`.
    **options
        `loss`, `granularity`, `costs`, `reserve`, `optimizer`, `accumulate_gradients`, `progress`,
        and options for `make_plan`, as for `checkpointed`.

    Raises
    ------
    CaptureError, InvalidBudgetError, BudgetTooSmallError, InvalidOptionError
        As for `checkpointed`.
    """
    plan = checkpointed(model, budget, args, kwargs, **options).plan
    assert plan is not None  # a module without one is never built here
    return plan


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanRequest:
    """Everything that `checkpointed` is given except the arguments of the call; validated on construction.

    Parameters
    ----------
    model, plan_or_budget, loss, granularity, on_mismatch, costs
        As for `checkpointed`.
    reserve, optimizer, accumulate_gradients, verify, progress, options
        As for `checkpointed`.
    planner : ShapePlanner or None
        Makes the plans within the budget; None with a finished plan.
    variants : ShapeVariants or None
        Captures calls of other shapes; None if no further plans are made.

    Raises
    ------
    InvalidOptionError
        As for `checkpointed`.
    """

    model: nn.Module | Sequence[Callable[..., object]]
    plan_or_budget: Plan | int | str
    loss: Callable[..., Tensor] | None
    granularity: str
    on_mismatch: OnMismatch
    costs: Costs
    reserve: int | str
    optimizer: Optimizer | None
    accumulate_gradients: bool
    verify: bool
    progress: Callable[[TracingProgress], None]
    options: SolveOptions
    planner: ShapePlanner | None
    variants: ShapeVariants | None = None

    def __post_init__(self) -> None:
        if self.granularity not in get_args(Granularity):
            raise InvalidOptionError(
                f'granularity must be "auto", "operations", "modules" or "layers", got {self.granularity!r}'
            )
        if self.on_mismatch not in get_args(OnMismatch):
            raise InvalidOptionError(f'on_mismatch must be "error", "plain" or "plan", got {self.on_mismatch!r}')
        if not callable(self.progress):
            raise InvalidOptionError(f"progress must be a function or None, got {self.progress!r}")
        if not isinstance(self.plan_or_budget, (Plan, int, str)):
            raise InvalidOptionError(
                f"plan_or_budget must be a plan or a budget, got {type(self.plan_or_budget).__name__}"
            )
        if self.has_budget:
            return
        memory = ("reserve", "optimizer", "accumulate_gradients")
        given = sorted([*self.options, *(name for name in memory if getattr(self, name))])
        if given:
            raise InvalidOptionError(f"options {given} are for making a plan, but a finished plan was given")
        if self.on_mismatch == "plan":
            raise InvalidOptionError(
                'on_mismatch="plan" makes plans within a budget, but a finished plan was given: give a budget'
            )

    @property
    def has_budget(self) -> bool:
        """Whether plans are to be made, rather than a finished one followed."""
        return not isinstance(self.plan_or_budget, Plan)

    @property
    def routes(self) -> tuple[str, ...]:
        """The granularities to try, in that order."""
        if self.granularity != "auto":
            return (self.granularity,)
        if isinstance(self.plan_or_budget, Plan):
            return (self.plan_or_budget.granularity,)
        if not isinstance(self.model, nn.Module):
            return ("layers",)
        fallbacks = ("layers", "modules") if isinstance(self.model, nn.Sequential) else ("modules",)
        return ("operations", *fallbacks)

    def read_memory(self) -> DeviceMemory:
        """Return what the device holds in addition to the step.

        It is read anew for every plan: the optimizer's state, and what it trains, may have changed.
        """
        if isinstance(self.plan_or_budget, Plan):
            return device_memory_of(self.plan_or_budget.graph)
        return read_device_memory(self.model, self.reserve, self.optimizer, self.accumulate_gradients)

    def find_plan(self, graph_or_chain: Graph | Chain) -> Plan:
        """Return the given plan, or make one for the given budget."""
        if isinstance(self.plan_or_budget, Plan):
            return self.plan_or_budget
        assert self.planner is not None
        return self.planner.plan(graph_or_chain)


def _build_module(
    request: PlanRequest,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None,
    others: OtherPlans | None = None,
) -> CheckpointedModule:
    """Return the module for calls like this one, by the first of the request's routes that can plan the model."""
    models = request.model if isinstance(request.model, Sequence) else (request.model,)
    modules = nn.ModuleList(model for model in models if isinstance(model, nn.Module))
    check_has_data(resident_tensors(modules, (args, kwargs)), "trained")
    refusals: list[CaptureError] = []
    for granularity in request.routes:
        try:
            module = _ROUTES[granularity](request, args, kwargs or {}, others)
        except CaptureError as error:
            refusals.append(error)
            continue
        if refusals:
            warn_of_fallback(granularity, refusals[0], stacklevel=3)
        return module
    raise refusals[0]


def warn_of_fallback(granularity: str, refusal: CaptureError, *, stacklevel: int) -> None:
    """Warn that a step is planned at another granularity than by operations, and say why.

    `stacklevel` is what the caller would pass to `warnings.warn`.
    """
    text = f"this step is planned by {granularity}, because it cannot be planned by operations: {refusal}"
    warnings.warn(text, stacklevel=stacklevel + 1)


def _build_by_operations(
    request: PlanRequest, args: Sequence[object], kwargs: Mapping[str, object], others: OtherPlans | None
) -> CheckpointedModule:
    """Capture the step as operations, plan them, and generate the code that runs them."""
    if not isinstance(request.model, nn.Module):
        raise InvalidOptionError(f'granularity "operations" needs an nn.Module, got {type(request.model).__name__}')
    costs = request.costs if request.has_budget else "flops"  # a finished plan needs no times
    memory, variants = request.read_memory(), request.variants
    derived = None if variants is None else variants.capture(args, kwargs, costs=costs, memory=memory)
    captured, watch = derived or capture_watched(
        request.model, args, kwargs, request.loss, costs=costs, memory=memory, progress=request.progress
    )
    plan = request.find_plan(captured.graph)
    schedule = translate_schedule(plan.schedule, plan.graph, captured.graph)
    program = generate(captured, schedule)
    if next((parameter.is_cuda for parameter in request.model.parameters()), False):
        with contextlib.suppress(InvalidBudgetError):  # a model on several devices
            room = device_budget("auto", request.model, (args, kwargs), request.optimizer)
            warn_of_fragmentation(plan, parse_bytes(room), stacklevel=4)
    module = CapturedModule(
        request.model,
        captured,
        program,
        args,
        kwargs,
        watch,
        loss=request.loss,
        on_mismatch=request.on_mismatch,
        plan=plan,
        others=others,
        verify=request.verify,
    )
    if variants is not None and derived is None:
        variants.add(module, captured, watch)
    return module


def _build_by_layers(
    request: PlanRequest, args: Sequence[object], kwargs: Mapping[str, object], others: OtherPlans | None
) -> CheckpointedModule:
    """Profile the layers, plan them, and run them as they are.

    A finished plan is matched by the structure digest of a fresh profile, which covers what
    each layer outputs, saves and keeps, to the byte, but no times and workspaces. Make plan and
    module under the autocast that the training runs under.
    """
    memory = request.read_memory()
    profiled = profile(request.model, args, kwargs, request.loss, timed=request.has_budget, memory=memory)
    plan = request.find_plan(profiled.chain)
    program = translate_layers(plan.schedule, plan.graph, profiled.chain.lowered)
    return LayeredModule(
        request.model,
        profiled,
        program,
        args,
        kwargs,
        loss=request.loss,
        on_mismatch=request.on_mismatch,
        plan=plan,
        others=others,
        verify=request.verify,
    )


def _build_by_modules(
    request: PlanRequest, args: Sequence[object], kwargs: Mapping[str, object], others: OtherPlans | None
) -> CheckpointedModule:
    """Measure a step as a tree of module calls, and choose which of them to recompute.

    A finished plan is matched by the names of modules. Plans for larger calls are made within
    the same bytes.
    """
    model, shapes = request.model, request.planner
    if not isinstance(model, nn.Module):
        raise InvalidOptionError(f'granularity "modules" needs an nn.Module, got {type(model).__name__}')
    plan, planner = request.plan_or_budget, None
    if shapes is not None:
        budget = shapes.budget if shapes.budget_bytes is None else shapes.budget_bytes
        planner = ModulePlanner(
            model, request.loss, budget, shapes.options, request.read_memory, may_raise=others is not None
        )
        plan = planner.remeasure(args, kwargs)
        shapes.budget_bytes = plan.budget_bytes
    assert isinstance(plan, Plan)
    if plan.granularity != "modules":
        raise PlanMismatchError(f'the plan must be of granularity "modules", got "{plan.granularity}": make a new plan')
    return ModulesModule(
        model,
        args,
        kwargs,
        planner=planner,
        loss=request.loss,
        on_mismatch=request.on_mismatch,
        plan=plan,
        others=others,
        verify=request.verify,
    )


_ROUTES = {"operations": _build_by_operations, "modules": _build_by_modules, "layers": _build_by_layers}
"""The function that builds a module at each granularity."""
