"""Decisions for the step that is measured, when nothing is known of its backward."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.graph.decisions import Decision
from scheduler.pytorch.modules.calls import CallTree


def decide_by_saved_bytes(tree: CallTree) -> tuple[Decision, ...]:
    """Return decisions, none of them nested, for which little is saved at once.

    For each limit on what a call may save, the outermost calls within the limit are recomputed;
    the result is the best of these. It needs the inputs of all calls that are recomputed, what is
    saved outside of them, and what the largest one saves.
    """
    sums = [_saved_bytes(tree, range(call.start, call.stop)) for call in tree.calls]
    best: tuple[int, list[int]] | None = None
    for limit in sorted({saved for saved in sums if saved}, reverse=True):
        chosen = _outermost(tree, sums, limit)
        needed = _needed(tree, sums, chosen)
        if best is None or needed < best[0]:
            best = needed, chosen
    calls = [tree.calls[position] for position in (best[1] if best else [])]
    return tuple(call.decision() for call in calls)


def _saved_bytes(tree: CallTree, segments: range) -> int:
    return sum(s.size_bytes for s in tree.storages if any(segment in segments for segment in s.saved_by))


def _outermost(tree: CallTree, sums: Sequence[int], limit: int) -> list[int]:
    """Return the outermost calls that save something, but no more than the limit."""
    chosen: list[int] = []
    inside: set[int] = set()
    for position, call in enumerate(tree.calls):
        if call.caller in inside:
            inside.add(position)
        elif not call.refusal and 0 < sums[position] <= limit:
            chosen.append(position)
            inside.add(position)
    return chosen


def _needed(tree: CallTree, sums: Sequence[int], chosen: Sequence[int]) -> int:
    recomputed = {
        segment for position in chosen for segment in range(tree.calls[position].start, tree.calls[position].stop)
    }
    inputs = {storage for position in chosen for storage in tree.calls[position].inputs}
    kept = {i for i, storage in enumerate(tree.storages) if not recomputed.issuperset(storage.saved_by)}
    held = sum(tree.storages[i].size_bytes for i in kept | inputs)
    return held + max((sums[position] for position in chosen), default=0)
