"""What a schedule implies for the code that runs it: where the forward ends, and which copies are unnecessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.instructions import Snapshot, Update
from scheduler.schedule import Action, Compute, Schedule


@dataclass(frozen=True)
class ScheduleAnalysis:
    """A schedule divided into forward and backward.

    Attributes
    ----------
    forward : tuple of Action
        The actions before the first operation of the backward.
    backward : tuple of Action
    elided_snapshots : mapping of str to str
        Snapshots that need no copy, with the resident tensor that replaces each: nothing reads
        such a snapshot after the resident tensor has been updated.
    """

    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    elided_snapshots: Mapping[str, str]


def analyze_schedule(capture: Capture, schedule: Schedule) -> ScheduleAnalysis:
    """Divide a schedule at the end of the forward and find the snapshots that need no copy."""
    phases = {operation.name: operation.phase for operation in capture.graph.operations}
    actions = tuple(schedule)
    boundary = next(
        position
        for position, action in enumerate(actions)
        if isinstance(action, Compute) and phases[action.operation] == "backward"
    )
    return ScheduleAnalysis(actions[:boundary], actions[boundary:], _find_elided_snapshots(capture, schedule))


def _find_elided_snapshots(capture: Capture, schedule: Schedule) -> dict[str, str]:
    graph = capture.graph
    operations = {operation.name: operation for operation in graph.operations}
    runs = [
        (position, operations[action.operation])
        for position, action in enumerate(schedule)
        if isinstance(action, Compute)
    ]
    instructions = {
        operation.name: instruction
        for operation, instruction in zip(graph.operations, capture.instructions, strict=True)
    }
    results = set(graph.results)
    elided: dict[str, str] = {}
    for name, snapshot in instructions.items():
        if not isinstance(snapshot, Snapshot):
            continue
        storage = graph.tensor(snapshot.tensor).storage
        views = {tensor.name for tensor in graph.tensors if tensor.storage == storage}
        updates = {
            other
            for other, instruction in instructions.items()
            if isinstance(instruction, Update) and instruction.target == snapshot.source
        }
        first_update = min(position for position, operation in runs if operation.name in updates)
        last_read = max(
            position for position, operation in runs if operation.name == name or views.intersection(operation.inputs)
        )
        if last_read < first_update and not views & results:
            elided[snapshot.tensor] = snapshot.source
    return elided
