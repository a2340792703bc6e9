"""Translate a schedule of a chain into a program: what each part of the step runs and frees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from scheduler.errors import PlanMismatchError
from scheduler.graph import Graph
from scheduler.graph.chain import LoweredChain
from scheduler.schedule import Action, Compute, Free, Schedule, schedule_from_runs

StepAction = Literal["forward", "save", "backward", "free state", "free saved", "free gradient"]
_FREEING: frozenset[StepAction] = frozenset({"free state", "free saved", "free gradient"})


class Step(NamedTuple):
    """One step of a program.

    Attributes
    ----------
    action : str
    link : int
        The link; of a state or gradient, the link that reads the state.
    is_last : bool
        Of a backward: whether it is the last of the link, whose gradients the parameters get.
    keeps_saved : bool
        Of a backward: whether a later one reads the same saved data.
    """

    action: StepAction
    link: int
    is_last: bool = True
    keeps_saved: bool = False


@dataclass(frozen=True)
class LayerProgram:
    """A schedule of a chain as steps.

    Attributes
    ----------
    forward : tuple of Step
        The steps up to the loss.
    backward : tuple of (int, tuple of Step)
        Per link, in the order of their last backwards: the steps from the end of the part
        before to the link's last backward and what is freed right after it.
    repeated : frozenset of int
        Links that run forward more than once.
    """

    forward: tuple[Step, ...]
    backward: tuple[tuple[int, tuple[Step, ...]], ...]
    repeated: frozenset[int]


def translate_layers(schedule: Schedule, graph: Graph, lowered: LoweredChain) -> LayerProgram:
    """Return a schedule of a plan's graph as the program of a chain with the same structure.

    Everything is freed right after its last use, as in the schedules of all solvers; a schedule
    that frees later needs no more memory than was simulated. A schedule that runs a backward
    more than once may need more than was simulated: workspaces are measured while autograd frees
    what the backward has read.

    Parameters
    ----------
    schedule : Schedule
        Valid for `graph`.
    graph : Graph
        The graph of the plan.
    lowered : LoweredChain
        The lowered form of the chain that will run.

    Raises
    ------
    PlanMismatchError
        If the structures differ; the message says where.
    """
    own = lowered.graph
    if graph.structure_digest != own.structure_digest:
        raise PlanMismatchError(_describe_mismatch(graph, own))
    step_of = _steps_by_action(lowered)
    once = {lowered.loss, lowered.loss_backward}  # the caller runs these two, and only once
    runs: list[int] = []
    for action in schedule:
        if isinstance(action, Compute):
            run = graph.index.operation_ids[action.operation]
            if run not in once or run not in runs:
                runs.append(run)
    actions = list(schedule_from_runs(own, runs))
    middle = actions.index(Compute(own.operations[lowered.loss_backward].name))
    forward, rest = (
        [step_of[action] for action in part if action in step_of] for part in (actions[:middle], actions[middle:])
    )
    times = Counter(step.link for step in (*forward, *rest) if step.action in ("forward", "save"))
    return LayerProgram(
        tuple(forward),
        _split(_mark_repeated(rest)),
        frozenset(link for link, count in times.items() if count > 1),
    )


def _steps_by_action(lowered: LoweredChain) -> dict[Action, Step]:
    """Return the step that each action of a lowered chain becomes, except those of the loss."""
    own = lowered.graph
    step_of: dict[Action, Step] = {}
    for i, without_saving in enumerate(lowered.without_saving):
        (saving,), (backward,) = lowered.saving[i], lowered.backward[i]
        step_of[Compute(own.operations[without_saving].name)] = Step("forward", i)
        step_of[Compute(own.operations[saving].name)] = Step("save", i)
        step_of[Compute(own.operations[backward].name)] = Step("backward", i)
        output, *kept = own.operations[saving].outputs
        step_of[Free(output)] = Step("free state", i + 1)
        step_of.update({Free(tensor): Step("free saved", i) for tensor in kept})
        step_of[Free(own.operations[backward].inputs[0])] = Step("free gradient", i + 1)
    return step_of


def _mark_repeated(steps: Sequence[Step]) -> list[Step]:
    """Mark each backward that the link runs again later, and each whose saved data is read again."""
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
    """Divide the steps after the last backward of each link and what is freed right after it."""
    parts: list[tuple[int, tuple[Step, ...]]] = []
    start = 0
    for i, step in enumerate(steps, 1):
        if step.action == "backward" and step.is_last:
            end = next((j for j in range(i, len(steps)) if steps[j].action not in _FREEING), len(steps))
            parts.append((step.link, tuple(steps[start:end])))
            start = end
    return tuple(parts)


def _describe_mismatch(planned: Graph, own: Graph) -> str:
    advice = "Make a plan for these layers, arguments, loss, autocast and torch version."
    if len(planned.operations) != len(own.operations):
        return (
            f"the plan has {len(planned.operations)} operations on layers, but these layers have"
            f" {len(own.operations)} operations. {advice}"
        )
    for then, now in zip(planned.tensors, own.tensors, strict=False):
        if then.size_bytes != now.size_bytes:
            return (
                f'"{now.name}" has {now.size_bytes} bytes, but "{then.name}" in its place in the plan has'
                f" {then.size_bytes} bytes. {advice}"
            )
    return f"these layers save other tensors than the layers of the plan. {advice}"
