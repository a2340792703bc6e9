"""The largest batch that a model trains with in a memory budget, and the plan for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Size, Tensor, nn

from scheduler.api import check_options, propose_with_bounds
from scheduler.errors import BudgetTooSmallError, CaptureError, InvalidBudgetError, InvalidOptionError
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.planning.batch_scaling import Growth
from scheduler.planning.batch_search import LargestBatch, largest_batch
from scheduler.problem import Problem
from scheduler.pytorch.capture.arguments import read_arguments
from scheduler.pytorch.checkpointing import checkpointed
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.catalog import Arguments
from scheduler.pytorch.tracing import trace
from scheduler.schedule import Schedule, follows_input_order, runs_of, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solution import Proposal, grade
from scheduler.solvers.deadline import Deadline, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.units import format_bytes, parse_bytes

SHARE_OF_SEARCH = 0.5
"""Of the time limit, what the search for the batch may take; the plan has the rest."""
MOST = 2**20


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch found for a budget.

    Attributes
    ----------
    batch_size : int
    plan : Plan
        For that batch, within the budget; as fast as was found.
    bound : int or None
        Proven: no larger batch fits; beyond `batch_size` + 1 of the graphs that follow from
        those traced. None if nothing up to the limit is proven not to.
    next_plan : Plan or None
        For one more, with the smallest peak known: over the budget. None at the limit.
    traced : tuple of int
        The batch sizes that were captured.
    """

    batch_size: int
    plan: Plan
    bound: int | None
    next_plan: Plan | None
    traced: tuple[int, ...]

    @property
    def one_more(self) -> Literal["proven not to fit", "not found to fit", "not looked at"]:
        """What is known of a batch that is larger by one."""
        if self.next_plan is None:
            return "not looked at"
        return "proven not to fit" if self.bound == self.batch_size else "not found to fit"


def max_batch(
    make_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Arguments],
    budget: int | str,
    *,
    loss: Callable[..., Tensor] | None = None,
    costs: Costs = "measured",
    limit: int = MOST,
    solver: str = "auto",
    time_limit: float = 60.0,
    reorder: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> MaxBatch:
    """Find the largest batch that a model can train with in a budget, with its plan.

    The step is captured for two small batches, from which the bytes of all others follow;
    for the batch found and for one more, to confirm it; and again where it differs.

    Parameters
    ----------
    make_model : callable
        Returns the model; called once.
    make_batch : callable
        Returns the arguments of one call for a batch size, as `(args, kwargs)`.
    budget : int or str
        Bytes of the peak of the whole step, resident tensors included, or "8GiB", "8GB".
    loss : callable, optional
        As for `trace`.
    costs : "measured" or "flops"
        Of the plan; the search for the batch needs no times.
    limit : int
        Largest batch looked at.
    solver, order, seed
        As for `solve`, of the plan.
    time_limit : float
        Seconds of solving: half of them to find the batch, half for its plan.
    progress : callable
        Told what goes on.

    Returns
    -------
    MaxBatch

    Raises
    ------
    BudgetTooSmallError
        If no schedule of a batch of one fits, or none is known.
    InvalidBudgetError
        If the budget cannot be understood, or is a percent: that of what grows with the batch.
    InvalidOptionError
        If `make_batch` does not heed its argument, or an argument is out of its range.
    CaptureError
        As `trace`.

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
    load_solver(solver)
    budget_bytes = _read_budget(budget)
    if costs not in get_args(Costs):
        raise InvalidOptionError(f'costs is "measured" or "flops", not {costs!r}')
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise InvalidOptionError(f"limit is a whole number >= 1, not {limit!r}")
    steps = _Steps(make_model, make_batch, loss, progress)
    growth = Growth(steps.graph)
    found = largest_batch(growth, budget_bytes, limit=limit, seconds=SHARE_OF_SEARCH * time_limit, reorder=reorder)
    if found.schedule is None:
        raise BudgetTooSmallError(_why_nothing(growth.at(1), budget_bytes, found), proven=found.bound == 0)
    size, graph, schedule = found.size, growth.at(found.size), found.schedule
    if costs != "flops":
        progress(f"measuring the operations of a batch of {size}")
        timed = steps.graph(size, costs)
        graph, schedule = timed, schedule_from_runs(timed, runs_of(graph, schedule))
    progress(f"planning {len(graph.operations)} operations for a batch of {size}")
    problem = Problem(graph, budget_bytes, reorder, starts=(schedule,))
    deadline = Deadline((1 - SHARE_OF_SEARCH) * time_limit)
    with stopped_by_interrupt(deadline):
        plan = _plan_within(problem, solver, deadline, seed)
    return MaxBatch(
        batch_size=size,
        plan=plan,
        bound=found.bound,
        next_plan=None if found.next_schedule is None else _plan_as_is(growth.at(size + 1), found.next_schedule),
        traced=tuple(sorted(growth.traced)),
    )


def measured_peak(
    model: nn.Module,
    plan: Plan,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    loss: Callable[..., Tensor] | None = None,
) -> int:
    """Return the live bytes at the peak of one real step that follows a plan, resident tensors included."""
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
            raise InvalidOptionError("make_model is a function that returns an nn.Module: write lambda: model")
        self.model, self.make_batch, self.loss, self.progress = model, make_batch, loss, progress
        self.shapes: dict[int, list[Size]] = {}

    def graph(self, size: int, costs: Costs = "flops") -> Graph:
        """Return the graph of a step with a batch of that size."""
        self.progress(f"tracing a batch of {size}")
        args, kwargs = self._batch(size)
        try:
            return trace(self.model, args, kwargs, loss=self.loss, costs=costs, workspaces=False)
        except CaptureError as error:
            smaller = f"; if it only takes smaller batches, pass limit={size - 1}" if size > 1 else ""
            raise CaptureError(f"the model was tried with a batch of {size}{smaller}: {error}") from error

    def _batch(self, size: int) -> Arguments:
        made: object = self.make_batch(size)
        if not isinstance(made, tuple) or list(map(type, made)) != [tuple, dict]:
            raise InvalidOptionError(
                f"make_batch({size}) returned {type(made).__name__}: return a tuple (args, kwargs)"
                " of a tuple and a dict, the arguments of one call of the model"
            )
        shapes = [tensor.shape for tensor in read_arguments(*made)[1]]
        for other, known in self.shapes.items():
            if other != size and known == shapes:
                raise InvalidOptionError(
                    f"make_batch({size}) and make_batch({other}) return tensors of the same shapes,"
                    f" {[tuple(shape) for shape in shapes]}: return a batch of the size that is asked for,"
                    " or pass the largest there is as limit"
                )
        self.shapes[size] = shapes
        return made


def _read_budget(budget: int | str) -> int:
    if isinstance(budget, str) and budget.strip().endswith("%"):
        raise InvalidBudgetError(
            f'"{budget}" is a share of what the step needs, which grows with the batch: give bytes, such as "8GiB"'
        )
    return parse_bytes(budget)


def _why_nothing(graph: Graph, budget_bytes: int, found: LargestBatch) -> str:
    """Say why not even a batch of one fits."""
    floor = Problem(graph, budget_bytes).floor
    assert found.next_schedule is not None
    known = simulate(graph, found.next_schedule).peak_bytes
    proof = "proven: not even a batch of 1 fits" if found.bound == 0 else "no schedule is known for a batch of 1 in"
    return (
        f'{proof} {format_bytes(budget_bytes)}: "{floor.operation}" alone needs {format_bytes(floor.bytes)},'
        f" of which {format_bytes(graph.resident_bytes)} are resident. A schedule of {format_bytes(known)} ({known}"
        f" bytes) is known. Raise the budget to {known} bytes, or use a smaller model."
    )


def _plan_within(problem: Problem, solver: str, deadline: Deadline, seed: int) -> Plan:
    """Return the plan of the fastest schedule found; at the least of the one that the problem starts from."""
    started = time.monotonic()
    proposal = propose_with_bounds(problem, solver, deadline, seed)
    seconds = time.monotonic() - started
    solution = grade(problem, proposal, solver=solver, seconds=seconds)
    if solution.schedule is None or simulate(problem.graph, problem.starts[0]).time < solution.time:
        known = _proposal(problem.graph, problem.starts[0])
        bound = proposal.bound if proposal.search_space == known.search_space else 0.0
        known = replace(known, bound=bound, global_bound=proposal.global_bound)
        solution = grade(problem, known, solver=solver, seconds=seconds)
    return Plan.of(problem.graph, solution)


def _plan_as_is(graph: Graph, schedule: Schedule) -> Plan:
    """Return the plan of a schedule with its own peak as the budget, and nothing proven of it."""
    problem = Problem(graph, simulate(graph, schedule).peak_bytes)
    return Plan.of(graph, grade(problem, _proposal(graph, schedule), solver="smallest peak", seconds=0.0))


def _proposal(graph: Graph, schedule: Schedule) -> Proposal:
    return Proposal(schedule, "input order" if follows_input_order(graph, schedule) else "any order")
