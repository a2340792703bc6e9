"""Greedy segments: cut points, the threshold, and the kept tensors."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solvers.baselines.greedy_segments import articulation_points, cut, propose, written_bytes
from scheduler.solvers.baselines.kept_sets import forward_operations
from scheduler.solvers.baselines.segments import chain_schedule_from
from scheduler.solvers.deadline import Deadline
from tests.support.examples import examples
from tests.support.strategies import joint_graphs
from tests.support.training_graphs import conv_net, uniform_chain


def solve_greedily(graph: sc.Graph, budget: int, chain: sc.Chain | None = None) -> sc.Simulation:
    proposal = propose(Problem(graph, budget, chain=chain), deadline=Deadline(60), seed=0)
    return sc.simulate(graph, proposal.schedule)


def uneven_chain() -> sc.Chain:
    sizes = [(64, 64), (64, 64), (32, 32), (32, 32), (8, 8), (8, 8), (4, 4), (4, 4)]
    return sc.Chain([sc.Layer(f"l{i}", 1.0, 2.0, x, s) for i, (x, s) in enumerate(sizes)], input_bytes=16)


def test_residual_blocks_are_cut_only_after_their_addition() -> None:
    graph = conv_net(3)
    forward = forward_operations(graph, "test")
    points = articulation_points(graph, forward)
    names = {graph.operations[forward[position]].name for position in points}
    # The first block's residual input is resident: only outputs of its own operations cross.
    assert names == {"conv0", "norm0", "relu0", "add0", "add1", "add2"}
    crossing = {graph.tensors[t].name for tensors in points.values() for t in tensors}
    assert crossing == {"conv0", "norm0", "relu0", "x1", "x2", "x3"}


def test_a_tensor_with_a_distant_reader_forbids_every_cut_that_it_crosses() -> None:
    names = ["x0", "a", "b", "c", "d", "g"]
    operations = [
        sc.Operation("fa", ["x0"], ["a"], 1.0),
        sc.Operation("fb", ["a"], ["b"], 1.0),
        sc.Operation("fc", ["b"], ["c"], 1.0),
        sc.Operation("fd", ["a", "c"], ["d"], 1.0),
        sc.Operation("loss", ["d"], ["g"], 1.0, phase="backward"),
    ]
    graph = sc.Graph(operations, [sc.Tensor(name, 4) for name in names], resident=["x0"], results=["d", "g"])
    assert list(articulation_points(graph, forward_operations(graph, "test"))) == [0]


@settings(max_examples=examples(60))
@given(graph=joint_graphs())
def test_what_crosses_a_cut_is_all_that_later_forward_operations_read_of_earlier_ones(graph: sc.Graph) -> None:
    try:
        forward = [graph.operations[i] for i in forward_operations(graph, "test")]
    except UnsuitableProblemError:
        return
    storage = {tensor.name: tensor.storage for tensor in graph.tensors}
    points = articulation_points(graph, forward_operations(graph, "test"))
    for position in range(len(forward) - 1):
        made = {name for op in forward[: position + 1] for name in op.outputs}
        read = {name for op in forward[position + 1 :] for name in op.inputs}
        here = {storage[name] for name in forward[position].outputs}
        assert (position in points) == ({storage[name] for name in made & read} <= here)
        if position in points:
            assert {graph.tensors[t].name for t in points[position]} == made & read


def test_a_segment_ends_at_the_first_point_past_the_threshold_and_the_sum_restarts() -> None:
    written = [3, 3, 5, 1, 1, 9, 2]
    everywhere = dict.fromkeys(range(6))
    assert cut(written, everywhere, 0) == (0, 1, 2, 3, 4, 5)
    assert cut(written, everywhere, 5) == (1, 3, 5)
    assert cut(written, everywhere, 6) == (2, 5)
    assert cut(written, {3: None}, 5) == (3,)
    assert cut(written, everywhere, 24) == ()


def test_shared_storages_are_counted_once() -> None:
    tensors = [sc.Tensor("x", 8), sc.Tensor("y", 8), sc.Tensor("view", 8, "y"), sc.Tensor("g", 2)]
    operations = [
        sc.Operation("f", ["x"], ["y"], 1.0),
        sc.Operation("v", ["y"], ["view"], 0.0),
        sc.Operation("b", ["view"], ["g"], 1.0, phase="backward"),
    ]
    graph = sc.Graph(operations, tensors, resident=["x"], results=["g", "view"])
    assert written_bytes(graph, forward_operations(graph, "test")) == [8, 0]


def test_a_large_budget_saves_everything() -> None:
    for graph in (conv_net(3), uniform_chain(6)):
        baseline = Problem(graph, 0).baseline
        assert solve_greedily(graph, baseline.peak_bytes).time == baseline.time


def test_on_an_uneven_chain_some_threshold_is_as_good_as_the_best_two_segments() -> None:
    chain = uneven_chain()
    by_hand = [
        sc.simulate(chain.graph, chain_schedule_from(chain, [0, *starts]))
        for count in (0, 1)
        for starts in combinations(range(1, 8), count)
    ]
    least = min(entry.peak_bytes for entry in by_hand)
    simulation = solve_greedily(chain.graph, least, chain)
    assert simulation.peak_bytes <= least


def test_equal_segments_of_an_uneven_chain_need_more_than_greedy_ones() -> None:
    chain = uneven_chain()
    equal = min(
        sc.simulate(chain.graph, chain_schedule_from(chain, range(0, 8, 8 // count))).peak_bytes for count in (2, 4)
    )
    assert solve_greedily(chain.graph, 0, chain).peak_bytes < equal


def test_operations_after_the_last_cut_are_not_recomputed() -> None:
    graph = conv_net(4)
    baseline = Problem(graph, 0).baseline
    simulation = solve_greedily(graph, baseline.peak_bytes * 3 // 4)
    assert simulation.peak_bytes <= baseline.peak_bytes * 3 // 4
    assert simulation.time > baseline.time
    assert dict(simulation.recomputed)["relu3"] == 0


def test_a_graph_without_a_backward_phase_is_rejected() -> None:
    graph = sc.Graph([sc.Operation("a", [], ["x"], 1.0)], [sc.Tensor("x", 1)], results=["x"])
    with pytest.raises(UnsuitableProblemError, match='"greedy-segments" needs a forward and a backward phase'):
        sc.solve(graph, 10, solver="greedy-segments")
