"""The largest batch with which a model can train within a memory budget, and the plan for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Size, Tensor, nn

from scheduler.api import TRAINING_GAP, check_options, propose_with_bounds
from scheduler.devices import Device
from scheduler.errors import BudgetTooSmallError, CaptureError, InvalidBudgetError, InvalidOptionError
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.planning.batch_scaling import LEAST_PREDICTED, Growth
from scheduler.planning.batch_search import LargestBatch, largest_batch
from scheduler.problem import Problem, check_gap, read_budget
from scheduler.pytorch.capture.arguments import read_arguments
from scheduler.pytorch.capture.device_memory import NO_OTHER_MEMORY
from scheduler.pytorch.checkpointing import checkpointed, warn_of_fallback
from scheduler.pytorch.costs.operators import CostName, Costs
from scheduler.pytorch.measurement.free_memory import device_budget
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.catalog import Arguments
from scheduler.pytorch.modules.batches import TreeGrowth, largest_batch_by_modules
from scheduler.pytorch.modules.calls import CallTree
from scheduler.pytorch.modules.planner import ModulePlanner
from scheduler.pytorch.tracing import trace
from scheduler.schedule import Schedule, follows_input_order, runs_of, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solution import Proposal, grade
from scheduler.solvers.deadline import Deadline, clock, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.units import format_bytes, parse_bytes

SEARCH_SHARE = 0.5
"""The share of the time limit that the search for the batch may take; planning takes the rest."""
DEFAULT_LIMIT = 2**20
"""The largest batch size tried unless the caller gives another limit."""


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch found for a budget.

    Attributes
    ----------
    batch_size : int
    plan : Plan
        The fastest one found for that batch within the budget.
    bound : int or None
        Proven: no larger batch fits. Beyond `batch_size` + 1 the proof is about graphs
        predicted from the traced ones. None if no batch up to the limit is proven not to fit.
    next_plan : Plan or None
        The plan with the smallest known peak for a batch larger by one; it exceeds the
        budget. None at the limit.
    traced : tuple of int
        The batch sizes that were captured, or measured by modules.
    """

    batch_size: int
    plan: Plan
    bound: int | None
    next_plan: Plan | None
    traced: tuple[int, ...]

    @property
    def one_more(self) -> Literal["proven not to fit", "not found to fit", "not looked at"]:
        """What is known about a batch that is larger by one."""
        if self.next_plan is None:
            return "not looked at"
        return "proven not to fit" if self.bound == self.batch_size else "not found to fit"


def max_batch(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Arguments],
    budget: int | str,
    *,
    loss: Callable[..., Tensor] | None = None,
    granularity: str = "auto",
    costs: Costs = "measured",
    limit: int = DEFAULT_LIMIT,
    solver: str = "auto",
    time_limit: float = 60.0,
    gap: float = TRAINING_GAP,
    reorder: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> MaxBatch:
    """Find the largest batch with which a model can train within a budget, and plan it.

    The step is captured for two small batches, from which the graphs of all others are
    predicted; for the batch found and the next one, to confirm the prediction; and again
    where a graph differs from its prediction.

    Parameters
    ----------
    make_model : callable
        Returns the model; called once.
    make_batch : callable
        Takes a batch size and returns the arguments of one call, as `(args, kwargs)`.
    budget : int or str
        Peak of the whole step, resident tensors included: bytes, "8GiB" or "8GB", or "auto": the
        memory of the model's device that is free now, and what the model holds there.
    loss : callable, optional
        As for `trace`.
    granularity : "auto", "operations" or "modules"
        As for `checkpointed`. By modules, steps are measured rather than captured, at two small
        batches, the batch found and the next one; `costs`, `solver`, `reorder` and `seed` have
        no effect.
    costs : "measured" or "flops"
        Cost model of the plan; the search for the batch needs no times.
    limit : int
        Largest batch size tried.
    solver, gap, reorder, seed
        As for `solve`, for the plan.
    time_limit : float
        Seconds for solving: half for the search for the batch, half for its plan.
    progress : callable
        Called with a message at each stage.

    Returns
    -------
    MaxBatch

    Raises
    ------
    BudgetTooSmallError
        If no schedule for a batch of one fits, or none is known.
    InvalidBudgetError
        If the budget cannot be understood, or is in percent or "min".
    InvalidOptionError
        If `make_batch` ignores the batch size, or an argument is out of range.
    CaptureError
        As for `trace`.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> def make_model():
    ...     return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> def make_batch(size):
    ...     return (torch.zeros(size, 4),), {}
    >>> found = max_batch(make_model, make_batch, "4KiB", loss=lambda y: y.sum(), costs="flops")
    >>> found.plan.peak_bytes <= 4096 < found.next_plan.peak_bytes
    True
    """
    check_options(time_limit, seed)
    check_gap(gap)
    _check_options(costs, limit, granularity)
    load_solver(solver)
    _check_budget(budget)
    steps = _Steps(make_model, make_batch, loss, progress)
    budget_bytes = parse_bytes(device_budget(budget, steps.model))
    growth = Growth(steps.graph)
    if granularity != "modules":
        try:
            growth.at(min(LEAST_PREDICTED, limit))
        except CaptureError as error:
            if granularity == "operations":
                raise
            warn_of_fallback("modules", error, stacklevel=2)
            granularity = "modules"
    if granularity == "modules":
        trees = TreeGrowth(steps.tree)
        largest = largest_batch_by_modules(trees, budget_bytes, limit=limit, seconds=time_limit, gap=gap)
        sizes = tuple(sorted(trees.traced))
        return MaxBatch(largest.size, largest.plan, largest.bound, largest.next_plan, sizes)
    found = largest_batch(growth, budget_bytes, limit=limit, seconds=SEARCH_SHARE * time_limit, reorder=reorder)
    size, next_schedule = found.size, found.next_schedule
    if found.schedule is None:
        raise BudgetTooSmallError(_nothing_fits(growth.at(1), budget_bytes, found), proven=found.bound == 0)
    graph, schedule = growth.at(size), found.schedule
    if costs != "flops":
        progress(f"measuring the operations of a batch of {size}")
        runs = runs_of(graph, schedule)
        graph = steps.graph(size, costs)
        schedule = schedule_from_runs(graph, runs)
    progress(f"planning {len(graph.operations)} operations for a batch of {size}")
    problem = Problem(graph, budget_bytes, reorder, starts=(schedule,), gap=gap)
    plan = _plan_within(problem, solver, (1 - SEARCH_SHARE) * time_limit, seed)
    next_plan = None if next_schedule is None else plan_of_schedule(growth.at(size + 1), next_schedule)
    return MaxBatch(size, plan, found.bound, next_plan, tuple(sorted(growth.traced)))


def measured_peak(
    model: nn.Module,
    plan: Plan,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    loss: Callable[..., Tensor] | None = None,
) -> int:
    """Run a step that follows a plan and return its peak of live bytes, resident tensors included."""
    module = checkpointed(model, plan, args, kwargs, loss=loss)
    resident = resident_tensors(module, (args, dict(kwargs)))
    with StorageTracker(resident) as tracker:
        training_step(module, args, kwargs)()
    peak: int = storage_bytes(resident) + tracker.peak_bytes
    return peak


class _Steps:
    """The training steps of one model, by batch size."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_batch: Callable[[int], Arguments],
        loss: Callable[..., Tensor] | None,
        progress: Callable[[str], None],
    ) -> None:
        if isinstance(make_model, nn.Module) or not isinstance(model := make_model(), nn.Module):
            raise InvalidOptionError(
                f"make_model must be a function that returns an nn.Module, got {type(make_model).__name__}: write"
                " lambda: model"
            )
        self.model, self.make_batch, self.loss, self.progress = model, make_batch, loss, progress
        self.shapes: dict[int, list[Size]] = {}

    def graph(self, size: int, costs: Costs = "flops") -> Graph:
        """Return the graph of a step with a batch of a given size."""
        self.progress(f"tracing a batch of {size}")
        args, kwargs = self._batch(size)
        with _explained("tracing", size):
            return trace(self.model, args, kwargs, loss=self.loss, costs=costs, workspaces=False)

    def tree(self, size: int) -> CallTree:
        """Return the calls of modules in a step with a batch of a given size."""
        self.progress(f"measuring a batch of {size}")
        args, kwargs = self._batch(size)
        with _explained("measuring", size):
            return ModulePlanner(self.model, self.loss, "min", {}, lambda: NO_OTHER_MEMORY).measure(args, kwargs)

    def _batch(self, size: int) -> Arguments:
        batch: object = self.make_batch(size)
        if not isinstance(batch, tuple) or list(map(type, batch)) != [tuple, dict]:
            raise InvalidOptionError(
                f"make_batch({size}) must return a tuple (args, kwargs) of a tuple and a dict, the arguments of one"
                f" call of the model, got {type(batch).__name__}"
            )
        shapes = [tensor.shape for tensor in read_arguments(*batch)[1]]
        for other, known in self.shapes.items():
            if other != size and known == shapes:
                raise InvalidOptionError(
                    f"make_batch({size}) and make_batch({other}) return tensors of the same shapes,"
                    f" {[tuple(shape) for shape in shapes]}: return a batch of the given size, or pass the largest"
                    " possible size as limit"
                )
        self.shapes[size] = shapes
        return batch


@contextlib.contextmanager
def _explained(what: str, size: int) -> Iterator[None]:
    """Return a context in which errors say with which batch the model failed."""
    try:
        yield
    except CaptureError as error:
        smaller = f"; if the model only takes smaller batches, pass limit={size - 1}" if size > 1 else ""
        raise CaptureError(f"{what} failed with a batch of {size}{smaller}: {error}") from error


def _check_options(costs: Costs, limit: int, granularity: str) -> None:
    if granularity not in ("auto", "operations", "modules"):
        raise InvalidOptionError(f'granularity must be "auto", "operations" or "modules", got {granularity!r}')
    if not isinstance(costs, Device) and costs not in get_args(CostName):
        raise InvalidOptionError(f'costs must be "measured" or "flops", got {costs!r}')
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidOptionError(f"limit must be an int >= 1, got {limit!r}")


def _check_budget(budget: int | str) -> None:
    if read_budget(budget).is_relative:
        raise InvalidBudgetError(
            f'budget must be in bytes, such as "8GiB", or "auto", got "{budget}": a percentage and the smallest peak'
            " depend on the needs of the step, which grow with the batch"
        )


def _nothing_fits(graph: Graph, budget_bytes: int, found: LargestBatch) -> str:
    """Return the message of the error that not even a batch of one fits."""
    floor = Problem(graph, budget_bytes).floor
    assert found.next_schedule is not None
    known = simulate(graph, found.next_schedule).peak_bytes
    proof = "proven: not even a batch of 1 fits" if found.bound == 0 else "no schedule is known for a batch of 1 in"
    return (
        f"{proof} {format_bytes(budget_bytes)}: {floor.explained(format_bytes(floor.bytes))},"
        f" of which {format_bytes(graph.resident_bytes)} are resident. The smallest known schedule needs"
        f" {format_bytes(known)} ({known} bytes). Raise the budget to {known} bytes, or use a smaller model."
    )


def _plan_within(problem: Problem, solver: str, seconds: float, seed: int) -> Plan:
    """Return the plan of the fastest schedule found, at worst that of the schedule from which the problem starts."""
    deadline = Deadline(seconds)
    started = clock.now()
    with stopped_by_interrupt(deadline):
        proposal = propose_with_bounds(problem, solver, deadline, seed)
    elapsed = clock.now() - started
    solution = grade(problem, proposal, solver=solver, seconds=elapsed)
    if solution.schedule is None or simulate(problem.graph, problem.starts[0]).time < solution.time:
        start = _proposal(problem.graph, problem.starts[0])
        bound = proposal.bound if proposal.search_space == start.search_space else 0.0
        start = replace(start, bound=bound, global_bound=proposal.global_bound)
        solution = grade(problem, start, solver=solver, seconds=elapsed)
    return Plan.of(problem.graph, solution)


def plan_of_schedule(graph: Graph, schedule: Schedule) -> Plan:
    """Return the plan of a schedule with its own peak as the budget and no bounds."""
    problem = Problem(graph, simulate(graph, schedule).peak_bytes)
    return Plan.of(graph, grade(problem, _proposal(graph, schedule), solver="smallest peak", seconds=0.0))


def _proposal(graph: Graph, schedule: Schedule) -> Proposal:
    return Proposal(schedule, "input order" if follows_input_order(graph, schedule) else "any order")
