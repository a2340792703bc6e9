"""Decisions about calls of modules, and how to read them from a schedule.

In the graph of a step that was measured call by call, each call has an operation without cost
whose run begins its recomputation. A schedule therefore says which calls it recomputes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.schedule import Compute, Schedule

RECOMPUTES, KEEPS_EXPENSIVE = "checkpoint", "checkpoint that keeps expensive results"
"""Kinds of these operations. Every call has one of the first kind, which one of the second may follow."""


@dataclass(frozen=True, order=True)
class Decision:
    """What a plan does with one call that it recomputes.

    Attributes
    ----------
    module : str
        Qualified name of the module, "" for the model itself.
    number : int
        How many calls of the same module came before it in the step.
    keeps_expensive : bool
        Whether the results of expensive operators are saved all the same.
    """

    module: str
    number: int
    keeps_expensive: bool = False

    def __str__(self) -> str:
        call = (self.module or "(model)") + (f"#{self.number}" if self.number else "")
        return f"{call} but its expensive results" if self.keeps_expensive else call


def decisions_of(graph: Graph, schedule: Schedule) -> tuple[Decision, ...]:
    """Return the decisions that a schedule follows, in the order of the step.

    There are none if the graph was not measured call by call. The calls of one module are
    numbered in the order of the graph.
    """
    runs = {action.operation for action in schedule if isinstance(action, Compute)}
    numbers: Counter[str] = Counter()
    decisions = []
    for operation in graph.operations:
        if operation.kind == RECOMPUTES:
            numbers[operation.layer] += 1
        elif operation.kind != KEEPS_EXPENSIVE:
            continue
        if operation.name in runs:
            number = numbers[operation.layer] - 1
            decisions.append(Decision(operation.layer, number, operation.kind == KEEPS_EXPENSIVE))
    return tuple(decisions)
