"""Check quick schedules of long chains: they fit, and no schedule is faster than their bound."""

from __future__ import annotations

import random

import pytest

import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import chain_costs
from scheduler.solvers.dp.solver import CLOSE, EXACT_LAYERS, chain_frontier
from scheduler.solvers.dp.two_passes import TwoPasses


def varied_chain(length: int, seed: int) -> sc.Chain:
    """Return a chain of random layers, some of which keep their input or their output."""
    draw = random.Random(seed)
    layers = [
        sc.Layer(
            f"l{i}",
            draw.uniform(1.0, 10.0),
            draw.uniform(2.0, 20.0),
            draw.randint(10, 200),
            draw.randint(10, 600),
            backward_workspace_bytes=draw.randint(0, 100),
            parameter_gradient_bytes=draw.randint(0, 20),
            keeps_output=draw.random() < 0.2,
        )
        for i in range(length)
    ]
    return sc.Chain(layers, input_bytes=100)


@pytest.mark.parametrize("seed", range(12))
def test_no_persistent_schedule_is_faster_than_the_bound(seed: int) -> None:
    chain = varied_chain(3 + seed % 6, seed)
    for peak, time in chain_frontier(chain):
        passes = TwoPasses(chain, chain_costs(chain), peak)
        passes.run(Deadline(60))
        assert passes.bound <= time * (1 + 1e-9)
        if passes.best is not None:
            simulation = sc.simulate(chain.graph, passes.best.schedule)
            assert simulation.peak_bytes <= peak
            assert simulation.time == pytest.approx(passes.costs.time(passes.best.extra_time), rel=1e-9)
            assert simulation.time >= time * (1 - 1e-9)


def test_layers_that_need_no_recomputation_within_two_passes_take_the_optimal_time() -> None:
    # Saving a layer takes 3 bytes and a checkpoint 2: below the save-everything peak, an optimal
    # schedule of three such layers runs each at most twice (as counted for `chain_frontier`).
    layers = [sc.Layer(f"l{i}", 1, 2, 2, 1, keeps_output=True) for i in range(3)]
    chain = sc.Chain(layers, input_bytes=2)
    for budget, time in ((12, 11.0), (14, 10.0), (15, 9.0)):
        passes = TwoPasses(chain, chain_costs(chain), budget)
        passes.run(Deadline(60))
        assert passes.best is not None
        assert sc.simulate(chain.graph, passes.best.schedule).time == time


def test_a_chain_too_long_for_the_exact_program_gets_a_schedule_close_to_its_bound() -> None:
    chain = varied_chain(EXACT_LAYERS + 100, 1)
    problem = Problem(chain.graph, parse_budget("50%", chain.graph), chain=chain)
    passes = TwoPasses(chain, chain_costs(chain), problem.budget_bytes)
    passes.run(Deadline(60))
    assert passes.best is not None
    simulation = sc.simulate(chain.graph, passes.best.schedule)
    assert simulation.peak_bytes <= problem.budget_bytes
    assert passes.bound <= simulation.time <= passes.bound / (1 - CLOSE)
