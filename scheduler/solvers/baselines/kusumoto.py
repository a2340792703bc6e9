"""Sequences of lower sets: cut the forward graph where few bytes cross, and recompute whole pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.baselines.capacity_search import CapacitySearch
from scheduler.solvers.baselines.kept_sets import forward_operations
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.jit import compiled

MOST_LOWER_SETS = 400
"""For graphs with more lower sets, the pruned family is used."""
TIME_STEPS = 1024
"""Times are rounded to this many steps in total, unless they are integers of a smaller sum."""
_GRID_CAPACITIES = 48
"""Steps of the first grid of bounds on the estimated peak."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest schedule that fits among those of lower-set sequences.

    A lower set contains the inputs of all its operations. Along a sequence of lower sets, the
    forward phase keeps only those outputs of each piece that later pieces read; the backward
    phase recomputes a piece when it needs it. The published dynamic program finds, for a bound on
    its estimate of the peak, the sequence with the least recomputed time, or with the most
    ("memory-centric": less is cached, and with exact lifetimes the peak is often smaller). Here
    that bound is searched, and each sequence is simulated with exact lifetimes, with the last
    piece kept and freed.

    Guarantee: the program is exact, for times in `TIME_STEPS`, over all lower sets if there are
    at most `MOST_LOWER_SETS`, else over those of the pruned family, the sets that one operation
    needs; there is none for the schedule, since the estimate is not the peak. Search space:
    input order. When: to compare; narrow forward graphs. Cost: about 70 programs of O(t s^2)
    steps for s lower sets and t units of time. Memory: at most 64 MiB and 8 KiB an operation.
    Reference: Kusumoto, Inoue, Watanabe, Akiba and Koyama 2019, "A graph theoretic framework of
    recomputation algorithms for memory-efficient backpropagation", NeurIPS, sections 3 and 4.

    Raises
    ------
    UnsuitableProblemError
        If the graph has no forward or no backward phase.
    """
    forward = ForwardGraph.of(problem.graph, forward_operations(problem.graph, "kusumoto"))
    family = all_lower_sets(forward.reads, MOST_LOWER_SETS)
    messages: tuple[str, ...] = ()
    if family is None:
        family = pruned_lower_sets(forward.reads, MOST_LOWER_SETS)
        messages = (f"more than {MOST_LOWER_SETS} lower sets: only {len(family)} of the pruned family were used",)
    program = SequenceProgram(forward, family)
    search = CapacitySearch(problem)
    search.cost_of(forward.tensors_of((1 << len(forward.reads)) - 1))

    def kept_sets(most_bytes: float) -> list[frozenset[int]]:
        return [kept for sequence in program.extremes(most_bytes, deadline) for kept in _kept(forward, sequence)]

    unbounded = program.extremes(math.inf, deadline)
    if unbounded:
        search.run(kept_sets, max(map(program.estimate, unbounded)), _GRID_CAPACITIES, deadline)
    return Proposal(search.best, "input order", messages=messages)


def _kept(forward: ForwardGraph, sequence: Sequence[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tensors that a sequence keeps at the end of the forward phase, with and without its last piece."""
    cached = forward.cached(sequence)
    return forward.tensors_of(cached | sequence[-1] & ~sequence[-2]), forward.tensors_of(cached)


@dataclass(frozen=True, slots=True)
class ForwardGraph:
    """The forward operations, numbered in the input order; sets of them are bit masks.

    Attributes
    ----------
    reads : tuple of int
        Per operation, the operations that produce its inputs.
    times : tuple of float
    sizes : tuple of int
        Bytes that each allocates.
    outputs : tuple of tuple of int
        Tensors that each produces.
    """

    reads: tuple[int, ...]
    times: tuple[float, ...]
    sizes: tuple[int, ...]
    outputs: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, graph: Graph, forward: Sequence[int]) -> ForwardGraph:
        """Return the forward graph of needed forward operations."""
        index = graph.index
        producer: dict[int, int] = {}
        reads: list[int] = []
        sizes: list[int] = []
        for number, i in enumerate(forward):
            reads.append(sum({1 << producer[t] for t in index.inputs[i] if t in producer}))
            sizes.append(index.allocated_bytes[i])
            for tensor in index.outputs[i]:
                producer.setdefault(tensor, number)
        times = tuple(graph.operations[i].time for i in forward)
        return cls(tuple(reads), times, tuple(sizes), tuple(index.outputs[i] for i in forward))

    def boundary(self, lower_set: int) -> int:
        """Return the operations of a lower set whose outputs others read."""
        return self.read_by(~lower_set) & lower_set

    def readers_of(self, lower_set: int) -> int:
        """Return the operations outside a lower set that read from it."""
        return sum(
            1 << number for number, read in enumerate(self.reads) if read & lower_set and not lower_set >> number & 1
        )

    def read_by(self, operations: int) -> int:
        """Return the operations whose outputs some operations read."""
        found = 0
        for number, read in enumerate(self.reads):
            if operations >> number & 1:
                found |= read
        return found

    def cached(self, sequence: Sequence[int]) -> int:
        """Return the operations whose outputs a sequence of lower sets keeps: all boundaries."""
        found = 0
        for lower_set in sequence:
            found |= self.boundary(lower_set)
        return found

    def tensors_of(self, operations: int) -> frozenset[int]:
        """Return the tensors that the operations produce."""
        return frozenset(t for number in _members(operations) for t in self.outputs[number])


def all_lower_sets(reads: Sequence[int], most: int) -> list[int] | None:
    """Return all lower sets, the empty and the full one included; None if there are more than `most`."""
    found, pending = {0}, [0]
    while pending:
        lower_set = pending.pop()
        for number, read in enumerate(reads):
            larger = lower_set | 1 << number
            if not read & ~lower_set and larger not in found:
                found.add(larger)
                pending.append(larger)
                if len(found) > most:
                    return None
    return _by_size(found)


def pruned_lower_sets(reads: Sequence[int], most: int) -> list[int]:
    """Return, per operation, the lower set that it needs, itself included, and the empty and the full one.

    If these are more than `most`, an even choice by size is returned.
    """
    needs: list[int] = []
    for number, read in enumerate(reads):
        needed = 1 << number
        for other in _members(read):
            needed |= needs[other]
        needs.append(needed)
    family = _by_size({0, *needs, (1 << len(reads)) - 1})
    if len(family) <= most:
        return family
    return [family[k * (len(family) - 1) // (most - 1)] for k in range(most)]


class SequenceProgram:
    """The dynamic program over sequences of lower sets, the empty one first and the full one last.

    Parameters
    ----------
    forward : ForwardGraph
    family : sequence of int
        Lower sets by size.
    """

    def __init__(self, forward: ForwardGraph, family: Sequence[int]) -> None:
        self.forward, self.family = forward, family
        width = len(forward.reads)
        members = _matrix(family, width)
        boundaries = _matrix([forward.boundary(lower_set) for lower_set in family], width)
        readers = [forward.readers_of(lower_set) for lower_set in family]
        others = [forward.read_by(reader) & ~lower_set for reader, lower_set in zip(readers, family, strict=True)]
        sizes = np.array(forward.sizes, dtype=np.float64)
        times = _integer_times(forward.times)
        counts = members.sum(axis=1)
        bytes_in, time_in = members @ sizes, members @ times
        around = _matrix(readers, width) @ sizes + _matrix(others, width) @ sizes
        # Row: the later lower set; column: the earlier one. A step adds the piece between them.
        self._adds = (boundaries @ sizes)[:, None] - (boundaries * sizes) @ members.T
        kept = (boundaries @ times)[:, None] - (boundaries * times) @ members.T
        self._again = (time_in[:, None] - time_in[None, :] - kept).astype(np.int64)
        # In addition to the cached bytes: the piece and its gradients, and the inputs of these gradients.
        self._needs = 2 * (bytes_in[:, None] - bytes_in[None, :]) + around[:, None]
        smaller = (members @ members.T == counts[None, :]) & (counts[None, :] < counts[:, None])
        # NaN is within no bound.
        self._needs[~smaller] = np.nan
        self._table = np.empty((len(family), int(times.sum()) + 1))
        self._before = np.empty(self._table.shape, dtype=np.int64)

    def estimate(self, sequence: Sequence[int]) -> int:
        """Return the peak of a sequence as the program estimates it, in bytes."""
        rows = [self.family.index(lower_set) for lower_set in sequence]
        cached, peak = 0.0, 0.0
        for before, after in pairwise(rows):
            peak = max(peak, cached + self._needs[after, before])
            cached += self._adds[after, before]
        return math.ceil(peak)

    def extremes(self, most_bytes: float, deadline: Deadline) -> list[list[int]]:
        """Return the sequences with the least and the most recomputed time within a bound on the peak.

        Parameters
        ----------
        most_bytes : float
            Of the estimated peak: the bytes cached before a piece, twice the piece, its readers
            outside, and the other inputs of these readers.
        deadline : Deadline

        Returns
        -------
        list of list of int
            Lower sets from the empty to the full one; empty if nothing fits or the time is up.
        """
        self._table.fill(np.inf)
        self._table[0, 0] = 0.0
        for after in range(1, len(self.family)):
            if deadline.passed:
                return []
            _fill(
                self._needs[after], self._adds[after], self._again[after], most_bytes, after, self._table, self._before
            )
        reached = np.flatnonzero(np.isfinite(self._table[-1]))
        return [self._trace(int(time)) for time in sorted({*reached[:1], *reached[-1:]})]

    def _trace(self, time: int) -> list[int]:
        row = len(self.family) - 1
        sequence = [self.family[row]]
        while row:
            before = int(self._before[row, time])
            time -= int(self._again[row, before])
            row = before
            sequence.append(self.family[row])
        return sequence[::-1]


@compiled()
def _fill(needs, adds, again, most_bytes, after, table, before):  # type: ignore[no-untyped-def]
    """Fill opt[L', t + T(piece)] = min over L of opt[L, t] + M(bytes the piece adds) where the estimated peak fits."""
    for row in range(after):
        if not needs[row] <= most_bytes:
            continue
        most_cached = most_bytes - needs[row]
        for time in range(table.shape[1] - again[row]):
            cached = table[row, time]
            if cached <= most_cached and cached + adds[row] < table[after, time + again[row]]:
                table[after, time + again[row]] = cached + adds[row]
                before[after, time + again[row]] = row


def _integer_times(times: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return times as integers: unchanged if they are such, of a small sum; else rounded to `TIME_STEPS` in total."""
    found = np.array(times, dtype=np.float64)
    total = math.fsum(times)
    if total <= TIME_STEPS and np.array_equal(found, np.rint(found)):
        return found
    return np.rint(found * (TIME_STEPS / total))


def _matrix(masks: Sequence[int], width: int) -> npt.NDArray[np.float64]:
    """Return bit masks as rows of zeros and ones."""
    size = (width + 7) // 8
    packed = np.frombuffer(b"".join(mask.to_bytes(size, "little") for mask in masks), dtype=np.uint8)
    return np.unpackbits(packed.reshape(-1, size), axis=1, count=width, bitorder="little").astype(np.float64)


def _members(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _by_size(family: set[int]) -> list[int]:
    return sorted(family, key=lambda lower_set: (lower_set.bit_count(), lower_set))
