"""Compiled kernels over runs: decode retention decisions, and the memory of a sequence of runs.

The judge has the last word on every schedule; these kernels only make searches fast.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.graph import Graph
from scheduler.solvers.jit import compiled
from scheduler.solvers.walk import cheapest_makers

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

KEEP, EVICT, DROP = 0, 1, 2
"""What happens to a tensor between one use in the input order and the next: it stays; it goes
and, once computed again, stays until that use; it goes and goes again after each use."""


@dataclass(frozen=True)
class GraphArrays:
    """A graph as flat arrays.

    Attributes
    ----------
    input_start, inputs : ndarray of int64, shapes (operations + 1,), (edges,)
        Inputs of operation i are `inputs[input_start[i]:input_start[i + 1]]`, without the
        resident ones.
    output_start, outputs : ndarray of int64
        The same for outputs.
    storage : ndarray of int64, shape (tensors,)
    storage_bytes : ndarray of int64, shape (storages,)
    workspace : ndarray of int64, shape (operations,)
    maker : ndarray of int64, shape (tensors,)
        The cheapest operation that makes each tensor; -1 for resident ones.
    pinned : ndarray of bool, shape (tensors,)
        Tensors whose maker cannot run again.
    is_result : ndarray of bool, shape (tensors,)
    order : ndarray of int64
        The operations to run first, in the input order.
    time : ndarray of float64, shape (operations,)
    """

    input_start: Ints
    inputs: Ints
    output_start: Ints
    outputs: Ints
    storage: Ints
    storage_bytes: Ints
    workspace: Ints
    maker: Ints
    pinned: Flags
    is_result: Flags
    order: Ints
    time: npt.NDArray[np.float64]


def graph_arrays(graph: Graph) -> GraphArrays:
    """Return the flat arrays of a graph."""
    index = graph.index
    times = [operation.time for operation in graph.operations]
    makers = cheapest_makers(graph)
    inputs = [[t for t in ids if not index.is_resident[t]] for ids in index.inputs]
    input_start, input_ids = flat_rows(inputs)
    output_start, output_ids = flat_rows([list(ids) for ids in index.outputs])
    return GraphArrays(
        input_start=input_start,
        inputs=input_ids,
        output_start=output_start,
        outputs=output_ids,
        storage=np.array(index.storage_of, dtype=np.int64),
        storage_bytes=np.array(index.storage_bytes, dtype=np.int64),
        workspace=np.array([operation.workspace_bytes for operation in graph.operations], dtype=np.int64),
        maker=np.array(makers, dtype=np.int64),
        pinned=np.array([m >= 0 and not graph.operations[m].repeatable for m in makers], dtype=np.bool_),
        is_result=np.array(index.is_result, dtype=np.bool_),
        order=np.array(index.defaults, dtype=np.int64),
        time=np.array(times, dtype=np.float64),
    )


def flat_rows(rows: list[list[int]]) -> tuple[Ints, Ints]:
    """Return where each row begins, with the end of the last, and the entries of all rows."""
    start = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=start[1:])
    return start, np.array([entry for row in rows for entry in row], dtype=np.int64)


@compiled()
def decode_decisions(  # type: ignore[no-untyped-def]
    order, input_start, inputs, output_start, outputs, maker, pinned, is_result, decision, made_decision, most_runs
):
    """Return the runs that retention decisions lead to, and the step of the order that each belongs to.

    `decision[e]` rules over the gap that opens after edge e (an input of an operation) in
    the input order; `made_decision[t]` over the one that opens when t is made. The number of
    runs is -1 if it would pass `most_runs`.
    """
    tensors = maker.shape[0]
    runs = np.empty(most_runs, dtype=np.int64)
    step_of = np.empty(most_runs, dtype=np.int64)
    count = 0
    available = np.zeros(tensors, dtype=np.bool_)
    current = np.zeros(tensors, dtype=np.int8)
    touched = np.empty(tensors, dtype=np.int64)
    stack = np.empty(4 * tensors + inputs.shape[0] + 16, dtype=np.int64)
    for step in range(order.shape[0] + 1):
        touched_count = 0
        height = 0
        if step < order.shape[0]:
            for e in range(input_start[order[step]], input_start[order[step] + 1]):
                stack[height] = inputs[e]
                height += 1
        else:
            for t in range(tensors):
                if is_result[t] and maker[t] >= 0:
                    stack[height] = t
                    height += 1
        while height > 0:
            t = stack[height - 1]
            if available[t]:
                height -= 1
                continue
            i = maker[t]
            missing = 0
            for e in range(input_start[i], input_start[i + 1]):
                if not available[inputs[e]]:
                    stack[height] = inputs[e]
                    height += 1
                    missing += 1
            if missing > 0:
                continue
            height -= 1
            if count == most_runs:
                return runs, step_of, -1
            runs[count] = i
            step_of[count] = step
            count += 1
            for e in range(output_start[i], output_start[i + 1]):
                o = outputs[e]
                if not available[o]:
                    available[o] = True
                    if touched_count < tensors:
                        touched[touched_count] = o
                        touched_count += 1
        if step == order.shape[0]:
            break
        i = order[step]
        if count == most_runs:
            return runs, step_of, -1
        runs[count] = i
        step_of[count] = step
        count += 1
        # Tensors brought back within this step go again where their gap says so.
        for k in range(touched_count):
            t = touched[k]
            if current[t] == DROP and not pinned[t]:
                available[t] = False
        for e in range(output_start[i], output_start[i + 1]):
            t = outputs[e]
            current[t] = made_decision[t]
            available[t] = current[t] == KEEP or pinned[t]
        for e in range(input_start[i], input_start[i + 1]):
            t = inputs[e]
            current[t] = decision[e]
            available[t] = current[t] == KEEP or pinned[t]
    return runs, step_of, count


@compiled()
def profile_runs(  # type: ignore[no-untyped-def]
    runs, count, input_start, inputs, output_start, outputs, storage, storage_bytes, workspace, is_result
):
    """Return memory during each run beyond the resident bytes, and the last run that holds each output.

    Tensors are freed as `schedule_from_runs` frees them. The second array is aligned with
    the outputs of the runs, one after the other.
    """
    tensors = storage.shape[0]
    total = 0
    for p in range(count):
        total += output_start[runs[p] + 1] - output_start[runs[p]]
    ends = np.empty(total, dtype=np.int64)
    last_use = np.full(tensors, -1, dtype=np.int64)
    made_later = np.zeros(tensors, dtype=np.bool_)
    place = total
    for p in range(count - 1, -1, -1):
        i = runs[p]
        place -= output_start[i + 1] - output_start[i]
        for k in range(output_start[i + 1] - output_start[i]):
            t = outputs[output_start[i] + k]
            end = last_use[t] if last_use[t] >= 0 else p
            if is_result[t] and not made_later[t]:
                end = count
            ends[place + k] = end
            last_use[t] = -1
            made_later[t] = True
        for e in range(input_start[i], input_start[i + 1]):
            if last_use[inputs[e]] < 0:
                last_use[inputs[e]] = p
    instance = np.full(tensors, -1, dtype=np.int64)
    instance_end = np.full(total + 1, -1, dtype=np.int64)
    instance_start = np.empty(total + 1, dtype=np.int64)
    instance_storage = np.empty(total + 1, dtype=np.int64)
    instances = 0
    place = 0
    for p in range(count):
        i = runs[p]
        first = instances
        for k in range(output_start[i + 1] - output_start[i]):
            t = outputs[output_start[i] + k]
            joined = -1
            for e in range(input_start[i], input_start[i + 1]):
                if storage[inputs[e]] == storage[t]:
                    joined = instance[inputs[e]]
                    break
            if joined < 0:
                for other in range(first, instances):
                    if instance_storage[other] == storage[t]:
                        joined = other
                        break
            if joined < 0:
                joined = instances
                instance_start[joined] = p
                instance_storage[joined] = storage[t]
                instances += 1
            instance[t] = joined
            if ends[place + k] > instance_end[joined]:
                instance_end[joined] = ends[place + k]
        place += output_start[i + 1] - output_start[i]
    change = np.zeros(count + 2, dtype=np.int64)
    for other in range(instances):
        size = storage_bytes[instance_storage[other]]
        change[instance_start[other]] += size
        change[min(instance_end[other], count) + 1] -= size
    memory = np.empty(count, dtype=np.int64)
    live = 0
    for p in range(count):
        live += change[p]
        memory[p] = live + workspace[runs[p]]
    return memory, ends
