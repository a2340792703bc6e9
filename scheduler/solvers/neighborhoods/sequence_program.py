"""An integer program over a sequence of runs: which of the free ones to make, with memory at every run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.integer_program import IntegerProgram, Variable, is_set

LEAST_GAIN = 1e-6
"""Only answers that save this share of the sequence's time count."""
BYTE_UNITS = 1e4
"""The budget in the unit of the rows of bytes: HiGHS is exact to some 1e-6 of a unit."""
CLOSED_GAP = 1e-6
"""A program is solved if its bound is within this share of its objective."""


class Storages:
    """A contracted graph as storages: what each operation produces and reads.

    A storage belongs to a task; its alternatives share it.

    Parameters
    ----------
    contraction : Contraction
    """

    def __init__(self, contraction: Contraction) -> None:
        graph, index = contraction.graph, contraction.graph.index
        model = contraction.model
        self.budget = contraction.budget_bytes - graph.resident_bytes
        self.time = [operation.time for operation in graph.operations]
        self.bytes: list[int] = []
        numbers: dict[tuple[int, int], int] = {}
        of_tensor: list[list[int]] = [[] for _ in graph.tensors]
        self.outputs: list[list[int]] = []
        for i in range(len(graph.operations)):
            row = model.outputs[model.output_start[i] : model.output_start[i + 1]].tolist()
            for t in row:
                key = index.task_of[i], index.storage_of[t]
                if key not in numbers:
                    numbers[key] = len(self.bytes)
                    self.bytes.append(index.storage_bytes[index.storage_of[t]])
                if numbers[key] not in of_tensor[t]:
                    of_tensor[t].append(numbers[key])
            self.outputs.append(sorted({numbers[index.task_of[i], index.storage_of[t]] for t in row}))
        read = [model.inputs[model.input_start[i] : model.input_start[i + 1]].tolist() for i in range(len(self.time))]
        self.inputs = [sorted({s for t in row for s in of_tensor[t]}) for row in read]
        self.results = {s for t in model.is_result.nonzero()[0].tolist() for s in of_tensor[t]}
        self.own_bytes = [
            sum(self.bytes[s] for s in row) + operation.workspace_bytes
            for row, operation in zip(self.outputs, graph.operations, strict=True)
        ]
        self.repeatable = [
            operation.repeatable and bool(row) and len(index.tasks[index.task_of[i]]) == 1
            for i, (operation, row) in enumerate(zip(graph.operations, self.outputs, strict=True))
        ]
        self._producers: list[list[int]] = [[] for _ in self.bytes]
        self._readers: list[list[int]] = [[] for _ in self.bytes]
        for i, (outputs, inputs) in enumerate(zip(self.outputs, self.inputs, strict=True)):
            for s in outputs:
                self._producers[s].append(i)
            for s in inputs:
                self._readers[s].append(i)

    def sources(self, operation: int) -> list[int]:
        """Return the operations that an operation reads from."""
        return sorted({i for s in self.inputs[operation] for i in self._producers[s]})

    def readers(self, operation: int) -> list[int]:
        """Return the operations that read from an operation."""
        return sorted({i for s in self.outputs[operation] for i in self._readers[s]})

    def around(self, operation: int) -> list[int]:
        """Return both."""
        return [*self.sources(operation), *self.readers(operation)]


@dataclass(frozen=True, slots=True)
class Step:
    """A run of a sequence.

    Attributes
    ----------
    operation : int
    is_free : bool
        Whether the program decides whether it is made.
    runs_now : bool
        Whether the sequence to improve makes it.
    """

    operation: int
    is_free: bool
    runs_now: bool


@dataclass(frozen=True, slots=True)
class _Life:
    """A stretch of steps in which a storage of so many bytes is held if its variable is 1, or always."""

    variable: Variable | None
    begin: int
    end: int
    size: int


class SequenceProgram:
    """Minimize the time of the free runs of a sequence.

    A storage may be held from one of its uses, a run that produces or reads it, to the next: if
    it was held before or is produced by the first of them. A run needs what it reads held. At
    each run, what is held across it and what it produces and needs fit the budget. For given runs
    the least choice of what to hold is integral, so only runs are binaries.

    Parameters
    ----------
    storages : Storages
    steps : sequence of Step
    deadline : Deadline

    Raises
    ------
    TimeIsUpError
        If the program is not built by the deadline.
    """

    def __init__(self, storages: Storages, steps: Sequence[Step], deadline: Deadline) -> None:
        self.storages, self.steps = storages, steps
        self.program = IntegerProgram("neighborhood", deadline)
        chosen = [step.operation for step in steps if step.is_free]
        self.unit = math.fsum(storages.time[i] for i in chosen) / max(1, len(chosen)) or 1.0
        self.runs = [
            self.program.binary("run", storages.time[step.operation] / self.unit) if step.is_free else None
            for step in steps
        ]
        self.lives: list[_Life] = []
        uses: list[list[tuple[int, bool]]] = [[] for _ in storages.bytes]
        for position, step in enumerate(steps):
            for s in storages.inputs[step.operation]:
                uses[s].append((position, False))
            for s in storages.outputs[step.operation]:
                uses[s].append((position, True))
        for s, row in enumerate(uses):
            if any(self.runs[position] is not None for position, _ in row):
                self._add_choices(s, row)
            else:
                self._add_constants(s, row)
        self._add_bytes()

    def improve(self, deadline: Deadline, most_nodes: int) -> tuple[list[int] | None, bool]:
        """Return the operations of a faster sequence, or None, and whether the program was solved to the end."""
        time = self.storages.time
        free = math.fsum(time[step.operation] for step in self.steps if step.is_free and step.runs_now)
        everything = math.fsum(time[step.operation] for step in self.steps if step.runs_now)
        if free <= LEAST_GAIN * everything:
            return None, True
        terms = zip(self.program.variables, self.program.costs, strict=True)
        self.program.at_most("faster", terms, (free - LEAST_GAIN * everything) / self.unit)
        result = self.program.minimize(deadline, most_nodes=most_nodes)
        if not result.found:
            return None, result.infeasible
        runs = [step.operation for step, run in zip(self.steps, self.runs, strict=True) if run is None or is_set(run)]
        return runs, result.objective - result.bound <= CLOSED_GAP * max(1.0, result.objective)

    def _add_choices(self, storage: int, uses: Sequence[tuple[int, bool]]) -> None:
        """Add what may hold a storage between its uses, and the rows that relate it to runs."""
        held: Variable | None = None
        for number, (position, produces) in enumerate(uses):
            run = self.runs[position]
            if not produces:
                self._add_read(run, held)
            is_last = number + 1 == len(uses)
            if is_last and storage not in self.storages.results:
                return
            after = self.program.fraction("held")
            end = len(self.steps) if is_last else uses[number + 1][0] + 1
            self.lives.append(_Life(after, position + 1, end, self.storages.bytes[storage]))
            if not produces or run is not None:
                # It is held after a use only if it was before, or if that use produces it.
                earlier = [(variable, -1.0) for variable in (held, run if produces else None) if variable is not None]
                self.program.at_most("still_held", [(after, 1.0), *earlier], 0)
            held = after
        self._add_read(None, held)

    def _add_read(self, run: Variable | None, held: Variable | None) -> None:
        """Require that a storage is held where a run reads it."""
        terms = [(variable, sign) for variable, sign in ((held, 1.0), (run, -1.0)) if variable is not None]
        self.program.at_least("read", terms, 0 if run is not None else 1)

    def _add_constants(self, storage: int, uses: Sequence[tuple[int, bool]]) -> None:
        """Note when a storage is held whose runs are all fixed."""
        end = len(self.steps) if storage in self.storages.results else -1
        for position, produces in reversed(uses):
            if not produces:
                end = max(end, position + 1)
            elif end > position:
                self.lives.append(_Life(None, position + 1, end, self.storages.bytes[storage]))
                end = -1

    def _add_bytes(self) -> None:
        """Add the rows of bytes, except those that always hold."""
        begun: list[list[_Life]] = [[] for _ in range(len(self.steps) + 1)]
        ended: list[list[_Life]] = [[] for _ in range(len(self.steps) + 1)]
        for life in self.lives:
            if life.size and life.end > life.begin:
                begun[life.begin].append(life)
                ended[life.end].append(life)
        held: dict[Variable, int] = {}
        constant, most = 0, 0
        unit = self.storages.budget / BYTE_UNITS or 1.0
        for position, (step, run) in enumerate(zip(self.steps, self.runs, strict=True)):
            for life in ended[position]:
                most -= life.size
                if life.variable is None:
                    constant -= life.size
                else:
                    del held[life.variable]
            for life in begun[position]:
                most += life.size
                if life.variable is None:
                    constant += life.size
                else:
                    held[life.variable] = life.size
            own = self.storages.own_bytes[step.operation]
            if most + own <= self.storages.budget:
                continue
            terms = [(variable, size / unit) for variable, size in held.items()]
            if run is not None:
                terms.append((run, own / unit))
            limit = self.storages.budget - constant - (own if run is None else 0)
            self.program.at_most("bytes", terms, limit / unit)
