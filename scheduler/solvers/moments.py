"""Bound the peak of every schedule by an integer program over what is in memory when a task first runs.

What later operations need must be live at that moment, unless it can be recomputed afterwards.
So the least memory at the moment, over all ways to divide the operations into those that have
run before it and those that run after it, is a lower bound on the peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from scheduler.graph import Graph
from scheduler.problem import Floor, Problem, necessary_tasks, possible_first_runs, working_set_bytes
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.views import FoldedViews, fold_views
from scheduler.solvers.integer_program import IntegerProgram, TimeIsUpError, Variable
from scheduler.solvers.scaling import byte_units


@dataclass(frozen=True)
class _Sum:
    """A sum of binaries and a constant."""

    terms: tuple[Variable, ...] = ()
    constant: int = 0

    def __add__(self, other: _Sum) -> _Sum:
        return _Sum(self.terms + other.terms, self.constant + other.constant)


_ZERO, _ONE = _Sum(), _Sum(constant=1)

MOST_OPERATIONS = 20_000
"""Precedence takes one bit per pair of tasks: for more operations, more than some hundred MB."""
_PATIENCE = 30
"""The search for a floor ends when so many moments in succession have not raised it."""


def proven_floor(problem: Problem, deadline: Deadline, *, enough_bytes: int) -> Floor:
    """Return a lower bound on the peak of every schedule in the problem's order: the best of many moments.

    Parameters
    ----------
    problem : Problem
    deadline : Deadline
    enough_bytes : int
        The search ends as soon as the floor is at least this.
    """
    best, graph = problem.floor, problem.graph
    if len(graph.operations) > MOST_OPERATIONS or best.bytes >= enough_bytes:
        return best
    known = FirstRuns.of(graph, reorder=problem.reorder)
    failures = 0
    for moment in _most_promising_first(known):
        if best.bytes >= enough_bytes or failures == _PATIENCE or deadline.passed:
            break
        least = MomentProgram(known, moment, deadline).least_bytes(deadline)
        failures += 1
        if least > best.bytes:
            best, failures = Floor(least, graph.operations[graph.index.tasks[moment][0]].name, alone=False), 0
    return best


def _most_promising_first(known: FirstRuns) -> list[int]:
    """Return the moments, those first that need most together with the results that can be complete by then."""
    graph, index = known.graph, known.graph.index
    results: dict[int, int] = {}
    for t, result in enumerate(index.is_result):
        if result and index.producers[t]:
            results.setdefault(index.storage_of[t], index.task_of[index.producers[t][0]])
    needed = [(index.storage_bytes[s], known.precedence.before(task)) for s, task in results.items()]

    def need(moment: int) -> int:
        before = known.precedence.before(moment) | 1 << moment
        complete = sum(size for size, tasks in needed if not tasks & ~before)
        return complete + min(working_set_bytes(graph, i) for i in index.tasks[moment])

    return sorted(known.moments(), key=need, reverse=True)


@dataclass(frozen=True)
class FirstRuns:
    """What is known about the first runs of a graph's tasks in every schedule.

    Attributes
    ----------
    graph : Graph
    precedence : Precedence
    necessary : frozenset of int
        Tasks that run in every schedule.
    forward, backward : frozenset of int
        Tasks all of whose operations are in the forward phase, and in the backward phase.
    views : FoldedViews
        Pure views, for which their bases are counted.
    inputs : tuple of tuple of int
        Tensors that each operation reads, as bases, without the resident ones.
    """

    graph: Graph
    precedence: Precedence
    necessary: frozenset[int]
    forward: frozenset[int]
    backward: frozenset[int]
    views: FoldedViews
    inputs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph, *, reorder: bool) -> FirstRuns:
        """Return what is known about a graph, for schedules in any order or in the input order."""
        index, views = graph.index, fold_views(graph)
        phases = [{graph.operations[i].phase for i in task} for task in index.tasks]
        return cls(
            graph,
            Precedence(graph, reorder=reorder),
            frozenset(necessary_tasks(graph)),
            frozenset(task for task, found in enumerate(phases) if found == {"forward"}),
            frozenset(task for task, found in enumerate(phases) if found == {"backward"}),
            views,
            tuple(tuple(sorted({views.root[t] for t in ids} - {-1})) for ids in index.inputs),
        )

    def moments(self) -> list[int]:
        """Return the tasks whose first runs are moments: necessary ones that are not pure views."""
        return [task for task in sorted(self.necessary) if not self.views.folded[self.graph.index.tasks[task][0]]]

    def has_run(self, task: int, moment: int) -> bool:
        """Return whether a task has run before another first runs, in every schedule."""
        # Forward tasks first run before the backward phase.
        phases = task in self.forward and moment in self.backward
        return task in self.necessary and (phases or bool(self.precedence.before(moment) >> task & 1))

    def has_not_run(self, operation: int, moment: int) -> bool:
        """Return whether an operation has not run before a task first runs, in every schedule."""
        task = self.graph.index.task_of[operation]
        phases = moment in self.forward and self.graph.operations[operation].phase == "backward"
        return phases or task == moment or bool(self.precedence.after(moment) >> task & 1)

    def cannot_begin_after(self, task: int, moment: int) -> bool:
        """Return whether a task that has not run before another first runs never runs, in every schedule."""
        if self.precedence.reorder:
            return task in self.forward and moment in self.backward
        return bool(self.precedence.before(moment) >> task & 1)


@dataclass
class MomentProgram:
    """The integer program that minimizes the memory during the first run of a task.

    Parameters
    ----------
    known : FirstRuns
    moment : int
        A necessary task.
    deadline : Deadline
        A program that is not built by then is not solved: its answer is the resident memory.

    Binaries say which operations have run before (D), which tensors are live then (S), and
    which operations run at that moment or later (R). Every schedule maps to a feasible point.
    Bytes are rounded down.
    """

    known: FirstRuns
    moment: int
    deadline: Deadline
    done: dict[int, _Sum] = field(init=False, default_factory=dict)
    runs: dict[int, _Sum] = field(init=False, default_factory=dict)
    first: dict[int, _Sum] = field(init=False, default_factory=dict)
    live: dict[int, Variable] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.known.graph
        self.index = graph.index
        self.operations = [i for i, folded in enumerate(self.known.views.folded) if not folded]
        self.constant = 0
        most_bytes = sum(self.index.storage_bytes) + max(operation.workspace_bytes for operation in graph.operations)
        self.byte_scale = byte_units(graph, most_bytes).size
        self.program = IntegerProgram("moment", self.deadline)
        with suppress(TimeIsUpError):
            self._add_variables()
            self._add_first_run()
            self._add_inputs()
            self._add_ends()

    def least_bytes(self, deadline: Deadline) -> int:
        """Return a lower bound on the peak of every schedule, resident tensors included."""
        bound = self.program.minimize(deadline).bound
        if not math.isfinite(bound):
            return self.index.resident_bytes
        # The optimum is an integer number of units: rounding up undoes the loss to tolerances.
        units = self.constant + math.ceil(max(0.0, bound) * (1 - 1e-7) - 1e-3)
        return self.index.resident_bytes + self.byte_scale * units

    def _add_variables(self) -> None:
        index, known = self.index, self.known
        by_storage: dict[int, list[Variable]] = {}
        for i in self.operations:
            task = index.task_of[i]
            certain = len(index.tasks[task]) == 1 and task in known.necessary
            if known.has_not_run(i, self.moment):
                self.done[i], self.runs[i] = _ZERO, _ONE if certain else self._binary("runs")
                continue
            if certain and known.has_run(task, self.moment):
                repeatable = known.graph.operations[i].repeatable
                self.done[i], self.runs[i] = _ONE, self._binary("runs") if repeatable else _ZERO
            else:
                self.done[i], self.runs[i] = self._binary("done"), self._binary("runs")
            for t in index.outputs[i]:
                if t not in self.live:
                    # Integer by itself, because the least value is a maximum of differences of binaries.
                    self.live[t] = self.program.fraction("live")
                    by_storage.setdefault(index.storage_of[t], []).append(self.live[t])
        for storage, tensors in by_storage.items():
            size = index.storage_bytes[storage] // self.byte_scale
            if size:
                held = self.program.fraction("held", float(size))
                for live in tensors:
                    # A storage is held while any of its tensors is live.
                    self.program.at_least("held", [(held, 1.0), (live, -1.0)], 0)

    def _add_first_run(self) -> None:
        """One operation of the moment's task runs: its inputs are live, and it allocates its outputs and workspace."""
        graph, index = self.known.graph, self.index
        for i in possible_first_runs(graph, self.moment):
            size = (index.allocated_bytes[i] + graph.operations[i].workspace_bytes) // self.byte_scale
            if len(index.tasks[self.moment]) == 1:
                self.first[i], self.constant = _ONE, size
            else:
                self.first[i] = _Sum((self.program.binary("first", float(size)),))
            self._at_least("first_runs", self.runs[i], self.first[i])
            for t in self.known.inputs[i]:
                self._at_least("first_input", self._live(t), self.first[i])
        self._at_least("one_first", sum(self.first.values(), _ZERO), _ONE)

    def _add_inputs(self) -> None:
        """An operation that has run had its inputs; one that runs later has them live, or recomputed by then."""
        known, index = self.known, self.index
        for t, live in self.live.items():
            # A tensor is live only if it has been computed.
            self._at_least("computed", self._sum(self.done, index.producers[t]), _Sum((live,)))
        for i in self.operations:
            for t in known.inputs[i]:
                producers = index.producers[t]
                self._at_least("had", self._sum(self.done, producers), self.done[i])
                if self.first.get(i) is not _ONE:
                    self._at_least("needs", self._available(t), self.runs[i])
            if known.cannot_begin_after(index.task_of[i], self.moment):
                self._at_least("begun", self._sum(self.done, index.tasks[index.task_of[i]]), self.runs[i])
            if not known.graph.operations[i].repeatable:
                self._at_least("once", _ONE, self.done[i] + self.runs[i])

    def _add_ends(self) -> None:
        """Results are live at the end; necessary tasks and required operations run, some of them before the moment."""
        known, index = self.known, self.index
        for t, result in enumerate(index.is_result):
            base = known.views.root[t]
            if result and base >= 0:
                self._at_least("result", self._available(base), _ONE)
        for i in self.operations:
            if i in index.required:
                self._at_least("required", self.done[i] + self.runs[i], _ONE)
        for number in known.necessary:
            task = index.tasks[number]
            if not known.views.folded[task[0]]:
                has_run = self._sum(self.done, task)
                certain = known.has_run(number, self.moment)
                self._at_least("necessary", has_run if certain else has_run + self._sum(self.runs, task), _ONE)

    def _live(self, tensor: int) -> _Sum:
        return _Sum((self.live[tensor],)) if tensor in self.live else _ZERO

    def _available(self, tensor: int) -> _Sum:
        """Return a sum that is 0 if a tensor is neither live at the moment nor computed after it."""
        return self._live(tensor) + self._sum(self.runs, self.index.producers[tensor])

    @staticmethod
    def _sum(entries: dict[int, _Sum], operations: Sequence[int]) -> _Sum:
        return sum((entries[i] for i in operations), _ZERO)

    def _binary(self, name: str) -> _Sum:
        return _Sum((self.program.binary(name),))

    def _at_least(self, name: str, total: _Sum, least: _Sum) -> None:
        """Add the row: total >= least, unless it always holds."""
        if total.constant >= least.constant + len(least.terms):
            return
        terms = [(variable, 1.0) for variable in total.terms] + [(variable, -1.0) for variable in least.terms]
        self.program.at_least(name, terms, least.constant - total.constant)
