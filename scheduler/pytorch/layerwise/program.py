"""A schedule of a chain as a program: what to run, in which part of the step, and what to let go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scheduler.errors import PlanMismatchError
from scheduler.graph import Graph
from scheduler.graph.chain import LoweredChain
from scheduler.schedule import Action, Compute, Free, Schedule, schedule_from_runs

Work = Literal["forward", "save", "backward", "drop state", "drop saved", "drop gradient"]


class Step(NamedTuple):
    """One thing to do.

    Attributes
    ----------
    action : str
    link : int
        Of a state or gradient: the link before which it stands.
    is_last : bool
        Of a backward: whether the link runs none later; then parameters get its gradients.
    keeps_saved : bool
        Of a backward: whether a later one reads what this one reads.
    """

    action: Work
    link: int
    is_last: bool = True
    keeps_saved: bool = False


@dataclass(frozen=True)
class LayerProgram:
    """A schedule of a chain as steps.

    Attributes
    ----------
    forward : tuple of Step
        Up to the loss.
    backward : tuple of (int, tuple of Step)
        Per link, in the order of their last backwards: what follows the one before, to the
        end of its own.
    repeated : frozenset of int
        Links that run forward more than once.
    """

    forward: tuple[Step, ...]
    backward: tuple[tuple[int, tuple[Step, ...]], ...]
    repeated: frozenset[int]


def translate_layers(schedule: Schedule, graph: Graph, lowered: LoweredChain) -> LayerProgram:
    """Return a schedule of a plan's graph as the program of a chain with the same structure.

    Everything is let go right after its last use, as the schedules of all solvers say; one
    that frees later needs no more than it was simulated for. A schedule that runs a backward
    more than once may need more than it was simulated for: workspaces are measured while
    autograd lets go of what a backward has read.

    Parameters
    ----------
    schedule : Schedule
        Valid for `graph`.
    graph : Graph
        Of the plan.
    lowered : LoweredChain
        Of the chain that will run.

    Raises
    ------
    PlanMismatchError
        If the structures differ: says where.
    """
    own = lowered.graph
    if graph.structure_digest != own.structure_digest:
        raise PlanMismatchError(_describe_mismatch(graph, own))
    meaning: dict[Action, Step] = {}
    for i, without_saving in enumerate(lowered.without_saving):
        (saving,), (backward,) = lowered.saving[i], lowered.backward[i]
        meaning[Compute(own.operations[without_saving].name)] = Step("forward", i)
        meaning[Compute(own.operations[saving].name)] = Step("save", i)
        meaning[Compute(own.operations[backward].name)] = Step("backward", i)
        output, *kept = own.operations[saving].outputs
        meaning[Free(output)] = Step("drop state", i + 1)
        meaning.update({Free(tensor): Step("drop saved", i) for tensor in kept})
        meaning[Free(own.operations[backward].inputs[0])] = Step("drop gradient", i + 1)
    once = {lowered.loss, lowered.loss_backward}  # the caller makes these two, and only once
    runs: list[int] = []
    for action in schedule:
        if isinstance(action, Compute):
            run = graph.index.operation_ids[action.operation]
            if run not in once or run not in runs:
                runs.append(run)
    actions = list(schedule_from_runs(own, runs))
    middle = actions.index(Compute(own.operations[lowered.loss_backward].name))
    forward, rest = (
        [meaning[action] for action in part if action in meaning] for part in (actions[:middle], actions[middle:])
    )
    times = Counter(step.link for step in (*forward, *rest) if step.action in ("forward", "save"))
    return LayerProgram(
        tuple(forward),
        _split(_mark_repeated(rest)),
        frozenset(link for link, count in times.items() if count > 1),
    )


def _mark_repeated(steps: Sequence[Step]) -> list[Step]:
    """Say of each backward what of it follows later."""
    marked: list[Step] = []
    run_later: set[int] = set()
    read_later: set[int] = set()
    for step in reversed(steps):
        if step.action == "save":
            read_later.discard(step.link)
        elif step.action == "backward":
            step = step._replace(is_last=step.link not in run_later, keeps_saved=step.link in read_later)
            run_later.add(step.link)
            read_later.add(step.link)
        marked.append(step)
    return marked[::-1]


def _split(steps: Sequence[Step]) -> tuple[tuple[int, tuple[Step, ...]], ...]:
    """Cut after the last backward of each link and what is let go then."""
    parts: list[tuple[int, tuple[Step, ...]]] = []
    start = 0
    for i, step in enumerate(steps, 1):
        if step.action == "backward" and step.is_last:
            end = next((j for j in range(i, len(steps)) if not steps[j].action.startswith("drop")), len(steps))
            parts.append((step.link, tuple(steps[start:end])))
            start = end
    return tuple(parts)


def _describe_mismatch(planned: Graph, own: Graph) -> str:
    advice = "Make a plan for these layers, arguments, loss, autocast and torch version."
    if len(planned.operations) != len(own.operations):
        return (
            f"the plan is for {len(planned.operations)} operations on layers, and these layers have"
            f" {len(own.operations)}. {advice}"
        )
    for then, now in zip(planned.tensors, own.tensors, strict=False):
        if then.size_bytes != now.size_bytes:
            return (
                f'"{now.name}" has {now.size_bytes} bytes, and "{then.name}" in its place in the plan'
                f" {then.size_bytes}. {advice}"
            )
    return f"the layers save other things than those of the plan. {advice}"
