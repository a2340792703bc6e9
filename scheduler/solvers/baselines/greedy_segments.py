"""Segments of at least a threshold of bytes, cut at articulation points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.solution import Proposal
from scheduler.solvers.baselines.kept_sets import forward_operations, schedule_keeping
from scheduler.solvers.baselines.segments import chain_schedule_from, fastest_fitting
from scheduler.solvers.deadline import Deadline

THRESHOLDS = 32


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest schedule that fits among those of greedy segments with various thresholds.

    The bytes that the forward operations allocate are added up in the input order; at the first
    articulation point where the sum exceeds the threshold, a segment ends. The tensors that
    cross there are kept, and so is the last segment; the rest is recomputed when the backward
    phase needs it. Thresholds range from the smallest operation to the whole forward phase in
    geometric steps; the search of the paper tries only values around one of them.

    Guarantee: none; without articulation points it is the save-everything schedule. Search
    space: input order. When: chains of uneven layers, and graphs that are chains of blocks.
    Cost: at most two simulated schedules for each of `THRESHOLDS`. Memory: at most 16 MiB and 4 KiB an
    operation. Reference: Chen, Xu, Zhang and Guestrin 2016, "Training deep nets with sublinear
    memory cost", arXiv 1604.06174, Algorithm 3.

    Raises
    ------
    UnsuitableProblemError
        If the graph has no forward or no backward phase.
    """
    graph = problem.graph
    forward = forward_operations(graph, "greedy-segments")
    written, points = written_bytes(graph, forward), articulation_points(graph, forward)
    cuts = [cut(written, points, threshold) for threshold in _thresholds(written)]
    # Little may be left after the last cut: the segment before it may be kept as well.
    cuts = list(dict.fromkeys(ends for full in cuts for ends in (full, full[:-1])))
    forms = [partial(_schedule, problem, forward, points, ends) for ends in cuts]
    return fastest_fitting(problem, forms, deadline)


def written_bytes(graph: Graph, forward: Sequence[int]) -> list[int]:
    """Return, per forward operation, the bytes of the storages that it is the first to write."""
    index = graph.index
    seen: set[int] = set()
    written = []
    for i in forward:
        storages = {index.storage_of[t] for t in index.outputs[i]} - seen
        seen |= storages
        written.append(sum(index.storage_bytes[storage] for storage in storages))
    return written


def articulation_points(graph: Graph, forward: Sequence[int]) -> dict[int, frozenset[int]]:
    """Return the positions after which the forward phase reads only outputs of one earlier operation.

    Parameters
    ----------
    graph : Graph
    forward : sequence of int
        The needed forward operations, in the input order.

    Returns
    -------
    dict of int to frozenset of int
        Positions in `forward`, ascending; for each, the tensors that cross. All of them lie on
        storages of the outputs of the operation at that position.
    """
    index = graph.index
    last_reader = {t: position for position, i in enumerate(forward) for t in index.inputs[i]}
    leaving: dict[int, list[int]] = {}
    crossing: set[int] = set()
    storages: Counter[int] = Counter()
    points: dict[int, frozenset[int]] = {}
    for position, i in enumerate(forward[:-1]):
        for tensor in index.outputs[i]:
            last = last_reader.get(tensor, position)
            if last > position and tensor not in crossing:
                crossing.add(tensor)
                storages[index.storage_of[tensor]] += 1
                leaving.setdefault(last, []).append(tensor)
        for tensor in leaving.get(position, ()):
            crossing.remove(tensor)
            storages[index.storage_of[tensor]] -= 1
        storages = +storages
        if storages.keys() <= {index.storage_of[t] for t in index.outputs[i]}:
            points[position] = frozenset(crossing)
    return points


def cut(written: Sequence[int], points: Mapping[int, object], threshold: float) -> tuple[int, ...]:
    """Return the positions at which a segment ends: Chen et al., Algorithm 3.

    Parameters
    ----------
    written : sequence of int
        Bytes of each forward operation, as from `written_bytes`.
    points : mapping of int to object
        Positions where a segment may end.
    threshold : float
        Bytes that a segment must exceed before it ends.

    Examples
    --------
    >>> cut([4, 4, 4, 4, 4], {0: None, 1: None, 2: None, 3: None}, 7)
    (1, 3)
    """
    ends, total = [], 0
    for position, size in enumerate(written):
        total += size
        if position in points and total > threshold:
            ends.append(position)
            total = 0
    return tuple(ends)


def _schedule(
    problem: Problem, forward: Sequence[int], points: Mapping[int, frozenset[int]], ends: Sequence[int]
) -> Schedule:
    if problem.chain is not None:
        starts = [end + 1 for end in ends if end + 1 < len(problem.chain.layers)]
        return chain_schedule_from(problem.chain, [0, *starts])
    kept = {tensor for end in ends for tensor in points[end]}
    kept.update(t for i in forward[ends[-1] + 1 if ends else 0 :] for t in problem.graph.index.outputs[i])
    return schedule_keeping(problem.graph, kept)


def _thresholds(written: Sequence[int]) -> list[float]:
    """Return thresholds from the sum of all bytes, which cuts nothing, to 0, which cuts at every point."""
    total, least = sum(written), min((size for size in written if size), default=1)
    ratio = max(total, 1) / least
    return [*(total / ratio ** (step / THRESHOLDS) for step in range(THRESHOLDS)), 0.0]
