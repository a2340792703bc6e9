"""The judge: what a schedule costs, and whether it breaks a rule.

Everything that this package says of a schedule (time, peak, what it saves) comes from
`simulate`; no solver grades itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.errors import InvalidScheduleError
from scheduler.graph import Graph, GraphIndex
from scheduler.schedule import Action, Compute, Free, Schedule


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a schedule costs.

    Attributes
    ----------
    time : float
        Sum over all runs, in the graph's `time_unit`.
    peak_bytes : int
        Largest memory at any moment, resident tensors included.
    peak_operation : str
        The operation during whose run the peak first stands.
    live_peak_bytes : int
        Largest memory at any moment if no operation had a workspace.
    memory : ndarray of int64, shape (actions,)
        Bytes during each `Compute` and after each `Free`, resident tensors included.
    recomputed : mapping of str to int
        Runs - 1 of each task that ran, under the name of the task's default operation.
    saved : tuple of str
        Tensors live at the end of the forward phase, resident ones left out: the
        checkpoint set.
    saved_bytes : int
        Bytes live at the end of the forward phase, resident tensors left out.
    """

    time: float
    peak_bytes: int
    peak_operation: str
    live_peak_bytes: int
    memory: npt.NDArray[np.int64]
    recomputed: Mapping[str, int]
    saved: tuple[str, ...]
    saved_bytes: int


def simulate(graph: Graph, schedule: Schedule | Iterable[Action]) -> Simulation:
    """Judge a schedule of a graph.

    An output whose storage some input has joins the instance of the first such input (a
    view). Otherwise the operation makes one new instance per storage for its outputs that
    are not live; an output that is live already keeps its old instance, and the copy made
    again counts during the operation only. An instance counts once, with its storage's
    size, while any tensor on it is live. During an operation, memory is the live instances,
    its new ones and its workspace.

    Parameters
    ----------
    graph : Graph
    schedule : Schedule

    Returns
    -------
    Simulation

    Raises
    ------
    InvalidScheduleError
        At the first broken rule, with its index and why: an input is not live; all outputs
        are live already; a freed tensor is not live or is resident; a non-repeatable
        operation runs twice; a backward operation runs before every forward task that the
        forward results need; a forward task first runs after that; at the end, a required
        operation has not run or a result is not live.
    """
    actions = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    machine = _Machine(graph)
    for position, action in enumerate(actions):
        if isinstance(action, Compute):
            machine.compute(position, action)
        else:
            machine.free(position, action)
    return machine.finish(len(actions))


class _Machine:
    """The memory and the history of a run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index: GraphIndex = graph.index
        self.instance: dict[int, int] = {}
        """Instance of each live tensor that is not resident."""
        self.holders: list[int] = []
        """Live tensors on each instance."""
        self.sizes: list[int] = []
        self.live_bytes = self.index.resident_bytes
        self.task_runs = [0] * len(self.index.tasks)
        self.runs = [0] * len(graph.operations)
        self.memory: list[int] = []
        self.peak_bytes = self.index.resident_bytes
        self.peak_operation = ""
        self.live_peak_bytes = self.index.resident_bytes
        self.in_backward = False
        self.boundary: tuple[tuple[str, ...], int] = ((), 0)

    def compute(self, position: int, action: Compute) -> None:
        """Run an operation, or say which rule forbids it."""
        index = self.index
        i = index.operation_ids.get(action.operation, -1)
        if i < 0:
            raise InvalidScheduleError(position, f'the graph has no operation "{action.operation}"')
        self._check_compute(position, i)
        instance = self.instance
        storage_of, outputs = index.storage_of, index.outputs[i]
        viewed: dict[int, int | None] = {}
        for tensor in index.inputs[i]:
            viewed.setdefault(storage_of[tensor], instance.get(tensor))
        made: dict[int, int] = {}
        made_bytes = 0
        fresh = [tensor for tensor in outputs if tensor not in instance]
        for tensor in outputs:
            storage = storage_of[tensor]
            if storage not in viewed and storage not in made:
                made[storage] = -1
                made_bytes += index.storage_bytes[storage]
        live_bytes = self.live_bytes + made_bytes
        during = live_bytes + self.graph.operations[i].workspace_bytes
        for tensor in fresh:
            storage = storage_of[tensor]
            if storage in viewed:
                joined = viewed[storage]
            else:
                joined = made[storage]
                if joined < 0:
                    joined = made[storage] = self._new_instance(storage)
            # A view of a resident tensor has no instance of its own and costs nothing.
            instance[tensor] = -1 if joined is None else joined
            if joined is not None and joined >= 0:
                self.holders[joined] += 1
        self.memory.append(during)
        if during > self.peak_bytes or not self.peak_operation:
            self.peak_bytes, self.peak_operation = during, action.operation
        self.live_peak_bytes = max(self.live_peak_bytes, live_bytes)
        self.task_runs[index.task_of[i]] += 1
        self.runs[i] += 1

    def free(self, position: int, action: Free) -> None:
        """Let go of a tensor, or say which rule forbids it."""
        tensor = self.index.tensor_ids.get(action.tensor, -1)
        if tensor < 0:
            raise InvalidScheduleError(position, f'the graph has no tensor "{action.tensor}"')
        if self.index.is_resident[tensor]:
            raise InvalidScheduleError(position, f'resident tensor "{action.tensor}" cannot be freed')
        number = self.instance.pop(tensor, None)
        if number is None:
            raise InvalidScheduleError(position, f'tensor "{action.tensor}" is freed but not live')
        if number >= 0:
            self.holders[number] -= 1
            if self.holders[number] == 0:
                self.live_bytes -= self.sizes[number]
        self.memory.append(self.live_bytes)

    def finish(self, length: int) -> Simulation:
        """Check what must stand at the end, and sum up."""
        index, operations = self.index, self.graph.operations
        for i in sorted(index.required):
            if not self.runs[i]:
                raise InvalidScheduleError(length, f'required operation "{operations[i].name}" has not run')
        for name in self.graph.results:
            tensor = index.tensor_ids[name]
            if not index.is_resident[tensor] and tensor not in self.instance:
                raise InvalidScheduleError(length, f'result "{name}" is not live at the end')
        if not self.in_backward:
            self._mark_boundary()
        recomputed = {
            operations[task[0]].name: runs - 1 for task, runs in zip(index.tasks, self.task_runs, strict=True) if runs
        }
        memory = np.array(self.memory, dtype=np.int64)
        memory.flags.writeable = False
        saved, saved_bytes = self.boundary
        return Simulation(
            time=math.fsum(op.time * runs for op, runs in zip(operations, self.runs, strict=True)),
            peak_bytes=self.peak_bytes,
            peak_operation=self.peak_operation,
            live_peak_bytes=self.live_peak_bytes,
            memory=memory,
            recomputed=recomputed,
            saved=saved,
            saved_bytes=saved_bytes,
        )

    def _check_compute(self, position: int, i: int) -> None:
        index, operation = self.index, self.graph.operations[i]
        where = f'operation "{operation.name}"'
        for tensor in index.inputs[i]:
            if tensor not in self.instance and not index.is_resident[tensor]:
                raise InvalidScheduleError(
                    position, f'{where} reads "{self.graph.tensors[tensor].name}", which is not live'
                )
        if index.outputs[i] and all(tensor in self.instance for tensor in index.outputs[i]):
            raise InvalidScheduleError(position, f"every output of {where} is live already")
        if not operation.repeatable and self.runs[i]:
            raise InvalidScheduleError(position, f"{where} is not repeatable and runs a second time")
        if operation.phase == "backward" and not self.in_backward:
            for task in index.forward_tasks:
                if not self.task_runs[task]:
                    missing = self.graph.operations[index.tasks[task][0]].name
                    raise InvalidScheduleError(
                        position,
                        f'backward {where} runs before forward operation "{missing}", which the forward results need',
                    )
            self._mark_boundary()
            self.in_backward = True
        elif operation.phase == "forward" and self.in_backward and not self.task_runs[index.task_of[i]]:
            raise InvalidScheduleError(position, f"forward {where} first runs after the backward phase began")

    def _mark_boundary(self) -> None:
        saved = tuple(tensor.name for t, tensor in enumerate(self.graph.tensors) if t in self.instance)
        self.boundary = (saved, self.live_bytes - self.index.resident_bytes)

    def _new_instance(self, storage: int) -> int:
        self.holders.append(0)
        self.sizes.append(self.index.storage_bytes[storage])
        self.live_bytes += self.sizes[-1]
        return len(self.sizes) - 1
