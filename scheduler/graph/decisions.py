"""Decisions about calls of modules, and how to read them from the runs of a schedule.

In the graph of a step that was measured call by call, each call has an operation without cost
whose run begins its recomputation. A schedule therefore says which calls it recomputes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

from scheduler.errors import InvalidGraphError
from scheduler.graph.graph import Graph

RECOMPUTES, KEEPS_EXPENSIVE = "checkpoint", "checkpoint that keeps expensive results"
"""Kinds of these operations. Every call has one of the first kind, which one of the second may follow."""

SPAN_KINDS = {RECOMPUTES: "checkpoint of a span", KEEPS_EXPENSIVE: "checkpoint of a span that keeps expensive results"}
"""The same kinds for spans, after the operations of the `nn.Sequential`; `span_signature` ends their signature."""

Span = tuple[int, int] | tuple[()]
"""Positions of the first child of an `nn.Sequential` that is called, and of the first one that is not; () for all."""


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
    span : tuple of int
        The children of an `nn.Sequential` that are recomputed together, () for the whole call.
    """

    module: str
    number: int
    keeps_expensive: bool = False
    span: Span = ()

    def __str__(self) -> str:
        call = span_layer(self.module or "(model)", self.span) + (f"#{self.number}" if self.number else "")
        return f"{call} but its expensive results" if self.keeps_expensive else call

    @property
    def call(self) -> tuple[str, int, Span]:
        """The module, the number and the span, which tell calls apart."""
        return self.module, self.number, self.span


def span_layer(module: str, span: Span) -> str:
    """Return the name of a module, with the slice of its children that is meant: "features[3:7]"."""
    return f"{module}[{span[0]}:{span[1]}]" if span else module


def span_signature(span: Span) -> str:
    """Return what the signature of a span's operation ends with: "children 3:7"."""
    return f"children {span[0]}:{span[1]}" if span else ""


def _read_span(signature: str) -> Span:
    """Return the span of an operation whose signature ends with that of `span_signature`."""
    found = re.search(r"\bchildren (\d+):(\d+)\Z", signature)
    if found is None:
        raise InvalidGraphError(f'the signature of a span must end like "children 3:7", got "{signature}"')
    return int(found[1]), int(found[2])


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
    modules = {decision.module for decision in decisions if not decision.span}
    spans = [decision for decision in decisions if decision.span]
    ranges: list[CallRange] = []
    growing: dict[object, int] = {}
    """The ranges that a further call may extend, by all of it but one number."""
    for decision in decisions:
        path = decision.module.split(".")
        outer = ("", *accumulate(path, "{}.{}".format))[: None if decision.span else -1] if decision.module else ()
        depth = len(modules.intersection(outer)) + sum(_is_in_span(decision, other) for other in spans)
        parts = (*(int(part) if part.isdecimal() else part for part in path), decision.number)
        if decision.span:
            parts = (*parts[:-2], span_layer(path[-1] or "(model)", decision.span), decision.number)
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


def _is_in_span(decision: Decision, other: Decision) -> bool:
    """Return whether a call is part of a span, for children that are called by their positions."""
    start, stop = other.span or (0, 0)
    if decision.span and decision.module == other.module:
        return decision != other and start <= decision.span[0] and decision.span[1] <= stop
    prefix = f"{other.module}." if other.module else ""
    child = decision.module.removeprefix(prefix).partition(".")[0]
    return decision.module.startswith(prefix) and child.isdecimal() and start <= int(child) < stop


def decisions_of(graph: Graph, runs: Collection[int]) -> tuple[Decision, ...]:
    """Return the decisions that a schedule follows, in the order of the step.

    There are none if the graph was not measured call by call. The calls of one module are
    numbered in the order of the graph.

    Parameters
    ----------
    graph : Graph
    runs : collection of int
        The operations that the schedule runs, as positions in `graph.operations`.
    """
    runs = frozenset(runs)
    numbers: Counter[str] = Counter()
    decisions = []
    for position, operation in enumerate(graph.operations):
        module, span, kind = operation.layer, cast("Span", ()), operation.kind
        if kind in SPAN_KINDS.values():
            span = _read_span(operation.signature)
        elif kind == RECOMPUTES:
            numbers[module] += 1
        elif kind != KEEPS_EXPENSIVE:
            continue
        if position in runs:
            keeps = kind in (KEEPS_EXPENSIVE, SPAN_KINDS[KEEPS_EXPENSIVE])
            decisions.append(Decision(module, numbers[module] - 1, keeps, span))
    return tuple(decisions)
