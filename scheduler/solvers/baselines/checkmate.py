"""The integer program of Checkmate over stages: a reference for small graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.baselines.plain import check_plain
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.integer_program import IntegerProgram, MilpResult, Variable, is_set
from scheduler.solvers.scaling import byte_units, time_units

MOST_OPERATIONS = 80
SEARCH_SPACE = "stages"


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest schedule of stages that fits.

    A stage ends with the first run of one operation, in the input order; within it, each earlier
    operation may run once more, also in the input order. One more stage may follow at the end,
    for results that were freed.

    Guarantee: optimal over such schedules when time and bound meet. Search space: "stages",
    which leaves out schedules that run an operation twice in one stage, or out of the input
    order: the bound says nothing about those. When: graphs of up to `MOST_OPERATIONS`
    operations; a reference for other solvers. Cost: O(n^2) binary and O(n e) continuous
    variables for e reads; seconds to minutes at n = 70. Memory: at most 256 MiB. Reference: Jain,
    Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica and Gonzalez 2020, "Checkmate: breaking the
    memory wall with optimal tensor rematerialization", MLSys, section 4. Their FREE variables
    state when a tensor is freed; here a variable per pair of neighboring reads states whether it
    stays live, which describes the same schedules with fewer rows.

    Raises
    ------
    UnsuitableProblemError
        If the graph has more operations than that, alternatives, or tensors that share a
        storage.
    """
    graph, budget = problem.graph, problem.budget_bytes
    check_plain(graph, "checkmate", MOST_OPERATIONS)
    if budget < problem.floor.bytes:
        return Proposal(None, SEARCH_SPACE, infeasible=True)
    stages = _Stages(graph, budget, deadline, cautious=False)
    slack = problem.gap * stages.first_runs
    result = stages.program.minimize(deadline, absolute_gap=slack)
    bound = _bound(stages, result)
    if result.infeasible:
        message = "proven: no schedule of stages fits; another one may"
        return Proposal(None, SEARCH_SPACE, bound=bound, messages=(message,))
    schedule = stages.schedule() if result.found else None
    if schedule is not None and simulate(graph, schedule).peak_bytes > budget:
        # Bytes were rounded down, so that the bound is true: now they are rounded up.
        stages = _Stages(graph, budget, deadline, cautious=True)
        schedule = stages.schedule() if stages.program.minimize(deadline, absolute_gap=slack).found else None
    messages = () if schedule is not None else ("no schedule of stages was found by the time limit",)
    return Proposal(schedule, SEARCH_SPACE, bound=bound, messages=messages)


def _bound(stages: _Stages, result: MilpResult) -> float:
    if result.infeasible:
        return math.inf
    least = max(0.0, result.bound)
    if stages.units.exact:
        # Times are integers: rounding up undoes the solver's tolerances.
        least = math.ceil(least - 1e-4)
    return (stages.first_runs + least) * stages.units.scale


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor with the positions of its producer and readers in the order."""

    number: int
    producer: int
    readers: tuple[int, ...]
    units: int
    is_result: bool


class _Stages:
    """The integer program: R[t, k], operation k is recomputed in stage t; S[t, i], tensor i is live before stage t.

    Between the moments at which a tensor is computed or read within a stage, a variable per gap
    states whether it is live. For given R and S their least values are 0 or 1, so they need not
    be declared as integers.
    """

    def __init__(self, graph: Graph, budget_bytes: int, deadline: Deadline, *, cautious: bool) -> None:
        index = graph.index
        self.graph = graph
        self.order = index.defaults
        self.units = time_units(graph)
        self.first_runs = math.fsum(self.units.times[i] for i in self.order)
        self.program = IntegerProgram("stages")
        free = budget_bytes - graph.resident_bytes
        self._unit, self._cautious = byte_units(graph, free).size, cautious
        self._budget = free // self._unit
        self._workspace = [self._bytes(graph.operations[i].workspace_bytes) for i in self.order]
        place = {i: k for k, i in enumerate(self.order)}
        self.tensors = [
            _Tensor(
                tensor,
                k,
                tuple(place[reader] for reader in index.readers[tensor] if reader in place),
                self._bytes(index.storage_bytes[index.storage_of[tensor]]),
                index.is_result[tensor],
            )
            for k, i in enumerate(self.order)
            for tensor in index.outputs[i]
        ]
        self.again: list[dict[int, Variable]] = []
        self._add_variables()
        for stage in range(len(self.again)):
            if deadline.passed:
                # Nothing will be solved: `minimize` checks the deadline first.
                break
            self._add_stage(stage)
        for tensor in self.tensors:
            if tensor.is_result:
                self.program.at_least("result_live", [(self.live[-1][tensor.number], 1.0)], 1)

    def schedule(self) -> Schedule:
        """Return the schedule that the variables describe."""
        runs: list[int] = []
        for stage, again in enumerate(self.again):
            runs += [self.order[k] for k, variable in again.items() if is_set(variable)]
            runs += self.order[stage : stage + 1]
        return schedule_from_runs(self.graph, runs)

    def _bytes(self, count: int) -> int:
        return -(-count // self._unit) if self._cautious else count // self._unit

    def _add_variables(self) -> None:
        stages = len(self.order) + any(tensor.is_result for tensor in self.tensors)
        times = [self.units.times[i] for i in self.order]
        repeatable = [self.graph.operations[i].repeatable for i in self.order]
        self.again = [
            {k: self.program.binary(f"R_{t}_{k}", times[k]) for k in range(min(t, len(self.order))) if repeatable[k]}
            for t in range(stages)
        ]
        self.live: list[dict[int, Variable]] = [
            {
                tensor.number: self.program.binary(f"S_{t}_{tensor.number}")
                for tensor in self.tensors
                if tensor.producer < t
            }
            for t in range(stages + 1)
        ]

    def _add_stage(self, stage: int) -> None:
        again, program = self.again[stage], self.program
        last = min(stage, len(self.order) - 1)
        held: list[list[tuple[Variable, float]]] = [[] for _ in range(last + 1)]
        kept_by: dict[int, list[tuple[Variable, float]]] = {k: [] for k in again}
        for tensor in self.tensors:
            if tensor.producer > last or tensor.producer == stage:
                continue
            before, after = self.live[stage][tensor.number], self.live[stage + 1][tensor.number]
            run = again.get(tensor.producer)
            readers = [k for k in tensor.readers if k == stage or k in again]
            gaps = [program.fraction(f"H_{stage}_{tensor.number}_{k}") for k in readers] + [after]
            computed = [(before, -1.0)] + ([(run, -1.0)] if run is not None else [])
            # A tensor that is live after its producer's moment was live before, or was computed.
            program.at_most("computed", [(gaps[0], 1.0), *computed], 0)
            if run is not None:
                # A tensor that is recomputed is not live until then.
                program.at_most("computed_once", [(before, 1.0), (run, 1.0)], 1)
                kept_by[tensor.producer].append((gaps[0], -1.0))
            for earlier, later in pairwise(gaps):
                # A freed tensor stays freed until the next stage.
                program.at_most("freed", [(later, 1.0), (earlier, -1.0)], 0)
            for k, gap in zip(readers, gaps, strict=False):
                # It is live at its readers.
                terms = [(gap, 1.0)] if k == stage else [(gap, 1.0), (again[k], -1.0)]
                program.at_least("read", terms, 1 if k == stage else 0)
            if tensor.units:
                ends = [*readers, last]
                starts = [tensor.producer, *readers]
                for k in range(tensor.producer + 1):
                    held[k].append((before, tensor.units))
                for gap, start, end in zip(gaps, starts, ends, strict=True):
                    for k in range(start + 1, end + 1):
                        held[k].append((gap, tensor.units))
        for k, terms in kept_by.items():
            # Only a tensor that is read or kept is recomputed.
            program.at_most("useful", [(again[k], 1.0), *terms], 0)
        output_units = [0] * (last + 1)
        for tensor in self.tensors:
            if tensor.producer <= last:
                output_units[tensor.producer] += tensor.units
        for k in range(last + 1):
            # While an operation runs: live tensors, its outputs, its workspace.
            own = output_units[k] + self._workspace[k]
            if k == stage:
                program.at_most("bytes", held[k], self._budget - own)
            elif k in again:
                program.at_most("bytes", [*held[k], (again[k], own)], self._budget)
