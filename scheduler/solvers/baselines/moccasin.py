"""Retention intervals: constraint programming decides when each tensor is live."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from scheduler.errors import MissingExtraError
from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.solution import Proposal
from scheduler.solvers.baselines.plain import check_plain
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.scaling import time_units

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

MOST_OPERATIONS = 160
SEARCH_SPACE = "two intervals"
_TIME_BITS = 48
"""Bits of the sum of all times; CP-SAT computes with integers of 64 bits."""
_POLL_SECONDS = 0.05
"""Time between two checks whether the search was cancelled."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest schedule in which each tensor is live for at most two intervals.

    Time is a sequence of events: stage j has one for each operation up to the j-th in the input
    order, and its last event is the first run of that operation. An operation runs at the event
    of its first run, and at most once more, at an event of a later stage; its outputs are live
    from each run to an end that is a variable. The bytes live at an event stay within the
    budget. One more stage may follow at the end, for results that were freed.

    Guarantee: optimal over such schedules when time and bound meet. Search space: "two
    intervals", which leaves out schedules that run an operation three times, or out of the
    input order within a stage: the bound says nothing about those. When: irregular graphs of
    up to about 100 operations. Cost: seconds to minutes, for at most `MOST_OPERATIONS` operations.
    Memory: at most 256 MiB. Reference: Bartan, Li, Teague, Lott and Dilkina 2023, "Moccasin:
    efficient tensor rematerialization for neural networks", ICML, section 2, with C = 2. Unlike
    there, an interval may end after the last first run of a reader (otherwise feasible problems
    can seem infeasible), and no lengths of intervals are excluded.

    Raises
    ------
    MissingExtraError
        If OR-tools is not installed.
    UnsuitableProblemError
        If the graph has more operations than that, alternatives, or tensors that share a
        storage.
    """
    graph = problem.graph
    check_plain(graph, "moccasin", MOST_OPERATIONS)
    cp = _load_cp_sat()
    if problem.budget_bytes < problem.floor.bytes:
        return Proposal(None, SEARCH_SPACE, infeasible=True)
    program = _Intervals(graph, problem.budget_bytes, cp)
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = deadline.remaining
    solver.parameters.random_seed = seed
    solver.parameters.absolute_gap_limit = max(1e-4, problem.gap * program.first_runs)
    # One worker: as fast as several on two cores, and deterministic.
    solver.parameters.num_workers = 1
    # The handler that CP-SAT installs for Ctrl-C restores the system's default, which ends the process at the next one.
    solver.parameters.catch_sigint_signal = False
    status = _solve(solver, program.model, deadline)
    if status == cp.INFEASIBLE:
        message = "proven: no schedule of two intervals per tensor fits; another one may"
        return Proposal(None, SEARCH_SPACE, bound=math.inf, messages=(message,))
    found = status in (cp.OPTIMAL, cp.FEASIBLE)
    bound = program.bound(solver.best_objective_bound)
    if not found:
        return Proposal(None, SEARCH_SPACE, bound=bound, messages=("no schedule was found by the time limit",))
    return Proposal(program.schedule(solver), SEARCH_SPACE, bound=bound)


def _solve(solver: cp_model.CpSolver, model: cp_model.CpModel, deadline: Deadline) -> object:
    """Solve in a thread of its own, so that this one can handle Ctrl-C and a cancelled deadline."""
    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solver.solve, model)
        try:
            while wait([solving], timeout=_POLL_SECONDS).not_done:
                if deadline.stopped:
                    solver.stop_search()
        finally:
            solver.stop_search()
    return solving.result()


def _load_cp_sat() -> ModuleType:
    try:
        from ortools.sat.python import cp_model
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            '"moccasin" needs OR-tools: pip install "checkpoint-scheduler[cpsat]", or use "ilp" or "auto"'
        ) from error
    except ImportError as error:
        raise MissingExtraError(
            f"OR-tools cannot be loaded ({error}); it does not work together with highspy 1.15:"
            ' pip install "highspy<1.14", or use "ilp" or "auto"'
        ) from error
    return cp_model


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of an operation: its event, and a literal for whether it takes place; a first run always does."""

    event: int | cp_model.IntVar
    present: cp_model.IntVar


class _Intervals:
    """The constraint program over the needed operations in the input order."""

    def __init__(self, graph: Graph, budget_bytes: int, cp: ModuleType) -> None:
        self.graph, self.order = graph, graph.index.defaults
        self.model: cp_model.CpModel = cp.CpModel()
        self._events = cp.Domain.from_values
        self._always = self.model.new_constant(1)
        self._units = time_units(graph, _TIME_BITS)
        self.first_runs = math.fsum(self._units.times[i] for i in self.order)
        """Time of all first runs, in units of the objective."""
        self._stages = len(self.order) + any(graph.index.is_result)
        self._end = _event(self._stages, 0)
        """The event after the last one."""
        self._again = [self._second_run(k) for k in range(len(self.order))]
        self._ends: dict[int, list[cp_model.IntVar]] = {}
        self._producer = {tensor: k for k, i in enumerate(self.order) for tensor in graph.index.outputs[i]}
        self._intervals: list[cp_model.IntervalVar] = []
        self._demands: list[int] = []
        for k in range(len(self.order)):
            self._hold_outputs(k)
        for k in range(len(self.order)):
            self._require_inputs(k)
        self.model.add_cumulative(self._intervals, self._demands, budget_bytes - graph.resident_bytes)
        self.model.minimize(
            sum(
                math.floor(self._units.times[i]) * run.present
                for i, run in zip(self.order, self._again, strict=True)
                if run is not None
            )
        )

    def bound(self, extra: float) -> float:
        """Return the lower bound on the time of the graph that follows from one on the objective."""
        # Times are integers: rounding up undoes the solver's tolerances.
        least = max(0, math.ceil(extra - 1e-4)) if math.isfinite(extra) else 0
        return (self.first_runs + least) * self._units.scale

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """Return the schedule that the solver's solution describes."""
        runs = [(_event(k, k), i) for k, i in enumerate(self.order)]
        for i, run in zip(self.order, self._again, strict=True):
            if run is not None and solver.boolean_value(run.present):
                runs.append((solver.value(run.event), i))
        return schedule_from_runs(self.graph, [i for _, i in sorted(runs)])

    def _second_run(self, k: int) -> _Run | None:
        later = range(k + 1, self._stages)
        if not later or not self.graph.operations[self.order[k]].repeatable:
            return None
        events = self._events([_event(stage, k) for stage in later])
        return _Run(self.model.new_int_var_from_domain(events, f"event_{k}"), self.model.new_bool_var(f"again_{k}"))

    def _runs(self, k: int) -> list[_Run]:
        again = self._again[k]
        return [_Run(_event(k, k), self._always)] + ([again] if again is not None else [])

    def _hold_outputs(self, k: int) -> None:
        index, i = self.graph.index, self.order[k]
        for run in self._runs(k):
            self._add_interval(run, run.event + 1, self.graph.operations[i].workspace_bytes)
        for tensor in index.outputs[i]:
            ends = self._ends[tensor] = []
            for run in self._runs(k):
                end = self.model.new_int_var(0, self._end, f"end_{tensor}_{len(ends)}")
                self.model.add(end > run.event)
                self._add_interval(run, end, index.storage_bytes[index.storage_of[tensor]])
                ends.append(end)
            again = self._again[k]
            if again is not None:
                # A tensor that is recomputed is not live until then.
                self.model.add(ends[0] <= again.event).only_enforce_if(again.present)
            if index.is_result[tensor]:
                # A result is live from its last run to the end.
                self.model.add(ends[-1] == self._end).only_enforce_if(self._runs(k)[-1].present)
                if again is not None:
                    self.model.add(ends[0] == self._end).only_enforce_if(~again.present)

    def _require_inputs(self, k: int) -> None:
        for tensor in self.graph.index.inputs[self.order[k]]:
            if not self.graph.index.is_resident[tensor]:
                for run in self._runs(k):
                    self._require(tensor, run)

    def _require(self, tensor: int, run: _Run) -> None:
        """Require that an input is live at a run: since its first run, or since its second."""
        ends, again = self._ends[tensor], self._again[self._producer[tensor]]
        if again is None:
            self.model.add(ends[0] > run.event).only_enforce_if(run.present)
            return
        second = self.model.new_bool_var("")
        self.model.add(ends[0] > run.event).only_enforce_if(run.present, ~second)
        self.model.add_implication(second, again.present)
        self.model.add(again.event < run.event).only_enforce_if(run.present, second)
        self.model.add(ends[1] > run.event).only_enforce_if(run.present, second)

    def _add_interval(self, run: _Run, end: cp_model.IntVar | cp_model.LinearExpr | int, size_bytes: int) -> None:
        """Add bytes that are live from a run to an end, which is the first event without them."""
        if size_bytes:
            length = self.model.new_int_var(1, self._end, "")
            interval = self.model.new_optional_interval_var(run.event, length, end, run.present, "")
            self._intervals.append(interval)
            self._demands.append(size_bytes)


def _event(stage: int, k: int) -> int:
    """Return the event of operation k in a stage; stage j has j + 1 of them."""
    return stage * (stage + 1) // 2 + k
