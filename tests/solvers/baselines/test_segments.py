"""Equal segments and their recursive form: peaks and times counted by hand."""

from __future__ import annotations

import pytest

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solvers.baselines.segments import chain_schedule, chain_schedule_from, graph_schedule, propose
from scheduler.solvers.deadline import Deadline
from tests.support.training_graphs import uniform_chain as uniform_graph


def equal_layers(count: int) -> sc.Chain:
    """Outputs of 4 bytes, 8 more saved, a run forward of time 1 and backward of 2; the input is resident."""
    return sc.Chain([sc.Layer(f"l{i}", 1.0, 2.0, 4, 8) for i in range(count)], input_bytes=4)


def solve_segments(chain: sc.Chain, budget: int) -> sc.Simulation:
    proposal = propose(Problem(chain.graph, budget, chain=chain), deadline=Deadline(60), seed=0)
    return sc.simulate(chain.graph, proposal.schedule)


def test_four_segments_of_sixteen_layers_cost_as_counted() -> None:
    chain = equal_layers(16)
    simulation = sc.simulate(chain.graph, chain_schedule(chain, 4))
    # All but the last segment run forward twice: 16 x 3 + 12.
    assert simulation.time == 60
    # At the loss: the resident input, three boundaries of 4, the last segment's 4 outputs and
    # saved sets of 12 together, and the gradient of the last output.
    assert simulation.peak_bytes == 4 + 3 * 4 + 4 * 12 + 4
    # The third boundary is what the first layer of the last segment saved as its input.
    assert {"l3.output", "l7.output", "l12.kept_input"} <= set(simulation.saved)
    assert not {"l11.output", "l4.kept_input"} & set(simulation.saved)


def test_halves_of_halves_keep_one_output_per_level() -> None:
    chain = equal_layers(16)
    simulation = sc.simulate(chain.graph, chain_schedule(chain, 2, levels=4))
    # On each level the first half of every segment runs forward once without saving: 4 x 8 runs.
    assert simulation.time == 16 * 3 + 4 * 8
    # One output for each of 4 levels, then a layer's saved set, its output and gradient.
    assert simulation.peak_bytes == 4 + 4 * 4 + 8 + 4 + 4


def test_one_segment_and_segments_of_one_layer_are_the_ends() -> None:
    chain = equal_layers(5)
    assert sc.simulate(chain.graph, chain_schedule(chain, 1)).time == 15
    each = sc.simulate(chain.graph, chain_schedule(chain, 5))
    assert each.time == 15 + 4
    assert chain_schedule(chain, 99) == chain_schedule(chain, 5)


def test_segments_begin_at_the_given_layers() -> None:
    chain = equal_layers(6)
    simulation = sc.simulate(chain.graph, chain_schedule_from(chain, [0, 1, 4]))
    assert simulation.time == 6 * 3 + 4
    assert dict(simulation.recomputed)["l3.forward"] == 1
    assert dict(simulation.recomputed)["l4.forward"] == 0


def test_sqrt_n_segments_are_the_answer_if_they_fit() -> None:
    chain = equal_layers(16)
    assert solve_segments(chain, 10**6).time == 60
    assert solve_segments(chain, 68).time == 60


def test_below_sqrt_n_the_recursive_form_fits() -> None:
    chain = equal_layers(64)
    least_of_one_level = min(sc.simulate(chain.graph, chain_schedule(chain, k)).peak_bytes for k in range(1, 65))
    simulation = solve_segments(chain, least_of_one_level - 1)
    assert simulation.peak_bytes < least_of_one_level
    # The last resort: halves of halves, 6 levels of 4 bytes and a layer.
    assert solve_segments(chain, 4 + 6 * 4 + 16).peak_bytes == 4 + 6 * 4 + 16


def test_the_bound_of_a_chain_is_below_the_exact_answer_and_above_the_fastest() -> None:
    chain = equal_layers(16)
    for budget in (68, 80, 120):
        problem = Problem(chain.graph, budget, chain=chain)
        bound = propose(problem, deadline=Deadline(60), seed=0).global_bound
        exact = sc.solve(chain, budget, solver="dp")
        assert exact.status is sc.Status.OPTIMAL
        assert 48 < bound <= exact.time


def test_on_a_graph_the_layers_inputs_that_cross_a_boundary_are_kept() -> None:
    graph = uniform_graph(9)
    simulation = sc.simulate(graph, graph_schedule(graph, 3))
    # x3 and x6 are kept, and x9, with which the backward phase begins. b8 needs x8, b5 needs x5,
    # and b2 needs x2: two more forward runs each.
    assert simulation.time == 9 * 3 + 3 * 2
    assert set(simulation.saved) == {"x3", "x6", "x9"}


def test_a_graph_without_a_backward_phase_is_rejected() -> None:
    graph = sc.Graph([sc.Operation("a", [], ["x"], 1.0)], [sc.Tensor("x", 1)], results=["x"])
    with pytest.raises(UnsuitableProblemError, match='"segments" needs a forward and a backward phase'):
        sc.solve(graph, 10, solver="segments")
