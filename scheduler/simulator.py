"""The simulator: check that a schedule is valid, and count its time and memory.

Every figure that this package gives for a schedule comes from `simulate`, whichever solver
found it.
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
from scheduler.units import format_bytes, text_table

_RESIDENT = -1
"""Instance number of the views of resident tensors, which cost nothing beyond the resident bytes."""


@dataclass(frozen=True, eq=False, repr=False)
class Simulation:
    """The time and memory of a schedule.

    Attributes
    ----------
    time : float
        Sum over all runs, in the graph's `time_unit`.
    peak_bytes : int
        Largest memory at any moment, resident tensors included.
    peak_operation : str
        The operation during which memory first reaches the peak.
    live_peak_bytes : int
        Largest memory at any moment, workspaces left out.
    memory : ndarray of int64, shape (actions,)
        Memory during each `Compute` and after each `Free`, resident tensors included.
    recomputed : mapping of str to int
        For each task that ran: its runs - 1, under the name of its default operation.
    saved : tuple of str
        The checkpoint set: tensors live at the end of the forward phase, without the
        resident ones.
    saved_bytes : int
        Memory at the end of the forward phase, without the resident tensors.
    """

    time: float
    peak_bytes: int
    peak_operation: str
    live_peak_bytes: int
    memory: npt.NDArray[np.int64]
    recomputed: Mapping[str, int]
    saved: tuple[str, ...]
    saved_bytes: int

    def __repr__(self) -> str:
        return (
            f"Simulation(time={self.time:g}, peak={format_bytes(self.peak_bytes)!r},"
            f" saved={format_bytes(self.saved_bytes)!r}, recomputations={sum(self.recomputed.values())})"
        )

    def summary(self) -> str:
        """Return the time, the peak, and what is saved and recomputed, as text."""
        recomputed = [runs for runs in self.recomputed.values() if runs]
        return text_table(
            [
                ("time", f"{self.time:g}"),
                ("peak", f'{format_bytes(self.peak_bytes)} ({self.peak_bytes} bytes), in "{self.peak_operation}"'),
                ("live peak", f"{format_bytes(self.live_peak_bytes)} without workspaces"),
                ("saved", format_bytes(self.saved_bytes)),
                ("saved tensors", str(len(self.saved))),
                ("recomputed tasks", f"{len(recomputed)} of {len(self.recomputed)}"),
                ("recomputations", str(sum(recomputed))),
            ]
        )


def simulate(graph: Graph, schedule: Schedule | Iterable[Action]) -> Simulation:
    """Simulate a schedule of a graph.

    An output whose storage some input has joins the instance of the first such input (a
    view). Otherwise the operation creates one new instance per storage for its outputs that
    are not live. An output that is already live keeps its old instance; the second copy
    counts only during the operation. An instance counts once, with its storage's size, while
    any tensor on it is live. Memory during an operation is the live instances, its new ones
    and its workspace.

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
        At the first action that breaks a rule: an input is not live; all outputs are already
        live; a freed tensor is not live or is resident; a non-repeatable operation runs
        twice; the first backward operation runs before a forward task that the forward
        results need; a forward task first runs after that; at the end, a required operation
        has not run or a result is not live.
    """
    actions = schedule if isinstance(schedule, Schedule) else Schedule(schedule)
    machine = _Machine(graph)
    for position, action in enumerate(actions):
        if isinstance(action, Compute):
            machine.compute(position, action)
        else:
            machine.free(position, action)
    return machine.finish(len(actions))


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """An instance of a storage that is in memory at one moment of a schedule.

    Attributes
    ----------
    tensors : tuple of str
        The live tensors on it, in the order of the graph.
    size_bytes : int
    """

    tensors: tuple[str, ...]
    size_bytes: int


def live_instances(graph: Graph, schedule: Schedule, position: int) -> tuple[LiveInstance, ...]:
    """Return what is in memory after an action, as the simulator counts it, without what is resident.

    Parameters
    ----------
    graph : Graph
    schedule : Schedule
    position : int
        Of the action in the schedule.

    Raises
    ------
    InvalidScheduleError
        If the schedule breaks a rule up to there.
    """
    machine = _Machine(graph)
    for number, action in enumerate(schedule):
        if isinstance(action, Compute):
            machine.compute(number, action)
        else:
            machine.free(number, action)
        if number == position:
            break
    tensors: dict[int, list[str]] = {}
    for tensor, instance in sorted(machine.instance.items()):
        if instance != _RESIDENT:
            tensors.setdefault(instance, []).append(graph.tensors[tensor].name)
    return tuple(LiveInstance(tuple(names), machine.sizes[instance]) for instance, names in tensors.items())


class _Machine:
    """The memory and the history of a simulated schedule."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.index: GraphIndex = graph.index
        self.instance: dict[int, int] = {}
        """Instance of each live tensor that is not resident; `_RESIDENT` for a view of one that is."""
        self.holders: list[int] = []
        """Number of live tensors on each instance."""
        self.sizes: list[int] = []
        """Bytes of each instance."""
        self.live_bytes = self.index.resident_bytes
        self.task_runs = [0] * len(self.index.tasks)
        self.runs = [0] * len(graph.operations)
        self.memory: list[int] = []
        self.peak_bytes = self.index.resident_bytes
        self.peak_operation = ""
        self.live_peak_bytes = self.index.resident_bytes
        self.in_backward = False
        self.saved: tuple[str, ...] = ()
        self.saved_bytes = 0

    def compute(self, position: int, action: Compute) -> None:
        """Run an operation, or raise if a rule forbids it."""
        index = self.index
        i = index.operation_ids.get(action.operation, -1)
        if i < 0:
            raise InvalidScheduleError(position, f'the graph has no operation "{action.operation}"')
        self._check_compute(position, i)
        instance, storage_of = self.instance, index.storage_of
        instance_of_storage: dict[int, int] = {}
        for tensor in index.inputs[i]:
            instance_of_storage.setdefault(storage_of[tensor], instance.get(tensor, _RESIDENT))
        live_bytes = self.live_bytes + index.allocated_bytes[i]
        during = live_bytes + self.graph.operations[i].workspace_bytes
        for tensor in index.outputs[i]:
            if tensor in instance:
                continue
            storage = storage_of[tensor]
            if storage not in instance_of_storage:
                instance_of_storage[storage] = self._new_instance(storage)
            number = instance[tensor] = instance_of_storage[storage]
            if number != _RESIDENT:
                self.holders[number] += 1
        self.memory.append(during)
        if during > self.peak_bytes or not self.peak_operation:
            self.peak_bytes, self.peak_operation = during, action.operation
        self.live_peak_bytes = max(self.live_peak_bytes, live_bytes)
        self.task_runs[index.task_of[i]] += 1
        self.runs[i] += 1

    def free(self, position: int, action: Free) -> None:
        """Free a tensor, or raise if a rule forbids it."""
        tensor = self.index.tensor_ids.get(action.tensor, -1)
        if tensor < 0:
            raise InvalidScheduleError(position, f'the graph has no tensor "{action.tensor}"')
        if self.index.is_resident[tensor]:
            raise InvalidScheduleError(position, f'resident tensor "{action.tensor}" cannot be freed')
        number = self.instance.pop(tensor, None)
        if number is None:
            raise InvalidScheduleError(position, f'tensor "{action.tensor}" is freed but not live')
        if number != _RESIDENT:
            self.holders[number] -= 1
            if self.holders[number] == 0:
                self.live_bytes -= self.sizes[number]
        self.memory.append(self.live_bytes)

    def finish(self, length: int) -> Simulation:
        """Check the rules about the end of a schedule, and return the totals."""
        index, operations = self.index, self.graph.operations
        for i in sorted(index.required):
            if not self.runs[i]:
                raise InvalidScheduleError(length, f'required operation "{operations[i].name}" has not run')
        for name in self.graph.results:
            tensor = index.tensor_ids[name]
            if not index.is_resident[tensor] and tensor not in self.instance:
                raise InvalidScheduleError(length, f'result "{name}" is not live at the end')
        if not self.in_backward:
            self._record_saved()
        recomputed = {
            operations[task[0]].name: runs - 1 for task, runs in zip(index.tasks, self.task_runs, strict=True) if runs
        }
        memory = np.array(self.memory, dtype=np.int64)
        memory.flags.writeable = False
        return Simulation(
            time=math.fsum(op.time * runs for op, runs in zip(operations, self.runs, strict=True)),
            peak_bytes=self.peak_bytes,
            peak_operation=self.peak_operation,
            live_peak_bytes=self.live_peak_bytes,
            memory=memory,
            recomputed=recomputed,
            saved=self.saved,
            saved_bytes=self.saved_bytes,
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
            raise InvalidScheduleError(position, f"every output of {where} is already live")
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
            self._record_saved()
            self.in_backward = True
        elif operation.phase == "forward" and self.in_backward and not self.task_runs[index.task_of[i]]:
            raise InvalidScheduleError(position, f"forward {where} first runs after the backward phase began")

    def _record_saved(self) -> None:
        self.saved = tuple(tensor.name for t, tensor in enumerate(self.graph.tensors) if t in self.instance)
        self.saved_bytes = self.live_bytes - self.index.resident_bytes

    def _new_instance(self, storage: int) -> int:
        self.holders.append(0)
        self.sizes.append(self.index.storage_bytes[storage])
        self.live_bytes += self.sizes[-1]
        return len(self.sizes) - 1
