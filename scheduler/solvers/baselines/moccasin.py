"""Retention intervals: when each tensor is held, decided by constraint programming."""

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
"""CP-SAT computes in whole numbers of 64 bits."""
_SECONDS_BETWEEN_LOOKS = 0.05
"""At whether somebody asked for the answer."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest schedule in which each tensor is held for at most two intervals.

    Time is a row of events: stage j has one for each operation up to the j-th in the given
    order, and its last is that operation's first run. An operation runs at the event of its
    first run, and once more, or not, at an event of a later stage; what it makes is held from
    each run to an end that is free. The bytes held at an event keep to the budget. One
    further stage may stand at the end, for results that were dropped.

    Guarantee: optimal over such schedules when time and bound meet. Search space: "two
    intervals", which leaves out schedules that run an operation three times, or out of the
    input order within a stage: the bound says nothing about those. When: irregular graphs of
    up to about 100 operations. Cost: seconds to minutes; `MOST_OPERATIONS` at most. Memory: at most
    256 MiB. Reference:
    Bartan, Li, Teague, Lott and Dilkina 2023, "Moccasin: efficient tensor rematerialization
    for neural networks", ICML, section 2, with C = 2. Unlike there, an interval may end after
    the last first run of a reader (without that, feasible problems can seem infeasible), and
    no lengths of intervals are left out.

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
    # One worker: as fast as several on two cores, and deterministic.
    solver.parameters.num_workers = 1
    # Its own answer to Ctrl-C leaves the signal to the operating system, which ends the process at the next one.
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
    """Solve in a thread of its own, so that this one hears Ctrl-C and who stops the deadline."""
    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solver.solve, model)
        try:
            while wait([solving], timeout=_SECONDS_BETWEEN_LOOKS).not_done:
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
            f"OR-tools cannot be loaded ({error}); beside highspy 1.15 it cannot:"
            ' pip install "highspy<1.14", or use "ilp" or "auto"'
        ) from error
    return cp_model


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of an operation: its event, and a literal that says whether it is, as a first run always is."""

    event: int | cp_model.IntVar
    present: cp_model.IntVar


class _Intervals:
    """The program, over the needed operations in the input order."""

    def __init__(self, graph: Graph, budget_bytes: int, cp: ModuleType) -> None:
        self.graph, self.order = graph, graph.index.defaults
        self.model: cp_model.CpModel = cp.CpModel()
        self._events = cp.Domain.from_values
        self._always = self.model.new_constant(1)
        self._units = time_units(graph, _TIME_BITS)
        self._stages = len(self.order) + any(graph.index.is_result)
        self._end = _event(self._stages, 0)
        """One after the last event."""
        self._again = [self._second_run(k) for k in range(len(self.order))]
        self._ends: dict[int, list[cp_model.IntVar]] = {}
        self._maker = {tensor: k for k, i in enumerate(self.order) for tensor in graph.index.outputs[i]}
        self._intervals: list[cp_model.IntervalVar] = []
        self._demands: list[int] = []
        for k in range(len(self.order)):
            self._hold_outputs(k)
        for k in range(len(self.order)):
            self._serve_inputs(k)
        self.model.add_cumulative(self._intervals, self._demands, budget_bytes - graph.resident_bytes)
        self.model.minimize(
            sum(
                math.floor(self._units.times[i]) * run.present
                for i, run in zip(self.order, self._again, strict=True)
                if run is not None
            )
        )

    def bound(self, extra: float) -> float:
        """Return the lower bound on the time of the graph that one on the objective gives."""
        # No schedule takes a fraction of a unit: what tolerances took off comes back.
        least = max(0, math.ceil(extra - 1e-4)) if math.isfinite(extra) else 0
        return math.fsum([*(self._units.times[i] for i in self.order), least]) * self._units.scale

    def schedule(self, solver: cp_model.CpSolver) -> Schedule:
        """Return the schedule that the solver's answer stands for."""
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
                # What is made again is not held until then.
                self.model.add(ends[0] <= again.event).only_enforce_if(again.present)
            if index.is_result[tensor]:
                # A result stands at the end, from its last run on.
                self.model.add(ends[-1] == self._end).only_enforce_if(self._runs(k)[-1].present)
                if again is not None:
                    self.model.add(ends[0] == self._end).only_enforce_if(~again.present)

    def _serve_inputs(self, k: int) -> None:
        for tensor in self.graph.index.inputs[self.order[k]]:
            if not self.graph.index.is_resident[tensor]:
                for run in self._runs(k):
                    self._serve(tensor, run)

    def _serve(self, tensor: int, run: _Run) -> None:
        """Who reads a tensor finds it: held since its first run, or since its second."""
        ends, again = self._ends[tensor], self._again[self._maker[tensor]]
        if again is None:
            self.model.add(ends[0] > run.event).only_enforce_if(run.present)
            return
        second = self.model.new_bool_var("")
        self.model.add(ends[0] > run.event).only_enforce_if(run.present, ~second)
        self.model.add_implication(second, again.present)
        self.model.add(again.event < run.event).only_enforce_if(run.present, second)
        self.model.add(ends[1] > run.event).only_enforce_if(run.present, second)

    def _add_interval(self, run: _Run, end: cp_model.IntVar | cp_model.LinearExpr | int, size_bytes: int) -> None:
        """Hold that many bytes from a run to an end, which is the first event without them."""
        if size_bytes:
            length = self.model.new_int_var(1, self._end, "")
            interval = self.model.new_optional_interval_var(run.event, length, end, run.present, "")
            self._intervals.append(interval)
            self._demands.append(size_bytes)


def _event(stage: int, k: int) -> int:
    """Return the event of operation k in a stage; stage j has j + 1 of them."""
    return stage * (stage + 1) // 2 + k
