"""Pipeline stages: a plan per stage, which counts what its microbatches in flight keep.

A stage runs one microbatch at a time, its forward or its backward. Each other microbatch in
flight has finished its forward and waits for its backward. It keeps the tensors that are live
at the end of the forward phase, and its input. So a stage with n microbatches in flight holds
at most the peak of the one that runs, and n - 1 times what each of the others keeps. Both
depend on the plan.

A limit on what is kept is expressed as a limit on a peak: a workspace on the first operation
of the backward, as large as the memory that must be free at that time. So any solver can be
used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from scheduler.api import SolveOptions, check_options, lower, plan_of, solve
from scheduler.errors import BudgetTooSmallError, InvalidOptionError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.plan import Plan
from scheduler.problem import Problem, parse_budget, save_everything
from scheduler.schedule import Schedule
from scheduler.simulator import Simulation, simulate
from scheduler.solution import Proposal, Solution, Status, grade
from scheduler.solvers.deadline import Deadline, stopped_by_interrupt
from scheduler.solvers.registry import load_solver
from scheduler.units import format_bytes, format_percent, html_table, text_table

_FIRST_LIMITS = 6
"""Number of limits on what is kept that are tried at first."""

_REFINEMENTS = 3
"""Number of times that two more limits are tried, half as far from the best one as before."""

_BOUND_TIME_SHARE = 0.3
"""Share of a stage's time that the bound may take if several microbatches are in flight."""

_MIN_SECONDS = 0.1
"""Least time limit of a stage, if earlier stages have used up the time."""


@dataclass(frozen=True)
class PipelineStagePlan:
    """The plan of a stage, which each of its microbatches follows.

    Attributes
    ----------
    plan : Plan
        Its budget is what the other microbatches leave to one. Bound and gap are proven for
        the stage.
    in_flight : int
        Largest number of microbatches in flight, including the one that runs.
    kept_bytes : int
        Bytes that each of the others keeps: `Simulation.saved_bytes` and its input.
    budget_bytes : int
        Budget of the stage.
    """

    plan: Plan
    in_flight: int
    kept_bytes: int
    budget_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Largest memory of the stage, resident tensors included."""
        return self.plan.peak_bytes + (self.in_flight - 1) * self.kept_bytes


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """The plans of a pipeline's stages: a sequence of `PipelineStagePlan`.

    Attributes
    ----------
    stages : tuple of PipelineStagePlan
    """

    stages: tuple[PipelineStagePlan, ...]

    def __len__(self) -> int:
        return len(self.stages)

    def __iter__(self) -> Iterator[PipelineStagePlan]:
        return iter(self.stages)

    def __getitem__(self, number: int) -> PipelineStagePlan:
        return self.stages[number]

    def __repr__(self) -> str:
        peak = max(stage.peak_bytes for stage in self.stages)
        overhead = max(stage.plan.overhead for stage in self.stages)
        return (
            f"PipelinePlan({len(self)} stages, largest peak {format_bytes(peak)},"
            f" largest overhead {format_percent(overhead)})"
        )

    def summary(self) -> str:
        """Return microbatches, budget, peak, overhead and gap of each stage as a table."""
        return text_table(self._cells())

    def _repr_html_(self) -> str:
        return html_table(self._cells())

    def _cells(self) -> list[tuple[str, ...]]:
        head = ("stage", "in flight", "budget", "peak", "kept by each", "overhead", "gap", "status")
        return [
            head,
            *(
                (
                    str(number),
                    str(stage.in_flight),
                    format_bytes(stage.budget_bytes),
                    format_bytes(stage.peak_bytes),
                    format_bytes(stage.kept_bytes),
                    format_percent(stage.plan.overhead),
                    format_percent(stage.plan.gap),
                    stage.plan.status.name,
                )
                for number, stage in enumerate(self.stages)
            ),
        ]


def plan_pipeline(
    graphs: Sequence[Graph | Chain],
    budget: int | str | Sequence[int | str],
    in_flight: int | Sequence[int] | None = None,
    **options: Unpack[SolveOptions],
) -> PipelinePlan:
    """Find a plan for each stage of a pipeline, within its budget with its microbatches in flight.

    Several limits on what a microbatch keeps are tried, and the fastest schedule that fits is
    taken. The bound of its plan holds for all schedules of the stage that fit, however much
    they keep.

    Parameters
    ----------
    graphs : sequence of Graph or Chain
        One per stage, of one microbatch. Trace them with `accumulate_gradients=True`: the
        gradients of parameters are then counted once, for all microbatches, since they are
        summed. Each microbatch has its own resident tensors of role "input"; the stage has
        the others.
    budget : int, str, or a sequence of them, one per stage
        Budget of each stage's device, as for `solve`. Percents are of what the stage adds to
        its resident tensors if it saves everything of all microbatches in flight.
    in_flight : int or sequence of int, optional
        Largest number of microbatches in flight, in every stage or per stage. By default as
        in 1F1B (one forward, one backward): stage s of S has S - s, counted from 0.
    **options
        As for `solve`; `time_limit` is for all stages together.

    Returns
    -------
    PipelinePlan

    Raises
    ------
    InvalidOptionError
        If there is no stage, the numbers of stages differ, or no microbatch is in flight.
    BudgetTooSmallError
        If no plan is known for a stage. The message names the stage and the smallest memory
        for which a plan is known.

    References
    ----------
    Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP:
    the order 1F1B.

    Examples
    --------
    >>> from scheduler import zoo
    >>> chain = zoo.uniform_chain(6)
    >>> [stage.in_flight for stage in plan_pipeline([chain, chain, chain], "60%", time_limit=3)]
    [3, 2, 1]
    """
    seconds = options.get("time_limit", 60.0)
    check_options(seconds, options.get("seed", 0))
    if isinstance(graphs, (Graph, Chain)) or not graphs:
        raise InvalidOptionError("graphs must be a sequence of at least one graph, one per stage")
    count = len(graphs)
    budgets = [budget] * count if isinstance(budget, (int, str)) else list(budget)
    flights = _flights(in_flight, count)
    if not len(budgets) == len(flights) == count:
        raise InvalidOptionError(
            f"each stage needs a budget and a number in flight, got {count} stages, {len(budgets)} budgets and"
            f" {len(flights)} numbers in flight"
        )
    deadline = Deadline(seconds)
    plans = []
    for number, (graph, own_budget, flight) in enumerate(zip(graphs, budgets, flights, strict=True)):
        share = deadline.remaining / (count - number)
        stage = _Stage(graph, flight, {**options, "time_limit": max(share, _MIN_SECONDS)})
        plans.append(stage.plan(own_budget, f"stage {number}"))
    return PipelinePlan(tuple(plans))


def _flights(in_flight: int | Sequence[int] | None, count: int) -> list[int]:
    """Return the number of microbatches in flight per stage."""
    if in_flight is None:
        return list(range(count, 0, -1))
    flights = [in_flight] * count if isinstance(in_flight, int) else list(in_flight)
    for flight in flights:
        if isinstance(flight, bool) or not isinstance(flight, int) or flight < 1:
            raise InvalidOptionError(
                f"in_flight must be an int >= 1, which counts the microbatch that runs, got {flight!r}"
            )
    return flights


class _Stage:
    """One stage: the memory that a schedule needs in it, and the search for a schedule."""

    def __init__(self, graph_or_chain: Graph | Chain, in_flight: int, options: SolveOptions) -> None:
        self.graph_or_chain, self.in_flight, self.options = graph_or_chain, in_flight, options
        self.graph, _ = lower(graph_or_chain)
        resident = map(self.graph.tensor, self.graph.resident)
        own = {tensor.storage for tensor in resident if tensor.role == "input"}
        self.input_bytes = sum(
            max(tensor.size_bytes for tensor in self.graph.tensors if tensor.storage == storage) for storage in own
        )
        index = self.graph.index
        backward = [i for i, operation in enumerate(self.graph.operations) if operation.phase == "backward"]
        self.late = {tensor for i in backward for tensor in index.outputs[i]}
        """Tensors that the backward produces."""
        self.starters = [i for i in backward if not self.late.intersection(index.inputs[i])]
        """Operations that can begin the backward."""

    def kept_bytes(self, simulation: Simulation) -> int:
        """Return the bytes that a microbatch keeps between its forward and its backward."""
        return simulation.saved_bytes + self.input_bytes

    def peak_bytes(self, simulation: Simulation) -> int:
        """Return the largest memory of the stage if all microbatches follow a simulated schedule."""
        return simulation.peak_bytes + (self.in_flight - 1) * self.kept_bytes(simulation)

    def plan(self, budget: int | str, name: str) -> PipelineStagePlan:
        """Return the fastest plan found that fits."""
        everything = simulate(self.graph, save_everything(self.graph))
        budget_bytes = parse_budget(
            budget, self.graph, baseline=replace(everything, peak_bytes=self.peak_bytes(everything))
        )
        deadline = Deadline(self.options["time_limit"])
        seconds = deadline.remaining * (_BOUND_TIME_SHARE if self.in_flight > 1 else 1.0)
        options: SolveOptions = {**self.options, "time_limit": seconds}
        alone = solve(*self._relaxed(budget_bytes), **options)
        is_proven = alone.status is Status.INFEASIBLE
        if alone.schedule is None and self.in_flight == 1:
            raise BudgetTooSmallError(f"{name}: {alone.messages[0]}", proven=is_proven)
        found = {} if alone.schedule is None else {alone.schedule: simulate(self.graph, alone.schedule)}
        if not is_proven and not any(self.peak_bytes(simulated) <= budget_bytes for simulated in found.values()):
            with stopped_by_interrupt(deadline):
                found |= self._search(budget_bytes, everything, deadline)
        fitting = {s: simulated for s, simulated in found.items() if self.peak_bytes(simulated) <= budget_bytes}
        if not fitting:
            raise self._too_small(name, budget_bytes, [*found.values(), everything], is_proven=is_proven)
        schedule = min(fitting, key=lambda s: (fitting[s].time, self.peak_bytes(fitting[s])))
        kept = self.kept_bytes(fitting[schedule])
        solution = self._grade(schedule, budget_bytes - (self.in_flight - 1) * kept, alone, deadline)
        return PipelineStagePlan(plan_of(self.graph_or_chain, solution), self.in_flight, kept, budget_bytes)

    def _grade(self, schedule: Schedule, budget_bytes: int, alone: Solution, deadline: Deadline) -> Solution:
        """Return a schedule as the solution for one microbatch, with the bounds of the relaxed problem."""
        proposal = Proposal(schedule, "any order", bound=alone.global_bound, global_bound=alone.global_bound)
        if schedule == alone.schedule:
            proposal = replace(proposal, search_space=alone.search_space, bound=alone.bound)
        problem = Problem(self.graph, budget_bytes, self.options.get("reorder", True))
        spent = self.options["time_limit"] - deadline.remaining
        return grade(problem, proposal, solver=alone.solver, seconds=spent)

    def _most_kept(self, budget_bytes: int) -> int:
        """Return the most bytes that a schedule that fits can keep: all in flight keep as much."""
        left = budget_bytes - self.graph.resident_bytes - (self.in_flight - 1) * self.input_bytes
        return left // self.in_flight

    def _least_kept(self) -> int:
        """Return the bytes that every schedule keeps: forward results, and inputs of the first backward operation."""
        index = self.graph.index
        first = index.inputs[self.starters[0]] if len(self.starters) == 1 else ()
        results = {t for t, is_result in enumerate(index.is_result) if is_result and t not in self.late}
        return sum(index.storage_bytes[storage] for storage in {index.storage_of[t] for t in results.union(first)})

    def _relaxed(self, budget_bytes: int) -> tuple[Graph | Chain, int]:
        """Return a graph and a budget that allow every schedule of the stage, so that bounds hold for the stage."""
        budget = max(0, budget_bytes - (self.in_flight - 1) * self.input_bytes)
        starters = [self.graph.operations[i] for i in self.starters]
        if self.in_flight > 1 and len(starters) == 1 and not starters[0].repeatable:
            return self._limited(budget, self._most_kept(budget_bytes)), budget
        return self.graph_or_chain, budget

    def _search(self, budget_bytes: int, everything: Simulation, deadline: Deadline) -> dict[Schedule, Simulation]:
        """Return schedules that keep little, simulated on the stage's own graph."""
        least = self._least_kept()
        most = max(least, min(self._most_kept(budget_bytes), everything.saved_bytes))
        step = max(1, (most - least) // _FIRST_LIMITS)
        waiting = list(dict.fromkeys([most, *range(least, most, step)]))
        found: dict[Schedule, Simulation] = {}
        times: dict[int, float] = {}
        for left in range(_FIRST_LIMITS + 2 + 2 * _REFINEMENTS, 0, -1):
            if not waiting:
                step //= 2
                best = min(times, key=lambda limit: (times[limit], limit))
                waiting = [
                    limit for limit in (best + step, best - step) if limit not in times and least <= limit <= most
                ]
            if not waiting or not deadline.remaining:
                break
            limit = waiting.pop(0)
            proposal = self._propose(budget_bytes, limit, tuple(found), deadline.within(deadline.remaining / left))
            times[limit] = math.inf
            if proposal.schedule is not None:
                simulated = found[proposal.schedule] = simulate(self.graph, proposal.schedule)
                times[limit] = simulated.time if self.peak_bytes(simulated) <= budget_bytes else math.inf
        return found

    def _propose(self, budget_bytes: int, limit: int, starts: tuple[Schedule, ...], deadline: Deadline) -> Proposal:
        """Return a solver's proposal for one microbatch if each of the others keeps `limit` bytes and its input."""
        budget = max(0, budget_bytes - (self.in_flight - 1) * (limit + self.input_bytes))
        problem = Problem(self._limited(budget, limit), budget, self.options.get("reorder", True), starts=starts)
        solver = load_solver(self.options.get("solver", "auto"))
        return solver(problem, deadline=deadline, seed=self.options.get("seed", 0))

    def _limited(self, budget_bytes: int, limit: int) -> Graph:
        """Return the graph with workspaces, where the backward can begin, that allow `limit` kept bytes."""
        graph, index = self.graph, self.graph.index
        operations = list(graph.operations)
        for i in self.starters:
            free = budget_bytes - graph.resident_bytes - limit - index.allocated_bytes[i]
            workspace = max(free, operations[i].workspace_bytes)
            operations[i] = replace(operations[i], workspace_bytes=workspace)
        return replace(graph, operations=tuple(operations))

    def _too_small(
        self, name: str, budget_bytes: int, found: Iterable[Simulation], *, is_proven: bool
    ) -> BudgetTooSmallError:
        known = min(self.peak_bytes(simulated) for simulated in found)
        return BudgetTooSmallError(
            f"{name}: {'no schedule' if is_proven else 'no plan found'} fits {format_bytes(budget_bytes)} with"
            f" {self.in_flight} microbatches in flight. The smallest known plan needs {format_bytes(known)}; whether a"
            f" smaller one exists is open. Set the budget to {known} bytes, let fewer microbatches be in flight, use"
            " smaller ones, or move layers to another stage.",
            proven=is_proven,
        )
