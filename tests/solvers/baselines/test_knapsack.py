"""The knapsack against every choice, and the schedules that follow from it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solvers.baselines.kept_sets import forward_operations, schedule_keeping
from scheduler.solvers.baselines.knapsack import BUCKETS, Knapsack, propose
from scheduler.solvers.deadline import Deadline
from tests.support.examples import examples
from tests.support.oracle import optimum
from tests.support.training_graphs import uniform_chain

NUMBERS = st.lists(st.integers(1, 9), min_size=6, max_size=6)


@settings(max_examples=examples(40))
@given(sizes=NUMBERS, times=NUMBERS, capacity=st.integers(0, BUCKETS - 1))
def test_the_saved_tensors_are_the_best_of_all_choices(sizes: list[int], times: list[int], capacity: int) -> None:
    # The sizes sum to 100, which divides the buckets: none is rounded.
    unit = BUCKETS // 100
    sizes[-1] = 100 - sum(sizes[:-1])
    names = [f"t{k}" for k in range(6)]
    forward = [sc.Operation(f"f{k}", [], [name], time) for k, (name, time) in enumerate(zip(names, times, strict=True))]
    backward = sc.Operation("b", names, ["g"], 1.0, phase="backward")
    tensors = [sc.Tensor("g", 1), *(sc.Tensor(name, size) for name, size in zip(names, sizes, strict=True))]
    graph = sc.Graph([*forward, backward], tensors, results=["g"])
    saved = Knapsack(graph, forward_operations(graph, "x")).saved(capacity)
    chosen = [k for k, name in enumerate(names) if graph.index.tensor_ids[name] in saved]
    assert sum(sizes[k] for k in chosen) * unit <= capacity
    fitting = [
        sum(times[k] for k in choice)
        for count in range(7)
        for choice in itertools.combinations(range(6), count)
        if sum(sizes[k] for k in choice) * unit <= capacity
    ]
    assert sum(times[k] for k in chosen) == max(fitting)


def plain_net(blocks: int) -> sc.Graph:
    """Convolution, normalization, ReLU, one after the other; each tensor of 8 bytes."""
    forward: list[sc.Operation] = []
    backward: list[sc.Operation] = []
    for k in range(blocks):
        x, conv, norm, y = f"x{k}", f"conv{k}", f"norm{k}", f"x{k + 1}"
        for name, source, made, time in ((conv, x, conv, 100.0), (norm, conv, norm, 3.0), (f"relu{k}", norm, y, 1.0)):
            forward.append(sc.Operation(name, [source], [made], time))
        steps = [
            (f"relu{k}", f"d_{y}", y, f"d_{norm}"),
            (norm, f"d_{norm}", conv, f"d_{conv}"),
            (conv, f"d_{conv}", x, f"d_{x}"),
        ]
        backward = [
            sc.Operation(f"{n}_backward", [d, s], [m], 10.0, phase="backward") for n, d, s, m in steps
        ] + backward
    first = sc.Operation("loss_backward", [f"x{blocks}"], [f"d_x{blocks}"], 1.0, phase="backward")
    made = [name for operation in (*forward, first, *backward) for name in operation.outputs]
    tensors = [sc.Tensor(name, 8) for name in ["x0", *made]]
    return sc.Graph([*forward, first, *backward], tensors, resident=["x0"], results=["d_x0"])


def test_cheap_operations_are_recomputed_and_expensive_ones_are_not() -> None:
    graph = plain_net(6)
    baseline = Problem(graph, 0).baseline
    solution = sc.solve(graph, "80%", solver="knapsack")
    assert solution.simulation is not None
    again = {name for name, count in solution.simulation.recomputed.items() if count}
    # A block costs 104, its normalization and ReLU cost 4.
    assert again
    assert not any(name.startswith("conv") for name in again)
    assert baseline.time < solution.time <= baseline.time + 6 * 4


@pytest.mark.parametrize("budget", [24, 28, 32])
def test_on_a_uniform_chain_a_schedule_that_fits_is_no_faster_than_the_optimum(budget: int) -> None:
    graph = uniform_chain(6)
    solution = sc.solve(graph, budget, solver="knapsack", reorder=False)
    assert solution.peak_bytes is None or solution.peak_bytes <= budget
    assert solution.time >= optimum(graph.to_dict(), budget, "input order")


def test_a_kept_set_determines_the_recomputed_operations() -> None:
    # Of x1, x2, x3 only x2 is kept, and x3, which comes next: f0 runs again for b1, which reads x1.
    graph = uniform_chain(3)
    schedule = schedule_keeping(graph, [graph.index.tensor_ids["x2"]])
    simulation = sc.simulate(graph, schedule)
    assert {name: count for name, count in simulation.recomputed.items() if count} == {"f0": 1}
    assert simulation.saved == ("x2", "x3")


def test_out_of_time_one_capacity_is_still_tried() -> None:
    graph = plain_net(2)
    proposal = propose(Problem(graph, 2**40), deadline=Deadline(0), seed=0)
    assert proposal.schedule is not None
    assert sc.simulate(graph, proposal.schedule).time == Problem(graph, 0).baseline.time


def test_a_graph_without_a_backward_phase_is_rejected() -> None:
    graph = sc.Graph([sc.Operation("a", [], ["x"], 1.0)], [sc.Tensor("x", 1)], results=["x"])
    with pytest.raises(UnsuitableProblemError, match='"knapsack" needs a forward and a backward phase'):
        sc.solve(graph, 10, solver="knapsack")
