"""Pipeline stages: a plan per stage, with what its microbatches in flight keep counted.

A stage runs one microbatch at a time, the forward or the backward. Each other one in flight
has done its forward and waits for its backward: it keeps what lives at the end of the forward
phase, and its input. So with n in flight a stage holds at most n - 1 times what one keeps,
beside the peak of the one that runs, and both depend on the plan.

A limit on what is kept is a limit on a peak: a workspace on the first operation of the
backward, as large as all that must be left free then. So every solver serves here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
from scheduler.units import format_bytes

_LIMITS, _ROUNDS = 6, 3
"""Limits on what is kept that are tried at first, and how often two more half as far from the best are."""

_SHARE_OF_BOUND = 0.3
_LEAST_SECONDS = 0.1


@dataclass(frozen=True)
class PipelineStagePlan:
    """The plan of a stage, for each of its microbatches.

    Attributes
    ----------
    plan : Plan
        Its budget is what the others leave to one microbatch. Bound and gap are proven for the
        stage.
    in_flight : int
        Microbatches in flight at most, the one that runs included.
    kept_bytes : int
        What each of the others keeps: `Simulation.saved_bytes` and its input.
    budget_bytes : int
        Of the stage.
    """

    plan: Plan
    in_flight: int
    kept_bytes: int
    budget_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that the stage holds, resident tensors included."""
        return self.plan.peak_bytes + (self.in_flight - 1) * self.kept_bytes


def plan_pipeline(
    graphs: Sequence[Graph | Chain],
    budget: int | str | Sequence[int | str],
    in_flight: int | Sequence[int] | None = None,
    **options: Unpack[SolveOptions],
) -> tuple[PipelineStagePlan, ...]:
    """Find a plan for each stage of a pipeline, within its budget with its microbatches in flight.

    Several limits are tried on what a microbatch keeps; the fastest schedule found that fits
    is taken. The bound of its plan holds for all schedules of the stage: none that fits is
    faster, however much it keeps.

    Parameters
    ----------
    graphs : sequence of Graph or Chain
        One per stage, of one microbatch. Trace them with `accumulate_gradients=True`:
        parameters' gradients are then counted once, for all microbatches, as they are added up.
        Resident tensors of role "input" are each microbatch's own; the others are the
        stage's.
    budget : int, str, or a sequence of them, one per stage
        Of each stage's device, as for `solve`; percents are of what the stage adds to its
        resident tensors if it saves everything of all microbatches in flight.
    in_flight : int or sequence of int, optional
        Microbatches in flight at most, in every stage or per stage. By default as in 1F1B
        (one forward, one backward): stage s of S has S - s, counted from 0.
    **options
        For `solve`; `time_limit` is for all stages together.

    Returns
    -------
    tuple of PipelineStagePlan

    Raises
    ------
    InvalidOptionError
        If there is no stage, or numbers of stages differ, or none is in flight.
    BudgetTooSmallError
        If no plan is known for a stage: says which, and the least that one is known to need.

    References
    ----------
    Narayanan et al. 2019, PipeDream: Generalized Pipeline Parallelizm for DNN Training, SOSP:
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
        raise InvalidOptionError("give a sequence of at least one graph, one per stage")
    count = len(graphs)
    budgets = [budget] * count if isinstance(budget, (int, str)) else list(budget)
    if in_flight is None:
        flights = list(range(count, 0, -1))
    else:
        flights = [in_flight] * count if isinstance(in_flight, int) else list(in_flight)
    if not len(budgets) == len(flights) == count:
        raise InvalidOptionError(
            f"{count} stages, {len(budgets)} budgets, {len(flights)} numbers in flight: give each one"
        )
    for flight in flights:
        if isinstance(flight, bool) or not isinstance(flight, int) or flight < 1:
            raise InvalidOptionError(
                f"in_flight counts the microbatch that runs too: a whole number >= 1, not {flight!r}"
            )
    deadline = Deadline(seconds)
    plans = []
    for number, (graph, own_budget, flight) in enumerate(zip(graphs, budgets, flights, strict=True)):
        share = deadline.remaining / (count - number)
        stage = _Stage(graph, flight, {**options, "time_limit": max(share, _LEAST_SECONDS)})
        plans.append(stage.plan(own_budget, f"stage {number}"))
    return tuple(plans)


class _Stage:
    """One stage: what a schedule makes it hold, and the search."""

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
        """Tensors that the backward makes."""
        self.starters = [i for i in backward if not self.late.intersection(index.inputs[i])]
        """Operations that can begin the backward."""

    def kept_bytes(self, simulation: Simulation) -> int:
        """Return what a microbatch keeps between its forward and its backward."""
        return simulation.saved_bytes + self.input_bytes

    def peak_bytes(self, simulation: Simulation) -> int:
        """Return the most that the stage holds if all microbatches follow a simulated schedule."""
        return simulation.peak_bytes + (self.in_flight - 1) * self.kept_bytes(simulation)

    def plan(self, budget: int | str, name: str) -> PipelineStagePlan:
        """Return the fastest plan found that fits."""
        everything = simulate(self.graph, save_everything(self.graph))
        budget_bytes = parse_budget(
            budget, self.graph, baseline=replace(everything, peak_bytes=self.peak_bytes(everything))
        )
        deadline = Deadline(self.options["time_limit"])
        seconds = deadline.remaining * (_SHARE_OF_BOUND if self.in_flight > 1 else 1.0)
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
        """Return what no schedule that fits can keep more than: all in flight keep as much."""
        left = budget_bytes - self.graph.resident_bytes - (self.in_flight - 1) * self.input_bytes
        return left // self.in_flight

    def _least_kept(self) -> int:
        """Return what every schedule keeps: forward results, and what the backward begins with."""
        index = self.graph.index
        first = index.inputs[self.starters[0]] if len(self.starters) == 1 else ()
        results = {t for t, is_result in enumerate(index.is_result) if is_result and t not in self.late}
        return sum(index.storage_bytes[storage] for storage in {index.storage_of[t] for t in results.union(first)})

    def _relaxed(self, budget_bytes: int) -> tuple[Graph | Chain, int]:
        """Return a graph and a budget that every schedule of the stage fits, so that bounds hold for the stage."""
        budget = max(0, budget_bytes - (self.in_flight - 1) * self.input_bytes)
        starters = [self.graph.operations[i] for i in self.starters]
        if self.in_flight > 1 and len(starters) == 1 and not starters[0].repeatable:
            return self._limited(budget, self._most_kept(budget_bytes)), budget
        return self.graph_or_chain, budget

    def _search(self, budget_bytes: int, everything: Simulation, deadline: Deadline) -> dict[Schedule, Simulation]:
        """Return schedules that keep little, simulated on the stage's own graph."""
        least = self._least_kept()
        most = max(least, min(self._most_kept(budget_bytes), everything.saved_bytes))
        step = max(1, (most - least) // _LIMITS)
        waiting = list(dict.fromkeys([most, *range(least, most, step)]))
        found: dict[Schedule, Simulation] = {}
        times: dict[int, float] = {}
        for left in range(_LIMITS + 2 + 2 * _ROUNDS, 0, -1):
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
        """Return a solver's proposal for one microbatch if each other one keeps `limit` bytes and its input."""
        budget = max(0, budget_bytes - (self.in_flight - 1) * (limit + self.input_bytes))
        problem = Problem(self._limited(budget, limit), budget, self.options.get("reorder", True), starts=starts)
        solver = load_solver(self.options.get("solver", "auto"))
        return solver(problem, deadline=deadline, seed=self.options.get("seed", 0))

    def _limited(self, budget_bytes: int, limit: int) -> Graph:
        """Return the graph with a workspace on the operations that can begin the backward, for `limit` bytes kept."""
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
