"""Check deep networks: their blocks, valid bounds, and proofs that other solvers confirm."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import numpy as np
import pytest

import scheduler as sc
from scheduler import zoo
from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem, parse_budget
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.hierarchical import propose, solver, time_segments
from scheduler.solvers.hierarchical.bound import OneCut
from scheduler.solvers.hierarchical.graphs import block_graphs
from scheduler.solvers.hierarchical.knapsack import choose
from scheduler.solvers.hierarchical.partition import partition
from scheduler.solvers.hierarchical.time_segments import TimeSegments
from scheduler.solvers.ilp.frontier import CutFrontier
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation
from scheduler.solvers.ilp.views import fold_views
from tests.support.deep_graphs import deep_graph

SEPARABLE_SEEDS = [1, 2, 5, 8, 10, 11, 12, 15]
"""Seeds of `deep_graph` whose network has four blocks or more."""
SMALL = {"width": 32, "heads": 2, "length": 16, "batch_size": 4, "vocabulary": 64}


@pytest.mark.parametrize("layers", [4, 9])
def test_a_transformer_is_cut_at_its_residual_stream(layers: int) -> None:
    graph = zoo.transformer(layers, **SMALL)
    blocks = partition(graph)
    ends = [graph.operations[block.forward[-1]].name for block in blocks[:-1]]
    assert ends[1:-1] == [name for name in ends[1:-1] if name.endswith(("/add", "/add2"))]
    assert len({id(part.graph) for part in block_graphs(graph, blocks)[1:-2]}) == 1
    assert len(blocks) >= layers


@pytest.mark.parametrize("seed", range(10))
def test_blocks_are_the_input_order_cut_in_pieces(seed: int) -> None:
    graph = deep_graph(seed)
    blocks = partition(graph)
    forward = [i for block in blocks for i in block.forward]
    backward = [i for block in reversed(blocks) for i in block.backward]
    assert (*forward, *backward) == graph.index.defaults


def test_a_second_stream_does_not_hide_the_blocks() -> None:
    graph = zoo.encoder_decoder(6, **SMALL)
    names = [graph.operations[block.forward[-1]].name for block in partition(graph)]
    assert sum(name.startswith("decoder") for name in names) >= 5
    assert sum(name.startswith("encoder") for name in names) >= 5


@pytest.mark.parametrize("seed", SEPARABLE_SEEDS)
@pytest.mark.parametrize("share", [80, 50])
def test_bounds_hold_and_proofs_agree_with_those_of_other_solvers(seed: int, share: int) -> None:
    graph = deep_graph(seed)
    problem = Problem(graph, parse_budget(f"{share}%", graph))
    proposal = propose(problem, deadline=Deadline(5), seed=0)
    other = sc.solve(graph, f"{share}%", solver="ilp", reorder=False, time_limit=2)
    if proposal.infeasible:
        assert other.schedule is None
    assert proposal.global_bound <= proposal.bound + 1e-9
    if other.schedule is not None:
        assert proposal.bound <= other.time * (1 + 1e-9)
    if proposal.schedule is not None:
        simulation = sc.simulate(graph, proposal.schedule)
        assert other.bound <= simulation.time * (1 + 1e-9)
        if simulation.peak_bytes <= problem.budget_bytes:
            assert proposal.bound <= simulation.time * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEPARABLE_SEEDS[:4])
def test_segments_of_time_take_the_place_of_long_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = deep_graph(seed)
    problem = Problem(graph, parse_budget("50%", graph))
    segments_of, blocks_of, parts = TimeSegments.run, OneCut.run, []

    def run_segments(*arguments: Any) -> None:
        parts.append("segments")
        segments_of(*arguments)

    def run_blocks(*arguments: Any, **options: Any) -> None:
        parts.append("blocks")
        blocks_of(*arguments, **options)

    monkeypatch.setattr(time_segments, "LEAST_OPERATIONS", 1)
    monkeypatch.setattr(solver, "LONG_BLOCK", 1)
    monkeypatch.setattr(TimeSegments, "run", run_segments)
    monkeypatch.setattr(OneCut, "run", run_blocks)
    proposal = propose(problem, deadline=Deadline(5), seed=0)
    assert parts == ["segments"]
    other = sc.solve(graph, "50%", solver="ilp", reorder=False, time_limit=2)
    if other.schedule is not None:
        assert proposal.global_bound <= proposal.bound <= other.time * (1 + 1e-9)


@pytest.mark.parametrize("share", [90, 70, 50, 35])
def test_the_bound_over_blocks_is_that_over_the_whole_graph(share: int) -> None:
    """If no tensor crosses several blocks, the programs over blocks and over the whole graph have the same optimum."""
    graph = zoo.transformer(4, **SMALL)
    problem = Problem(graph, parse_budget(f"{share}%", graph))
    parts = block_graphs(graph, partition(graph))
    cut = OneCut(problem, parts, {}, at_peak=True)
    cut.run(Deadline(20))
    assert cut.live is not None
    memory = dict(zip(problem.save_everything, problem.baseline.memory, strict=True))
    last = [graph.operations[i].name for i in parts[-1].operations[parts[-1].marker + 1 :]]
    peak = max(last, key=lambda name: memory[sc.Compute(name)])
    task = graph.index.task_of[graph.index.operation_ids[peak]]
    whole = CutRelaxation(graph, Precedence(graph, reorder=False), [task], [problem.budget_bytes]).solve(Deadline(20))
    assert whole.exact
    assert cut.bound == pytest.approx(whole.bound, rel=1e-9)


@pytest.mark.parametrize("share", [90, 70, 50])
def test_deep_transformers_are_proven_optimal(share: int) -> None:
    graph = zoo.transformer(24, width=64, heads=4, length=64, batch_size=16, vocabulary=64, separate_heads=True)
    solution = sc.solve(graph, f"{share}%", solver="hierarchical", time_limit=60)
    assert solution.status is sc.Status.OPTIMAL
    assert solution.overhead > 0


def test_a_small_budget_is_met_by_recomputing_whole_blocks() -> None:
    graph = zoo.transformer(16, width=64, heads=4, length=64, batch_size=16, vocabulary=64)
    solution = sc.solve(graph, "12%", solver="hierarchical", time_limit=30)
    assert solution.schedule is not None
    assert solution.gap < 0.05
    kept = [name for name in solution.saved if name.endswith(("/add", "/add2"))]
    assert len(kept) < 32


def test_required_operations_run_even_if_nothing_reads_their_outputs() -> None:
    """As in graphs of other tools, which require every operation and have no results."""
    step = zoo.transformer(8, width=64, heads=4, length=64, batch_size=16, vocabulary=64)
    names = [operation.name for operation in step.operations]
    graph = sc.Graph(step.operations, step.tensors, resident=step.resident, required=names)
    for share in ("70%", "25%"):
        solution = sc.solve(graph, share, solver="hierarchical", time_limit=20)
        assert solution.schedule is not None
        assert solution.bound <= sc.solve(graph, share, solver="ilp", reorder=False, time_limit=5).time * (1 + 1e-9)


def test_equal_blocks_are_solved_once() -> None:
    """Twice the number of layers has the same distinct blocks."""
    samples = []
    for layers in (12, 24):
        graph = zoo.transformer(layers, width=64, heads=4, length=64, batch_size=16, vocabulary=64)
        parts = block_graphs(graph, partition(graph))
        samples.append(len({id(part.graph) for part in parts}))
    assert samples[0] == samples[1]


def test_a_graph_without_blocks_is_rejected() -> None:
    graph = zoo.unet(batch_size=1)
    with pytest.raises(UnsuitableProblemError, match="separates into 4 blocks or more, got 2"):
        propose(Problem(graph, parse_budget("90%", graph)), deadline=Deadline(5), seed=0)


def test_alternatives_are_rejected() -> None:
    graph = zoo.uniform_chain(30).graph
    with pytest.raises(UnsuitableProblemError, match="alternatives"):
        propose(Problem(graph, parse_budget("60%", graph)), deadline=Deadline(5), seed=0)


@pytest.mark.parametrize("seed", range(20))
def test_the_knapsack_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [[(draw.randint(0, 20), float(draw.randint(0, 30))) for _ in range(draw.randint(1, 4))] for _ in range(3)]
    items = [kinds[draw.randrange(3)] for _ in range(5)]
    limit, price = draw.randint(10, 70), draw.choice([0.0, 0.5, 1.5])
    least = [min(t + price * b for b, t in row) for row in items]
    bound = sum(least) - price * limit
    within = [picks for picks in itertools.product(*items) if sum(b for b, _ in picks) <= limit]
    times = [sum(t for _, t in picks) for picks in within]
    arrays = {
        id(row): np.array([(b, t + price * b - min(u + price * c for c, u in row)) for b, t in row]) for row in kinds
    }
    found = choose([arrays[id(row)] for row in items], limit, price, slack=1000.0)
    if not times:
        assert found is None
        return
    assert found is not None
    assert bound + found[0] == pytest.approx(min(times))
    assert sum(row[k][0] for row, k in zip(items, found[1], strict=True)) <= limit
    assert choose([arrays[id(row)] for row in items], limit, price, slack=found[0] - 0.01) is None


def test_lines_lie_below_the_frontier_and_points_on_it() -> None:
    graph = zoo.transformer(4, **SMALL)
    part = block_graphs(graph, partition(graph))[2]
    task = part.graph.index.task_of[part.marker]
    frontier = CutFrontier(part.graph, task)
    frontier.relax(Deadline(20))
    base = math.fsum(operation.time for operation in part.graph.operations)
    points = frontier.points(0.0, math.inf, Deadline(20))
    assert points is not None
    assert len(points) > 3
    for point in points:
        alone = CutRelaxation(part.graph, Precedence(part.graph, reorder=False), [task], [point.bytes]).solve(
            Deadline(20)
        )
        assert alone.bound - base == pytest.approx(point.time, abs=1e-6 * base)
        assert frontier.least_time(point.bytes) <= point.time + 1e-6 * base
        less = CutRelaxation(part.graph, Precedence(part.graph, reorder=False), [task], [point.bytes - 1]).solve(
            Deadline(20)
        )
        assert less.bound > alone.bound


def test_the_least_cost_is_below_every_point_at_every_price() -> None:
    graph = zoo.transformer(4, **SMALL)
    part = block_graphs(graph, partition(graph))[2]
    frontier = CutFrontier(part.graph, part.graph.index.task_of[part.marker])
    frontier.relax(Deadline(20))
    points = frontier.points(0.0, math.inf, Deadline(20))
    assert points
    for price in (0.0, *frontier.prices, 2 * max(frontier.prices)):
        cost, kept = frontier.least_cost(price)
        assert cost <= min(point.time + price * point.bytes for point in points) * (1 + 1e-9)
        assert cost == pytest.approx(frontier.least_time(kept) + price * kept, rel=1e-6, abs=1e-6)


def test_readers_of_views_read_their_bases() -> None:
    tensors = [sc.Tensor("x", 8), sc.Tensor("a", 8), sc.Tensor("v", 8, "a"), sc.Tensor("w", 4, "a"), sc.Tensor("b", 2)]
    operations = [
        sc.Operation("a", ["x"], ["a"], 1.0),
        sc.Operation("v", ["a"], ["v"], 0.0),
        sc.Operation("w", ["v"], ["w"], 0.5),
        sc.Operation("b", ["w"], ["b"], 1.0),
    ]
    graph = sc.Graph(operations, tensors, resident=["x"], results=["b"])
    assert fold_views(graph).root == (-1, 1, 1, 1, 4)
    assert fold_views(graph, free=True).folded == (False, True, False, False)
