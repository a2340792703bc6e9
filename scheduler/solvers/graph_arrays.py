"""Graphs as flat arrays, and compiled kernels over runs: decode retention decisions, profile memory.

`profile_runs` applies the same rules for instances as `scheduler/simulator.py` (`_Machine.compute`);
a change of one is a change of both. The simulator decides about every schedule; these kernels
only make searches fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from scheduler.graph import Graph
from scheduler.solvers.jit import compiled, inlined_kernel
from scheduler.solvers.walk import cheapest_producers

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

KEEP, EVICT, DROP = 0, 1, 2
"""Decisions about a tensor in the gap between one use in the input order and the next. KEEP: it stays live.
EVICT: it is dropped; once recomputed, it stays live until the next use. DROP: it is dropped again after
every step that recomputes it."""


class GraphArrays(NamedTuple):
    """A graph as flat arrays, in a form that compiled kernels accept.

    Attributes
    ----------
    input_start, inputs : ndarray of int64, shapes (operations + 1,), (edges,)
        Inputs of operation i are `inputs[input_start[i]:input_start[i + 1]]`, without the
        resident ones.
    output_start, outputs : ndarray of int64
        The same for outputs.
    joined : ndarray of int64
        The tensor whose instance each of these outputs joins: the first input on the same storage, or else the first
        output of the same run on it; -1 for none.
    storage : ndarray of int64, shape (tensors,)
    storage_bytes : ndarray of int64, shape (storages,)
    workspace_bytes : ndarray of int64, shape (operations,)
    producer : ndarray of int64, shape (tensors,)
        The cheapest operation that can recompute each tensor; -1 for resident tensors.
    pinned : ndarray of bool, shape (tensors,)
        Tensors whose producer is not repeatable.
    is_result : ndarray of bool, shape (tensors,)
    order : ndarray of int64
        The default operations, in the input order.
    time : ndarray of float64, shape (operations,)
        In the graph's `time_unit`.
    """

    input_start: Ints
    inputs: Ints
    output_start: Ints
    outputs: Ints
    joined: Ints
    storage: Ints
    storage_bytes: Ints
    workspace_bytes: Ints
    producer: Ints
    pinned: Flags
    is_result: Flags
    order: Ints
    time: npt.NDArray[np.float64]


def graph_arrays(graph: Graph) -> GraphArrays:
    """Return the flat arrays of a graph."""
    index = graph.index
    producers = cheapest_producers(graph)
    inputs = [[t for t in ids if not index.is_resident[t]] for ids in index.inputs]
    outputs = [list(ids) for ids in index.outputs]
    input_start, input_ids = flat_rows(inputs)
    output_start, output_ids = flat_rows(outputs)
    return GraphArrays(
        input_start=input_start,
        inputs=input_ids,
        output_start=output_start,
        outputs=output_ids,
        joined=joined_tensors(inputs, outputs, index.storage_of),
        storage=np.array(index.storage_of, dtype=np.int64),
        storage_bytes=np.array(index.storage_bytes, dtype=np.int64),
        workspace_bytes=np.array([operation.workspace_bytes for operation in graph.operations], dtype=np.int64),
        producer=np.array(producers, dtype=np.int64),
        pinned=np.array([i >= 0 and not graph.operations[i].repeatable for i in producers], dtype=np.bool_),
        is_result=np.array(index.is_result, dtype=np.bool_),
        order=np.array(index.defaults, dtype=np.int64),
        time=np.array([operation.time for operation in graph.operations], dtype=np.float64),
    )


def flat_rows(rows: list[list[int]]) -> tuple[Ints, Ints]:
    """Return the offset of each row, with the end of the last one, and the entries of all rows."""
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([entry for row in rows for entry in row], dtype=np.int64)


def row_places(start: Ints, rows: Ints) -> Ints:
    """Return where the entries of some rows lie, those of one row after those of the one before."""
    lengths = start[rows + 1] - start[rows]
    ends = np.cumsum(lengths)
    places: Ints = np.arange(lengths.sum()) + np.repeat(start[rows] - ends + lengths, lengths)
    return places


def joined_tensors(inputs: list[list[int]], outputs: list[list[int]], storage_of: Sequence[int]) -> Ints:
    """Return the tensor whose instance each output joins, as `GraphArrays.joined`."""
    joined: list[int] = []
    for read, made in zip(inputs, outputs, strict=True):
        first = {storage_of[t]: t for t in reversed(read)}
        for t in made:
            joined.append(first.get(storage_of[t], -1))
            first.setdefault(storage_of[t], t)
    return np.array(joined, dtype=np.int64)


class _Decoding(NamedTuple):
    """The state of `decode_decisions`.

    Attributes
    ----------
    runs, step_of : ndarray of int64
        The runs so far, and the step of the order that each belongs to.
    available : ndarray of bool, shape (tensors,)
    current : ndarray of int8, shape (tensors,)
        The decision for the gap that is open for each tensor.
    stack : ndarray of int64
        Tensors wanted by the present step, the next one last.
    recomputed : ndarray of int64
        Tensors that became available in the present step.
    counts : ndarray of int64
        Numbers of entries in use, by `_RUNS`, `_HEIGHT` and `_RECOMPUTED`.
    """

    runs: Ints
    step_of: Ints
    available: Flags
    current: npt.NDArray[np.int8]
    stack: Ints
    recomputed: Ints
    counts: Ints


_RUNS, _HEIGHT, _RECOMPUTED = range(3)


@compiled(nogil=True)
def decode_decisions(graph, decision, decision_at_first, most_runs):  # type: ignore[no-untyped-def]
    """Return the runs that retention decisions lead to, the step of the order of each, and their number.

    `decision[e]` applies to the gap that opens after edge e (an input of an operation) in the
    input order; `decision_at_first[t]` to the gap that opens when t is first computed. The
    number of runs is -1 if it would exceed `most_runs`.
    """
    tensors = graph.producer.shape[0]
    d = _Decoding(
        runs=np.empty(most_runs, dtype=np.int64),
        step_of=np.empty(most_runs, dtype=np.int64),
        available=np.zeros(tensors, dtype=np.bool_),
        current=np.zeros(tensors, dtype=np.int8),
        stack=np.empty(4 * tensors + graph.inputs.shape[0] + 16, dtype=np.int64),
        recomputed=np.empty(tensors, dtype=np.int64),
        counts=np.zeros(3, dtype=np.int64),
    )
    steps = graph.order.shape[0]
    for step in range(steps):
        i = graph.order[step]
        for e in range(graph.input_start[i], graph.input_start[i + 1]):
            if not d.available[graph.inputs[e]]:
                _push(d, graph.inputs[e])
        if not (_recompute_wanted(graph, d, step) and _append(d, i, step)):
            return d.runs, d.step_of, -1
        _open_gaps(graph, d, i, decision, decision_at_first)
    for t in range(tensors):
        if graph.is_result[t] and graph.producer[t] >= 0:
            _push(d, t)
    done = _recompute_wanted(graph, d, steps)
    return d.runs, d.step_of, d.counts[_RUNS] if done else -1


@inlined_kernel
def _push(d, tensor):  # type: ignore[no-untyped-def]
    d.stack[d.counts[_HEIGHT]] = tensor
    d.counts[_HEIGHT] += 1


@inlined_kernel
def _append(d, i, step):  # type: ignore[no-untyped-def]
    """Append a run; return False if there are too many."""
    count = d.counts[_RUNS]
    if count == d.runs.shape[0]:
        return False
    d.runs[count] = i
    d.step_of[count] = step
    d.counts[_RUNS] += 1
    return True


@inlined_kernel
def _recompute_wanted(graph, d, step):  # type: ignore[no-untyped-def]
    """Run what the tensors on the stack need; return False if there are too many runs."""
    while d.counts[_HEIGHT] > 0:
        t = d.stack[d.counts[_HEIGHT] - 1]
        if d.available[t]:
            d.counts[_HEIGHT] -= 1
            continue
        i = graph.producer[t]
        missing = False
        for e in range(graph.input_start[i], graph.input_start[i + 1]):
            if not d.available[graph.inputs[e]]:
                _push(d, graph.inputs[e])
                missing = True
        if missing:
            continue
        d.counts[_HEIGHT] -= 1
        if not _append(d, i, step):
            return False
        for e in range(graph.output_start[i], graph.output_start[i + 1]):
            o = graph.outputs[e]
            if not d.available[o]:
                d.available[o] = True
                # A tensor becomes available at most once per step: the array is long enough.
                d.recomputed[d.counts[_RECOMPUTED]] = o
                d.counts[_RECOMPUTED] += 1
    return True


@inlined_kernel
def _open_gaps(graph, d, i, decision, decision_at_first):  # type: ignore[no-untyped-def]
    """Apply the decisions after a step: drop what its gap says to drop, and open the gaps of its tensors."""
    for k in range(d.counts[_RECOMPUTED]):
        t = d.recomputed[k]
        if d.current[t] == DROP and not graph.pinned[t]:
            d.available[t] = False
    d.counts[_RECOMPUTED] = 0
    for e in range(graph.output_start[i], graph.output_start[i + 1]):
        t = graph.outputs[e]
        d.current[t] = decision_at_first[t]
        d.available[t] = d.current[t] == KEEP or graph.pinned[t]
    for e in range(graph.input_start[i], graph.input_start[i + 1]):
        t = graph.inputs[e]
        d.current[t] = decision[e]
        d.available[t] = d.current[t] == KEEP or graph.pinned[t]


class RunsProfile(NamedTuple):
    """Memory during runs, and how long their outputs are needed.

    Attributes
    ----------
    memory : ndarray of int64, shape (runs,)
        Without the resident bytes.
    ends : ndarray of int64
        The position of the last run that needs each output of each run; the number of runs for results.
    offset : ndarray of int64, shape (runs + 1,)
        The position of each run's first output in `ends`.
    """

    memory: Ints
    ends: Ints
    offset: Ints


@compiled(nogil=True)
def profile_runs(graph, runs):  # type: ignore[no-untyped-def]
    """Return the profile of runs, each of which comes after what it reads. Frees are those of `schedule_from_runs`."""
    count, tensors = runs.shape[0], graph.storage.shape[0]
    offset = np.zeros(count + 1, dtype=np.int64)
    for p in range(count):
        offset[p + 1] = offset[p] + graph.output_start[runs[p] + 1] - graph.output_start[runs[p]]
    outputs = offset[count]
    ends = np.empty(outputs, dtype=np.int64)
    _find_ends(graph, runs, offset, ends, np.full(tensors, -1, dtype=np.int64), np.zeros(tensors, dtype=np.bool_))
    n = _Instances(
        latest=np.zeros(tensors, dtype=np.int64),
        start=np.empty(outputs, dtype=np.int64),
        end=np.empty(outputs, dtype=np.int64),
        storage=np.empty(outputs, dtype=np.int64),
    )
    instances = _find_instances(graph, runs, offset, ends, n)
    memory = np.zeros(count + 2, dtype=np.int64)
    _sum_up(graph, runs, n, instances, memory)
    return RunsProfile(memory[:count], ends, offset)


class _Instances(NamedTuple):
    """The instances of a sequence of runs: their first run, last run and storage; and the last one of each tensor."""

    latest: Ints
    start: Ints
    end: Ints
    storage: Ints


@inlined_kernel
def _find_ends(graph, runs, offset, ends, last_use, computed_later):  # type: ignore[no-untyped-def]
    """Find the position of the last run that needs each output; the number of runs for results."""
    count = runs.shape[0]
    for p in range(count - 1, -1, -1):
        i = runs[p]
        for k in range(graph.output_start[i + 1] - graph.output_start[i]):
            t = graph.outputs[graph.output_start[i] + k]
            end = last_use[t] if last_use[t] >= 0 else p
            if graph.is_result[t] and not computed_later[t]:
                end = count
            ends[offset[p] + k] = end
            last_use[t] = -1
            computed_later[t] = True
        for e in range(graph.input_start[i], graph.input_start[i + 1]):
            if last_use[graph.inputs[e]] < 0:
                last_use[graph.inputs[e]] = p


@inlined_kernel
def _find_instances(graph, runs, offset, ends, n):  # type: ignore[no-untyped-def]
    """Find the instances, and return their number."""
    instances = 0
    for p in range(runs.shape[0]):
        first = graph.output_start[runs[p]]
        for k in range(graph.output_start[runs[p] + 1] - first):
            t, joined, end = graph.outputs[first + k], graph.joined[first + k], ends[offset[p] + k]
            if joined < 0:
                n.start[instances], n.end[instances], n.storage[instances] = p, end, graph.storage[t]
                n.latest[t] = instances
                instances += 1
            else:
                n.latest[t] = n.latest[joined]
                n.end[n.latest[t]] = max(n.end[n.latest[t]], end)
    return instances


@inlined_kernel
def _sum_up(graph, runs, n, instances, memory):  # type: ignore[no-untyped-def]
    """Set the memory during each run; the array is zero before, and has two entries more than there are runs."""
    count = runs.shape[0]
    for instance in range(instances):
        size = graph.storage_bytes[n.storage[instance]]
        memory[n.start[instance]] += size
        memory[min(n.end[instance], count) + 1] -= size
    live = 0
    for p in range(count):
        live += memory[p]
        memory[p] = live + graph.workspace_bytes[runs[p]]
