"""Decisions about calls of modules, and how to read them from a schedule.

In the graph of a step that was measured call by call, each call has an operation without cost
whose run begins its recomputation. A schedule therefore says which calls it recomputes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate

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


@dataclass(frozen=True)
class CallRange:
    """Recomputed calls that differ in one number of their name: "layers.3-7", "cell#0-2".

    Attributes
    ----------
    parts : tuple of str or int
        The parts of the module's name in the first call, then the number of that call.
    place : int
        Position in `parts` of the number that differs, -1 with one call only.
    last : int
        That number in the last call.
    keeps_expensive : bool
        Of every call.
    depth : int
        Number of recomputed modules that each of the modules is part of.
    """

    parts: tuple[str | int, ...]
    place: int
    last: int
    keeps_expensive: bool
    depth: int

    def __str__(self) -> str:
        *path, number = (f"{part}-{self.last}" if at == self.place else str(part) for at, part in enumerate(self.parts))
        text = (".".join(path) or "(model)") + (f"#{number}" if number != "0" else "")
        whose = "its" if self.place == -1 else "their"
        return f"{text} but {whose} expensive results" if self.keeps_expensive else text


def call_ranges(decisions: Iterable[Decision]) -> tuple[CallRange, ...]:
    """Return decisions with calls that follow each other as ranges, in the order of their first calls."""
    decisions = tuple(decisions)
    modules = {decision.module for decision in decisions}
    ranges: list[CallRange] = []
    growing: dict[object, int] = {}
    """The ranges that a further call may extend, by all of it but one number."""
    for decision in decisions:
        path = decision.module.split(".")
        outer = ("", *accumulate(path, "{}.{}".format))[:-1] if decision.module else ()
        depth = len(modules.intersection(outer))
        parts = (*(int(part) if part.isdecimal() else part for part in path), decision.number)
        single = CallRange(parts, -1, 0, decision.keeps_expensive, depth)
        numbers = {
            (replace(single, parts=(*parts[:at], "", *parts[at + 1 :])), at): (at, part)
            for at, part in enumerate(parts)
            if isinstance(part, int)
        }
        for key, (at, number) in reversed(numbers.items()):
            found = ranges[growing[key]] if key in growing else None
            if found and number - 1 == {-1: found.parts[at], at: found.last}.get(found.place):
                ranges[growing[key]] = replace(found, place=at, last=number)
                break
        else:
            growing |= dict.fromkeys(numbers, len(ranges))
            ranges.append(single)
    return tuple(ranges)


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
