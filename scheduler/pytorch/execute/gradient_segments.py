"""Where gradients leave the backward: its division into segments.

Each segment is one autograd node. At its end it returns gradients, which autograd then adds to
`.grad` and hands to hooks, before the next segment begins. A segment ends

- where the schedule adds gradients to existing ones, if it contains such operations;
- otherwise, once nothing reads a group of gradients or their parameters any more, so that hooks
  may change both. A group holds up to 1 MiB or a sixteenth of all gradients, whichever is more;
  a larger gradient leaves alone (see `group_gradients`).

Gradients of inputs, gradients that share memory with other results, and the last group leave at
the end of the backward. All of them are results of the step, so leaving early changes no peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.gradient_groups import group_gradients
from scheduler.pytorch.capture.instructions import Accumulate
from scheduler.schedule import Action, Compute

LEAST_GROUP_BYTES = 2**20
"""Bytes of gradients that justify a segment of their own: the size of DistributedDataParallel's first bucket."""


@dataclass(frozen=True)
class BackwardPart:
    """The actions of one segment of the backward.

    Attributes
    ----------
    actions : tuple of Action
    gradients : tuple of int
        Which of the capture's gradients leave at its end.
    is_cut : bool
        Whether it ends because gradients leave, rather than because the schedule ends.
    """

    actions: tuple[Action, ...]
    gradients: tuple[int, ...]
    is_cut: bool


def split_backward(capture: Capture, actions: Sequence[Action]) -> tuple[BackwardPart, ...]:
    """Divide the actions of the backward into segments.

    Every gradient leaves exactly one segment. Tensors that are freed right after the operation
    at which a segment ends are freed in that segment.

    Parameters
    ----------
    capture : Capture
    actions : sequence of Action
        The backward of a schedule of `capture.graph`.
    """
    leaving = _accumulated_by_schedule(capture, actions) or _leaving_once_unread(capture, actions)
    parts: list[BackwardPart] = []
    start = 0
    for position in sorted(leaving):
        later = range(position + 1, len(actions))
        end = next((other for other in later if isinstance(actions[other], Compute)), len(actions))
        parts.append(BackwardPart(tuple(actions[start:end]), leaving[position], is_cut=True))
        start = end
    if start < len(actions):
        parts.append(BackwardPart(tuple(actions[start:]), (), is_cut=False))
    *earlier, last = parts
    left = {gradient for part in parts for gradient in part.gradients}
    others = tuple(gradient for gradient in range(len(capture.joint.gradients)) if gradient not in left)
    return (*earlier, BackwardPart(last.actions, (*last.gradients, *others), last.is_cut))


def _accumulated_by_schedule(capture: Capture, actions: Sequence[Action]) -> dict[int, tuple[int, ...]]:
    """Return the gradients that the schedule adds to existing ones, by the position of the action."""
    groups = {
        operation.name: instruction.gradients
        for operation, instruction in zip(capture.graph.operations, capture.instructions, strict=True)
        if isinstance(instruction, Accumulate)
    }
    return {
        position: groups[action.operation]
        for position, action in enumerate(actions)
        if isinstance(action, Compute) and action.operation in groups
    }


def _leaving_once_unread(capture: Capture, actions: Sequence[Action]) -> dict[int, tuple[int, ...]]:
    """Return groups of gradients by the position of the last action that reads one of them or its parameter."""
    graph, joint = capture.graph, capture.joint
    gradients = capture.lowered.gradient_tensors
    placeholders = {node: name for name, node in capture.lowered.resident.items()}
    storages = {tensor.name: tensor.storage for tensor in graph.tensors}
    operations = {operation.name: operation for operation in graph.operations}
    last_use: dict[str | None, int] = {}
    for position, action in enumerate(actions):
        if isinstance(action, Compute):
            operation = operations[action.operation]
            last_use |= {storages[tensor]: position for tensor in (*operation.inputs, *operation.outputs)}
    results_on = Counter(storages[tensor] for tensor in (*gradients, *{*graph.results}.difference(gradients)))
    unread_from = {
        i: max(last_use[storages[tensor]], last_use.get(storages[placeholders[trained]], -1))
        for i, ((trained, _), tensor) in enumerate(zip(joint.gradients, gradients, strict=True))
        if joint.sources[trained].kind != "input" and results_on[storages[tensor]] == 1 and storages[tensor] in last_use
    }
    sizes = {i: graph.tensor(gradients[i]).size_bytes for i in unread_from}
    leaving: dict[int, tuple[int, ...]] = {}
    for group in group_gradients(unread_from, sizes, least=LEAST_GROUP_BYTES)[:-1]:  # the last leaves at the end
        position = unread_from[group[-1]]
        leaving[position] = leaving.get(position, ()) + group
    return leaving
