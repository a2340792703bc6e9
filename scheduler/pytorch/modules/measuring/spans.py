"""Divide the calls that sequences make: halves, quarters and so on of them may be recomputed together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from scheduler.pytorch.modules.measuring.following import SeenCall

_LEAST_SHARE = 4
"""Each part has at least this fraction of the calls, so that parts are not nested deeply."""


class Weight(NamedTuple):
    """What matters of a call where calls are divided.

    Attributes
    ----------
    is_refused : bool
        Whether it cannot be recomputed, and so neither can a part that begins with it.
    input_bytes : int
        Bytes that a part that begins with it holds.
    saved_bytes : int
        Bytes that nothing saves any more once its backward has ended.
    """

    is_refused: bool
    input_bytes: int
    saved_bytes: int


def divide(
    seen: Sequence[SeenCall],
    sequences: Mapping[str, Sequence[str]],
    *,
    weigh: Callable[[SeenCall], Weight],
    is_older: Callable[[int, SeenCall], bool],
    has_operators: Callable[[int], bool],
) -> list[SeenCall]:
    """Return spans of the calls that sequences make.

    A sequence is left alone if code runs between its calls, such as hooks of its children, or
    if it is called again within a call of itself.

    Parameters
    ----------
    seen : sequence of SeenCall
    sequences : mapping of str to sequence of str
        The children of the modules that call them in turn, by their names.
    weigh : callable
        Weighs a call.
    is_older : callable
        Whether a storage is older than a call.
    has_operators : callable
        Whether a piece of code runs operators.

    Returns
    -------
    list of SeenCall
        They begin and end with the calls that they consist of, which are their `children`.
    """
    found: list[SeenCall] = []
    for call in seen:
        names = sequences.get(call.module, ())
        children = [
            child
            for child in call.children
            if any(map(has_operators, range(seen[child].segments[0], seen[child].segments[-1] + 1)))
        ]
        called = [seen[child].module for child in children]
        is_in_turn = [name for name in names if name in called] == called
        if len(children) > 2 and is_in_turn and not any(map(has_operators, call.segments)) and not _recurs(seen, call):
            weights = [weigh(seen[child]) for child in children]
            bounds = [0, *(names.index(name) for name in called[1:]), len(names)]
            for start, stop in _parts(weights):
                calls = [seen[child] for child in children[start:stop]]
                span = (bounds[start], bounds[stop])
                found.append(_together(call, children[start:stop], calls, span, is_older))
    return found


def _recurs(seen: Sequence[SeenCall], call: SeenCall) -> bool:
    """Return whether a call of the same module is made in a call."""
    return any(one is not call and one.module == call.module and call.runs(one.segments[0]) for one in seen)


def _parts(weights: Sequence[Weight]) -> list[tuple[int, int]]:
    """Return the parts into which calls are divided, and the parts of these, as ranges of several calls.

    Calls are divided where the least memory is needed if both parts are recomputed: what passes
    between them, and what the larger one saves.
    """
    saved = [0, *itertools.accumulate(weight.saved_bytes for weight in weights)]
    found: list[tuple[int, int]] = []
    pending = [(0, len(weights))]
    while pending:
        start, stop = pending.pop()
        least = max(1, (stop - start) // _LEAST_SHARE)

        def needed(at: int, start: int = start, stop: int = stop) -> tuple[float, ...]:
            most = max(saved[at] - saved[start], saved[stop] - saved[at])
            return weights[at].is_refused, weights[at].input_bytes + most, abs(at - (start + stop) / 2)

        cut = min(range(start + least, stop - least + 1), key=needed)
        parts = [part for part in ((start, cut), (cut, stop)) if part[1] - part[0] > 1]
        found += parts
        pending += parts
    return found


def _together(
    sequence: SeenCall,
    children: Sequence[int],
    calls: Sequence[SeenCall],
    span: tuple[int, int],
    is_older: Callable[[int, SeenCall], bool],
) -> SeenCall:
    """Return some calls that a sequence makes as one."""
    first = calls[0]
    return replace(
        sequence,
        segments=[first.segments[0], calls[-1].segments[-1]],
        children=[*children],
        inputs=sorted({number for call in calls for number in call.inputs if is_older(number, first)}),
        random_bytes=max(call.random_bytes for call in calls),
        begin=first.begin,
        refusal=next((call.refusal for call in calls if call.refusal), ""),
        span=span,
    )
