"""Walk through the input order within a number of bytes, and evict tensors whenever memory is short.

Every operation of the order runs once, after what is missing of its inputs has been recomputed.
Nothing is evicted before it must be. So a walk within few bytes recomputes much less than one
that saves nothing, and the least bytes within which one succeeds are near the smallest peak.
Evicting what costs little to recompute for its bytes and the time until its next use is after
Kirisame et al. 2021, "Dynamic Tensor Rematerialization"; here the next uses are known.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from scheduler.graph import Graph
from scheduler.problem import working_set_bytes
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.eviction_costs import (
    EvictionCosts,
    Floats,
    forget_eviction,
    no_evictions,
    note_eviction,
    recomputation_cost,
)
from scheduler.solvers.graph_arrays import Flags, GraphArrays, Ints, flat_rows, graph_arrays
from scheduler.solvers.jit import compiled, inlined_kernel, inner_kernel

_MOST_RUNS_PER_OPERATION = 20
_MOST_WALKS = 10
_MOST_ATTEMPTS = 8
"""Attempts at one operation of the order, each after evicting what its inputs can be recomputed without."""


class Rule(NamedTuple):
    """What a walk evicts when memory is short: what has the highest score.

    The score of a storage is its bytes, times a power of the steps until its next use, per recomputation. If what a
    recomputation counts is memory, it is their share of that memory, to another power, times that of the steps.

    Attributes
    ----------
    counts_runs, counts_time : bool
        What a recomputation counts: one, its time in mean times, or both; if neither, the memory that it takes.
    connects : bool
        Whether those of all evicted tensors count that are connected with a tensor, or only of those that it is
        recomputed from. A chain of which each tensor is recomputed from the one before costs little at every
        eviction, and all of it to rebuild: if they count, some of its tensors stay.
    power : float
        The exponent of the steps. The lower it is, the longer stays what few bytes hold.
    memory_power : float
        The exponent of a storage's share of the memory. The higher it is, the longer stays what takes far more memory
        to recompute than to keep, such as the mask of a dropout. If it is 0, what is used last is evicted.
    counts_inputs : bool
        Whether that memory is all that the operation needs which recomputes a tensor, or only what it allocates.
    """

    counts_runs: bool = False
    counts_time: bool = False
    connects: bool = False
    power: float = 1.0
    memory_power: float = 0.0
    counts_inputs: bool = False


class Eviction(Enum):
    """Rules of which none is best on every graph; those first that find most, and in long graphs soonest."""

    ALLOCATED = Rule(power=0.5, memory_power=4.0)
    NEXT_USE = Rule()
    RUNS = Rule(counts_runs=True)
    TIME = Rule(counts_runs=True, counts_time=True)
    WORKING_SET = Rule(memory_power=8.0, counts_inputs=True)
    CONNECTED_RUNS = Rule(counts_runs=True, connects=True)
    CONNECTED_TIME = Rule(counts_runs=True, counts_time=True, connects=True)
    CONNECTED_SOON = Rule(counts_runs=True, connects=True, power=0.5)


class EvictionWalks:
    """Walks through the input order of a graph, within any number of bytes.

    Parameters
    ----------
    graph : Graph
    keeps_smaller : bool
        Whether results of backward operations that take no more bytes than what these read are
        never evicted. Otherwise what they read lasts as long as they may be recomputed, if it
        cannot be recomputed itself, such as gradients that add up in place.
    """

    def __init__(self, graph: Graph, *, keeps_smaller: bool = False) -> None:
        self.graph = graph
        self._arrays = graph_arrays(graph)
        if keeps_smaller:
            self._arrays = self._arrays._replace(pinned=self._arrays.pinned | _smaller(graph))
        self._uses = _uses(self._arrays)
        self._mean_time = self._arrays.time[self._arrays.order].sum() / max(1, len(self._arrays.order))

    def within(self, budget_bytes: int, eviction: Eviction) -> Schedule | None:
        """Return the schedule of a walk; None if it fails.

        Parameters
        ----------
        budget_bytes : int
            The walk fails if it cannot evict enough to stay within these, resident tensors
            included. Its peak may be larger where two copies of one storage are live.
        eviction : Eviction
        """
        free_bytes = budget_bytes - self.graph.resident_bytes
        most_runs = _MOST_RUNS_PER_OPERATION * len(self._arrays.order) + 1000
        rule = eviction.value
        costs = self._costs(rule, most_runs)
        runs, count = _walk(self._arrays, self._uses, free_bytes, costs, rule.power, most_runs)
        return None if count < 0 else schedule_from_runs(self.graph, runs[:count].tolist())

    def _costs(self, rule: Rule, most: int) -> EvictionCosts:
        """Return what recomputations count by a rule, before anything is evicted, for at most so many evictions."""
        weight = self._arrays.storage_bytes.astype(np.float64)
        counts_memory = not (rule.counts_runs or rule.counts_time)
        if counts_memory:
            memory = self._working_sets if rule.counts_inputs else self._allocated
            weight, cost = weight**rule.memory_power, memory**rule.memory_power
        elif rule.counts_time:
            cost = self._arrays.time + rule.counts_runs * self._mean_time
        else:
            cost = np.ones(len(self._arrays.time))
        tensors, adds = len(self._arrays.storage), not counts_memory
        return no_evictions(tensors, weight, cost, adds=adds, connects=rule.connects, most=most)

    @cached_property
    def _working_sets(self) -> Floats:
        """Bytes in memory while each operation runs, without resident ones, and at least one."""
        resident = self.graph.index.resident_bytes
        needs = [working_set_bytes(self.graph, i) - resident for i in range(len(self.graph.operations))]
        return np.maximum(1.0, np.array(needs, dtype=np.float64))

    @cached_property
    def _allocated(self) -> Floats:
        """Bytes that each operation allocates, workspace included, and at least one."""
        sizes = np.array(self.graph.index.allocated_bytes, dtype=np.float64)
        return np.maximum(1.0, sizes + self._arrays.workspace_bytes)

    def fitting(self, budget_bytes: int, deadline: Deadline, *, any_fits: bool = False) -> Schedule | None:
        """Return the fastest schedule of walks by all rules whose peak fits; None if there is none.

        While the peak is larger than what a walk stayed within, it walks again within as much
        less, a few times. With `any_fits`, or once the deadline has passed, the first schedule
        that fits is enough; once the deadline is stopped, none is needed.
        """
        best: tuple[float, Schedule] | None = None
        for eviction in Eviction:
            if best is not None and (any_fits or deadline.passed):
                break
            found = self._fitting(budget_bytes, eviction, deadline)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        return None if best is None else best[1]

    def _fitting(self, budget_bytes: int, eviction: Eviction, deadline: Deadline) -> tuple[float, Schedule] | None:
        """Return the time of a schedule that fits, and the schedule."""
        within = budget_bytes
        for _ in range(_MOST_WALKS):
            schedule = None if deadline.stopped else self.within(within, eviction)
            if schedule is None:
                return None
            simulation = simulate(self.graph, schedule)
            excess = simulation.peak_bytes - budget_bytes
            if excess <= 0:
                return simulation.time, schedule
            within -= excess
        return None


def _smaller(graph: Graph) -> Flags:
    """Return, for each tensor, whether a backward operation makes it that allocates no more bytes than it reads."""
    index, found = graph.index, np.zeros(len(graph.tensors), dtype=np.bool_)
    for i, operation in enumerate(graph.operations):
        if operation.phase == "backward":
            read = {index.storage_of[t] for t in index.inputs[i] if not index.is_resident[t]}
            found[list(index.outputs[i])] = 0 < index.allocated_bytes[i] <= sum(index.storage_bytes[s] for s in read)
    return found


class _Uses(NamedTuple):
    """When tensors are needed, in steps of the order.

    Attributes
    ----------
    start, steps : ndarray of int64
        Steps that read tensor t are `steps[start[t]:start[t + 1]]`, ascending.
    last_need : ndarray of int64, shape (tensors,)
        The last step that reads a tensor, or that needs something that is recomputed from it;
        the number of steps for results.
    end_start, ends : ndarray of int64
        Tensors by their `last_need`.
    tensor_start, tensors : ndarray of int64
        Tensors of each storage.
    """

    start: Ints
    steps: Ints
    last_need: Ints
    end_start: Ints
    ends: Ints
    tensor_start: Ints
    tensors: Ints


def _uses(arrays: GraphArrays) -> _Uses:
    count = len(arrays.storage)
    steps: list[list[int]] = [[] for _ in range(count)]
    for step, i in enumerate(arrays.order):
        for t in arrays.inputs[arrays.input_start[i] : arrays.input_start[i + 1]]:
            steps[t].append(step)
    last_need = [rows[-1] if rows else -1 for rows in steps]
    recomputable = np.zeros(len(arrays.time), dtype=np.bool_)
    recomputable[arrays.producer[(arrays.producer >= 0) & ~arrays.pinned]] = True
    for i in range(len(arrays.time) - 1, -1, -1):
        if not recomputable[i]:
            continue
        outputs = arrays.outputs[arrays.output_start[i] : arrays.output_start[i + 1]]
        need = max((last_need[t] for t in outputs if not arrays.is_result[t]), default=-1)
        for t in arrays.inputs[arrays.input_start[i] : arrays.input_start[i + 1]]:
            last_need[t] = max(last_need[t], need)
    start, flat = flat_rows(steps)
    groups: list[list[int]] = [[] for _ in arrays.storage_bytes]
    for t, storage in enumerate(arrays.storage):
        if arrays.producer[t] >= 0:
            groups[storage].append(t)
    tensor_start, tensors = flat_rows(groups)
    needs = np.array(last_need, dtype=np.int64)
    needs[arrays.is_result] = len(arrays.order)
    by_end: list[list[int]] = [[] for _ in arrays.order]
    for t, step in enumerate(needs):
        if 0 <= step < len(by_end):
            by_end[step].append(t)
    end_start, ends = flat_rows(by_end)
    return _Uses(start, flat, needs, end_start, ends, tensor_start, tensors)


class _State(NamedTuple):
    """The state of `_walk`.

    Attributes
    ----------
    available : ndarray of bool, shape (tensors,)
    locks : ndarray of int64, shape (tensors,)
        How many operations of the present step will still read a tensor.
    held : ndarray of int64, shape (storages,)
        How many available tensors lie on each storage.
    place, live : ndarray of int64, shape (storages,)
        The storages with available tensors are `live[:counts[_LIVE]]`, and `live[place[s]]` is s.
    next_use : ndarray of int64, shape (tensors,)
        Position in `_Uses.steps` of the next use of each tensor.
    runs : ndarray of int64
    marked : ndarray of bool, shape (operations,)
        Operations to recompute in the present step.
    stack : ndarray of int64
    power : float
        As in `Rule`.
    costs : EvictionCosts
    counts : ndarray of int64
        By `_RUNS`, `_LIVE` and `_BYTES`: numbers of runs and of live storages, and live bytes.
    """

    available: Flags
    locks: Ints
    held: Ints
    place: Ints
    live: Ints
    next_use: Ints
    runs: Ints
    marked: Flags
    stack: Ints
    power: float
    costs: EvictionCosts
    counts: Ints


_RUNS, _LIVE, _BYTES = range(3)


@compiled(nogil=True)
def _walk(graph, uses, budget, costs, power, most_runs):  # type: ignore[no-untyped-def]
    """Return the runs of a walk, and their number; -1 if it fails."""
    tensors, storages, operations = graph.storage.shape[0], graph.storage_bytes.shape[0], graph.time.shape[0]
    s = _State(
        available=np.zeros(tensors, dtype=np.bool_),
        locks=np.zeros(tensors, dtype=np.int64),
        held=np.zeros(storages, dtype=np.int64),
        place=np.zeros(storages, dtype=np.int64),
        live=np.zeros(storages, dtype=np.int64),
        next_use=uses.start[:tensors].copy(),
        runs=np.empty(most_runs, dtype=np.int64),
        marked=np.zeros(operations, dtype=np.bool_),
        stack=np.empty(operations + 1, dtype=np.int64),
        power=power,
        costs=costs,
        counts=np.zeros(3, dtype=np.int64),
    )
    steps = graph.order.shape[0]
    for step in range(steps):
        first = graph.order[step]
        failed = _run_with_inputs(graph, uses, s, first, step, budget)
        attempts = 0
        while failed >= 0:
            attempts += 1
            if attempts > _MOST_ATTEMPTS or failed == first or not _evict_after(graph, uses, s, failed, budget):
                return s.runs, -1
            failed = _run_with_inputs(graph, uses, s, first, step, budget)
        for e in range(graph.input_start[first], graph.input_start[first + 1]):
            s.next_use[graph.inputs[e]] += 1
        for k in range(uses.end_start[step], uses.end_start[step + 1]):
            _free_if_done(graph, uses, s, uses.ends[k], step)
    return s.runs, s.counts[_RUNS]


@compiled(inner=True)
def _run_with_inputs(graph, uses, s, first, step, budget):  # type: ignore[no-untyped-def]
    """Run an operation of the order, after what is missing; return the operation that does not fit, or -1."""
    count = _mark_missing(graph, s, first)
    missing = np.sort(s.stack[:count])
    for k in range(count + 1):
        i = missing[k] if k < count else first
        if not _run(graph, uses, s, i, step, budget):
            s.locks[:] = 0
            s.marked[:] = False
            return i
        s.marked[i] = False
    return -1


@inner_kernel
def _evict_after(graph, uses, s, failed, budget):  # type: ignore[no-untyped-def]
    """Evict the largest storages computed after an operation, until it fits; return whether any was evicted."""
    found = False
    need = _new_bytes(graph, failed)
    while s.counts[_BYTES] + need > budget:
        chosen, size = -1, 0
        for storage in range(graph.storage_bytes.shape[0]):  # of equally large ones, the earliest
            is_larger = s.held[storage] > 0 and graph.storage_bytes[storage] > size
            if is_larger and _is_evictable(graph, uses, s, storage) and _is_after(graph, uses, s, storage, failed):
                chosen, size = storage, graph.storage_bytes[storage]
        if chosen < 0:
            return found
        _evict(graph, uses, s, chosen)
        found = True
    return found


@inlined_kernel
def _is_after(graph, uses, s, storage, i):  # type: ignore[no-untyped-def]
    """Return whether a tensor that is available on a storage is computed after an operation."""
    for place in range(uses.tensor_start[storage], uses.tensor_start[storage + 1]):
        t = uses.tensors[place]
        if s.available[t] and graph.producer[t] > i:
            return True
    return False


@inner_kernel
def _mark_missing(graph, s, first):  # type: ignore[no-untyped-def]
    """Lock what the operation reads, and put what must be recomputed on the stack; return their number."""
    count, done = 0, 0
    i = first
    while True:
        for e in range(graph.input_start[i], graph.input_start[i + 1]):
            t = graph.inputs[e]
            s.locks[t] += 1
            producer = graph.producer[t]
            if not s.available[t] and not s.marked[producer]:
                s.marked[producer] = True
                s.stack[count] = producer
                count += 1
        if done == count:
            return count
        i = s.stack[done]
        done += 1


@inner_kernel
def _run(graph, uses, s, i, step, budget):  # type: ignore[no-untyped-def]
    """Run an operation, after evicting what does not fit; return False if it cannot run."""
    need = _new_bytes(graph, i)
    excess = s.counts[_BYTES] + need - budget
    if excess > 0 and excess > _evictable_bytes(graph, uses, s):
        return False
    while s.counts[_BYTES] + need > budget:
        if not _evict_one(graph, uses, s, step):
            return False
    if s.counts[_RUNS] == s.runs.shape[0]:
        return False
    s.runs[s.counts[_RUNS]] = i
    s.counts[_RUNS] += 1
    for k in range(graph.output_start[i], graph.output_start[i + 1]):
        _add(graph, s, graph.outputs[k])
    for e in range(graph.input_start[i], graph.input_start[i + 1]):
        t = graph.inputs[e]
        s.locks[t] -= 1
        if not graph.pinned[t]:  # what cannot run again lasts to the end of the step, of which this may be an attempt
            _free_if_done(graph, uses, s, t, step)
    for k in range(graph.output_start[i], graph.output_start[i + 1]):
        _free_if_done(graph, uses, s, graph.outputs[k], step)
    return True


@inlined_kernel
def _new_bytes(graph, i):  # type: ignore[no-untyped-def]
    """Return what a run allocates: new storages of its outputs, and its workspace.

    A storage on which another tensor is live counts too, since the run makes a second copy of it.
    """
    need = graph.workspace_bytes[i]
    for k in range(graph.output_start[i], graph.output_start[i + 1]):
        if graph.joined[k] < 0:
            need += graph.storage_bytes[graph.storage[graph.outputs[k]]]
    return need


@inlined_kernel
def _add(graph, s, t):  # type: ignore[no-untyped-def]
    if s.available[t]:
        return
    s.available[t] = True
    forget_eviction(graph, s.costs, t)
    storage = graph.storage[t]
    if s.held[storage] == 0:
        s.place[storage] = s.counts[_LIVE]
        s.live[s.counts[_LIVE]] = storage
        s.counts[_LIVE] += 1
        s.counts[_BYTES] += graph.storage_bytes[storage]
    s.held[storage] += 1


@inlined_kernel
def _remove(graph, s, t):  # type: ignore[no-untyped-def]
    s.available[t] = False
    storage = graph.storage[t]
    s.held[storage] -= 1
    if s.held[storage] == 0:
        s.counts[_LIVE] -= 1
        last = s.live[s.counts[_LIVE]]
        s.live[s.place[storage]] = last
        s.place[last] = s.place[storage]
        s.counts[_BYTES] -= graph.storage_bytes[storage]


@inlined_kernel
def _free_if_done(graph, uses, s, t, step):  # type: ignore[no-untyped-def]
    """Free a tensor that nothing will need: neither the present step nor a later one."""
    if uses.last_need[t] <= step:
        forget_eviction(graph, s.costs, t)
        if s.available[t] and s.locks[t] == 0:
            _remove(graph, s, t)


@inlined_kernel
def _is_evictable(graph, uses, s, storage):  # type: ignore[no-untyped-def]
    if graph.storage_bytes[storage] == 0:
        return False
    for place in range(uses.tensor_start[storage], uses.tensor_start[storage + 1]):
        t = uses.tensors[place]
        if s.available[t] and (s.locks[t] > 0 or graph.pinned[t] or graph.is_result[t]):
            return False
    return True


@inner_kernel
def _evictable_bytes(graph, uses, s):  # type: ignore[no-untyped-def]
    total = 0
    for k in range(s.counts[_LIVE]):
        if _is_evictable(graph, uses, s, s.live[k]):
            total += graph.storage_bytes[s.live[k]]
    return total


@inner_kernel
def _evict_one(graph, uses, s, step):  # type: ignore[no-untyped-def]
    """Evict a storage with all its tensors; return False if none can be evicted."""
    chosen, best = -1, -1.0
    for k in range(s.counts[_LIVE]):
        storage = s.live[k]
        if not _is_evictable(graph, uses, s, storage):
            continue
        distance, cost = float(graph.order.shape[0]), 0.0
        for place in range(uses.tensor_start[storage], uses.tensor_start[storage + 1]):
            t = uses.tensors[place]
            if s.available[t]:
                distance = min(distance, _distance(graph, uses, s, t, step))
                cost = max(cost, recomputation_cost(graph, uses, s.costs, s.available, t))
        score = distance * s.costs.weight[storage] / cost if cost > 0.0 else distance
        if score > best:
            chosen, best = storage, score
    if chosen < 0:
        return False
    _evict(graph, uses, s, chosen)
    return True


@inner_kernel
def _distance(graph, uses, s, t, step):  # type: ignore[no-untyped-def]
    """Return how far the next use of a tensor is: all steps, if nothing evicted is recomputed from it either."""
    steps = graph.order.shape[0]
    if s.next_use[t] < uses.start[t + 1]:
        distance = float(uses.steps[s.next_use[t]] - step)
        return distance if s.power == 1.0 else distance**s.power
    for k in range(uses.start[t], uses.start[t + 1]):
        reader = graph.order[uses.steps[k]]
        for place in range(graph.output_start[reader], graph.output_start[reader + 1]):
            if s.costs.evicted[graph.outputs[place]]:
                return steps**s.power
    return float(steps)


@inner_kernel
def _evict(graph, uses, s, storage):  # type: ignore[no-untyped-def]
    """Free the tensors of a storage, and note what recomputing them would cost."""
    for place in range(uses.tensor_start[storage], uses.tensor_start[storage + 1]):
        t = uses.tensors[place]
        if s.available[t]:
            note_eviction(graph, uses, s.costs, s.available, t)
            _remove(graph, s, t)
