"""The dynamic program over lower sets against every sequence of them, and the resulting schedules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solvers.baselines.kusumoto import (
    MOST_LOWER_SETS,
    TIME_STEPS,
    ForwardGraph,
    SequenceProgram,
    all_lower_sets,
    propose,
    pruned_lower_sets,
)
from scheduler.solvers.deadline import Deadline
from tests.support.examples import examples
from tests.support.oracle import optimum
from tests.support.training_graphs import conv_net, uniform_chain

CHAIN = (0b0, 0b1, 0b10, 0b100)
DIAMOND = (0b0, 0b1, 0b1, 0b110)


@st.composite
def forward_graphs(draw: st.DrawFn) -> ForwardGraph:
    """Up to five operations that read any earlier ones, with integer sizes and times."""
    count = draw(st.integers(1, 5))
    reads = tuple(draw(st.integers(0, 2**k - 1)) for k in range(count))
    numbers = st.lists(st.integers(0, 4), min_size=count, max_size=count)
    outputs = tuple((k,) for k in range(count))
    return ForwardGraph(reads, tuple(map(float, draw(numbers))), tuple(draw(numbers)), outputs)


class Definition:
    """Section 3 of Kusumoto et al., read literally, on sets of numbers."""

    def __init__(self, forward: ForwardGraph) -> None:
        self.nodes = frozenset(range(len(forward.reads)))
        self.edges = [(u, v) for v in self.nodes for u in self.nodes if forward.reads[v] >> u & 1]
        self.sizes, self.times = forward.sizes, forward.times
        subsets = itertools.chain.from_iterable(itertools.combinations(sorted(self.nodes), k) for k in range(6))
        self.lower_sets = [frozenset(s) for s in subsets if not any(v in s and u not in s for u, v in self.edges)]

    def sequences(self) -> Iterator[list[frozenset[int]]]:
        """Every strictly growing sequence of lower sets from the empty to the full one."""

        def grow(sequence: list[frozenset[int]]) -> Iterator[list[frozenset[int]]]:
            if sequence[-1] == self.nodes:
                yield sequence
            for larger in self.lower_sets:
                if sequence[-1] < larger:
                    yield from grow([*sequence, larger])

        yield from grow([frozenset()])

    def boundary(self, lower_set: frozenset[int]) -> frozenset[int]:
        return frozenset(u for u, v in self.edges if u in lower_set and v not in lower_set)

    def overhead_and_peak(self, sequence: list[frozenset[int]]) -> tuple[float, int]:
        """Time outside all boundaries; max of M(U) + 2 M(V) + M(readers outside) + M(other inputs of these)."""
        cached: frozenset[int] = frozenset()
        peak = 0
        for before, after in itertools.pairwise(sequence):
            readers = {v for u, v in self.edges if u in after} - after
            beside = {u for u, v in self.edges if v in readers} - after
            piece = 2 * self.size(after - before)
            peak = max(peak, self.size(cached) + piece + self.size(readers) + self.size(beside))
            cached |= self.boundary(after)
        return sum(self.times[v] for v in self.nodes - cached), peak

    def size(self, nodes: set[int] | frozenset[int]) -> int:
        return sum(self.sizes[v] for v in nodes)


def mask(lower_set: frozenset[int]) -> int:
    return sum(1 << v for v in lower_set)


def as_sets(sequence: list[int]) -> list[frozenset[int]]:
    return [frozenset(v for v in range(5) if lower_set >> v & 1) for lower_set in sequence]


@settings(max_examples=examples(60))
@given(forward=forward_graphs())
def test_the_program_is_the_best_of_all_sequences_for_every_bound(forward: ForwardGraph) -> None:
    definition = Definition(forward)
    every = [definition.overhead_and_peak(sequence) for sequence in definition.sequences()]
    family = all_lower_sets(forward.reads, MOST_LOWER_SETS)
    assert family is not None
    program = SequenceProgram(forward, family)
    for bound in {peak + off for _, peak in every for off in (-1, 0)}:
        overheads = [overhead for overhead, peak in every if peak <= bound]
        sequences = program.extremes(bound, Deadline(60))
        simulated = [definition.overhead_and_peak(as_sets(sequence)) for sequence in sequences]
        assert [overhead for overhead, _ in simulated] == sorted({min(overheads), max(overheads)} if overheads else ())
        assert [peak for _, peak in simulated] == [program.estimate(sequence) for sequence in sequences]
        assert all(peak <= bound for _, peak in simulated)


@settings(max_examples=examples(60))
@given(forward=forward_graphs())
def test_all_lower_sets_match_the_definition(forward: ForwardGraph) -> None:
    assert all_lower_sets(forward.reads, 32) is not None
    assert sorted(all_lower_sets(forward.reads, 32) or []) == sorted(map(mask, Definition(forward).lower_sets))


def test_the_numbers_of_lower_sets_are_those_of_the_closed_forms() -> None:
    assert len(all_lower_sets([1 << k >> 1 for k in range(20)], 100) or []) == 21
    assert len(all_lower_sets([0] * 6, 100) or []) == 64
    assert len(all_lower_sets(DIAMOND, 100) or []) == 6
    assert all_lower_sets([0] * 6, 63) is None


def test_the_pruned_family_has_the_lower_set_that_each_operation_needs() -> None:
    assert pruned_lower_sets(CHAIN, 9) == [0b0, 0b1, 0b11, 0b111, 0b1111]
    assert pruned_lower_sets(DIAMOND, 9) == [0b0, 0b1, 0b11, 0b101, 0b1111]
    assert pruned_lower_sets(CHAIN, 3) == [0b0, 0b11, 0b1111]


def test_the_forward_graph_of_a_training_step_counts_views_once() -> None:
    graph = sc.Graph(
        [
            sc.Operation("a", ["x"], ["h"], 1.0),
            sc.Operation("view", ["h"], ["v"], 0.0),
            sc.Operation("b", ["v", "h"], ["loss"], 2.0),
            sc.Operation("back", ["v"], ["g"], 4.0, phase="backward"),
        ],
        [sc.Tensor("x", 8), sc.Tensor("h", 8), sc.Tensor("v", 8, "h"), sc.Tensor("loss", 1), sc.Tensor("g", 8)],
        resident=["x"],
        results=["loss", "g"],
    )
    forward = ForwardGraph.of(graph, [0, 1, 2])
    assert forward.reads == (0b0, 0b1, 0b11)
    assert forward.sizes == (8, 0, 1)
    assert forward.times == (1.0, 0.0, 2.0)
    assert forward.tensors_of(0b011) == {graph.index.tensor_ids["h"], graph.index.tensor_ids["v"]}


@pytest.mark.parametrize("budget", range(16, 33, 4))
def test_on_a_chain_of_six_it_is_within_one_forward_of_the_optimum(budget: int) -> None:
    graph = uniform_chain(6)
    best = optimum(graph.to_dict(), budget, "input order")
    solution = sc.solve(graph, budget, solver="kusumoto", reorder=False)
    if solution.schedule is not None:
        assert solution.peak_bytes <= budget
        assert best <= solution.time <= best + 6
    assert solution.schedule is not None or budget < 24


def test_it_keeps_everything_in_a_large_budget_and_little_in_a_small_one() -> None:
    graph = conv_net(4)
    everything = Problem(graph, 0).baseline
    assert sc.solve(graph, everything.peak_bytes, solver="kusumoto").time == everything.time
    tight = sc.solve(graph, "70%", solver="kusumoto")
    assert tight.status is sc.Status.FEASIBLE
    # Of four blocks of 105, at most all but the last are recomputed.
    assert everything.time < tight.time <= everything.time + 3 * 105


def test_for_more_lower_sets_the_pruned_family_is_used_and_reported() -> None:
    wide = [sc.Operation(f"f{k}", ["x"], [f"y{k}"], 1.0) for k in range(12)]
    wide.append(sc.Operation("loss", [f"y{k}" for k in range(12)], ["l"], 1.0))
    wide += [sc.Operation(f"b{k}", ["l", f"y{k}"], [f"g{k}"], 1.0, phase="backward") for k in range(12)]
    made = [name for operation in wide for name in operation.outputs]
    tensors = [sc.Tensor(name, 1) for name in ["x", *made]]
    graph = sc.Graph(wide, tensors, resident=["x"], results=["l", *(f"g{k}" for k in range(12))])
    # 2^12 sets of the first twelve, and the full one.
    solution = sc.solve(graph, "100%", solver="kusumoto")
    assert solution.time == 25.0
    assert any("pruned family" in message for message in solution.messages)


def test_out_of_time_it_still_proposes_to_keep_everything() -> None:
    graph = conv_net(2)
    proposal = propose(Problem(graph, 2**40), deadline=Deadline(0), seed=0)
    assert proposal.schedule is not None
    assert sc.simulate(graph, proposal.schedule).time == Problem(graph, 0).baseline.time
    assert (proposal.bound, proposal.infeasible) == (0.0, False)


def test_a_graph_without_a_backward_phase_is_rejected() -> None:
    graph = sc.Graph([sc.Operation("a", [], ["x"], 1.0)], [sc.Tensor("x", 1)], results=["x"])
    with pytest.raises(UnsuitableProblemError, match='"kusumoto" needs a forward and a backward phase'):
        sc.solve(graph, 10, solver="kusumoto")


def test_the_estimate_of_one_piece_is_twice_its_bytes() -> None:
    forward = ForwardGraph(CHAIN, (1.0, 2.0, 3.0, 4.0), (5, 6, 7, 8), ((0,), (1,), (2,), (3,)))
    program = SequenceProgram(forward, pruned_lower_sets(CHAIN, 9))
    assert program.estimate([0, 0b1111]) == 2 * 26
    # U = {1}: 6 cached, twice 7 and 8; before it twice 5 and 6 and the reader 7.
    assert program.estimate([0, 0b11, 0b1111]) == max(2 * 11 + 7, 6 + 2 * 15)
    # One piece recomputes the most; caching every output that is read recomputes only the last.
    least, most = program.extremes(math.inf, Deadline(9))
    assert most == [0, 0b1111]
    assert forward.cached(least) == 0b0111


@settings(max_examples=examples(30))
@given(forward=forward_graphs(), stretch=st.floats(300.0, 1e6))
def test_times_of_many_digits_are_off_by_half_a_step_each_at_most(forward: ForwardGraph, stretch: float) -> None:
    forward = replace(forward, times=tuple(time * stretch for time in forward.times))
    definition = Definition(forward)
    every = [definition.overhead_and_peak(sequence) for sequence in definition.sequences()]
    program = SequenceProgram(forward, all_lower_sets(forward.reads, MOST_LOWER_SETS) or [])
    for bound in {peak for _, peak in every}:
        best = min(overhead for overhead, peak in every if peak <= bound)
        overhead, _ = definition.overhead_and_peak(as_sets(program.extremes(bound, Deadline(60))[0]))
        assert best <= overhead <= best + len(forward.reads) * sum(forward.times) / TIME_STEPS + 1e-6
