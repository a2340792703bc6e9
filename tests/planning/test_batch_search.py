"""The largest batch, checked against the smallest peak of every batch size by the oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import scheduler as sc
from scheduler.planning.batch_scaling import Growth
from scheduler.planning.batch_search import LargestBatch, largest_batch
from tests.support import oracle
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import conv_net, uniform_chain

SECONDS = 20.0
CHAIN = uniform_chain(4, size=1)


def chain_with_weights(batch: int) -> sc.Graph:
    """Return a chain of different layers with resident weights and their gradients; the batch scales the rest."""
    layers, widths, weights = 3, (1, 4, 2, 3), (3, 0, 5)
    tensors = [sc.Tensor(f"{kind}{i}", widths[i] * batch) for kind in "xg" for i in range(layers + 1)]
    tensors += [sc.Tensor(f"{kind}{i}", weights[i]) for kind in ("w", "dw") for i in range(layers)]
    operations = [sc.Operation(f"f{i}", [f"x{i}", f"w{i}"], [f"x{i + 1}"], 1.0) for i in range(layers)]
    operations.append(sc.Operation("loss", [f"x{layers}"], [f"g{layers}"], 0.0, phase="backward"))
    operations += [
        sc.Operation(f"b{i}", [f"g{i + 1}", f"x{i}", f"w{i}"], [f"g{i}", f"dw{i}"], 2.0, phase="backward")
        for i in reversed(range(layers))
    ]
    kept = [f"w{i}" for i in range(layers)]
    return sc.Graph(operations, tensors, resident=["x0", *kept], results=[f"d{name}" for name in kept])


def padded(batch: int) -> sc.Graph:
    """Return the same for batches padded to a multiple of four: bytes are not affine in the batch."""
    return chain_with_weights(-(-batch // 4) * 4)


def odd_and_even(batch: int) -> sc.Graph:
    """Return a graph with another structure for odd batches."""
    return uniform_chain(2 + batch % 2, size=batch)


def check(graph: Callable[[int], sc.Graph], budget: int, growth: Growth) -> LargestBatch:
    """Assert that the answer agrees with the oracle and its bound and schedules are right; return it."""
    found = largest_batch(growth, budget, limit=1000, seconds=SECONDS)
    least = [oracle.least_peak(graph(size).to_dict()) for size in range(1, found.size + 3)]
    assert [peak <= budget for peak in least] == [True] * found.size + [False] * 2
    assert found.bound is not None
    assert found.bound >= found.size
    if found.size:
        assert found.schedule is not None
        assert sc.simulate(graph(found.size), found.schedule).peak_bytes <= budget
    assert found.next_schedule is not None
    assert sc.simulate(graph(found.size + 1), found.next_schedule).peak_bytes > budget
    return found


@pytest.mark.parametrize("budget", [6, 29, 30, 31, 83])
def test_if_all_bytes_are_proportional_the_largest_batch_is_the_budget_over_the_least_peak(budget: int) -> None:
    unit = oracle.least_peak(CHAIN.to_dict())
    growth = Growth(lambda batch: uniform_chain(4, size=batch))
    found = largest_batch(growth, budget, limit=1000, seconds=SECONDS)
    assert found.size == found.bound == budget // unit


@pytest.mark.parametrize("budget", [24, 40, 75, 76, 77, 78, 79])
@pytest.mark.parametrize("graph", [chain_with_weights, padded])
def test_the_largest_batch_is_that_of_the_oracle(graph: Callable[[int], sc.Graph], budget: int) -> None:
    growth = Growth(graph)
    check(graph, budget, growth)
    assert len(growth.traced) <= 8


def test_four_traces_find_a_large_batch() -> None:
    growth = Growth(chain_with_weights)
    found = largest_batch(growth, 10_000, limit=10**6, seconds=SECONDS)
    assert found.size > 500
    assert sorted(growth.traced) == [2, 3, found.size, found.size + 1]


def test_graphs_that_differ_from_batch_to_batch_are_all_traced() -> None:
    growth = Growth(odd_and_even)
    found = check(odd_and_even, 64, growth)
    assert {found.size, found.size + 1} < set(growth.traced)


def test_without_a_schedule_for_a_batch_of_one_the_size_is_zero() -> None:
    budget = oracle.least_peak(chain_with_weights(1).to_dict()) - 1
    found = check(chain_with_weights, budget, Growth(chain_with_weights))
    assert (found.size, found.schedule) == (0, None)


def test_a_budget_below_the_largest_working_set_is_proven_too_small() -> None:
    resident, largest = 1 + 3 + 5, 3 + 2 + 2 + 5  # x0 w0 w2; the last backward operation: g3 x2 g2 dw2
    found = check(chain_with_weights, resident + largest - 1, Growth(chain_with_weights))
    assert (found.size, found.bound, found.schedule) == (0, 0, None)


def test_a_batch_of_one_may_be_all_that_fits() -> None:
    budget = oracle.least_peak(chain_with_weights(2).to_dict()) - 1
    assert check(chain_with_weights, budget, Growth(chain_with_weights)).size == 1


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_nothing_beyond_the_limit_is_traced_or_claimed(limit: int) -> None:
    growth = Growth(chain_with_weights)
    found = largest_batch(growth, 1000, limit=limit, seconds=SECONDS)
    assert (found.size, found.bound, found.next_schedule) == (limit, None, None)
    assert max(growth.traced) == limit


@pytest.mark.parametrize("budget", [2_000, 3_000, 5_000, 9_000])
def test_no_known_schedule_fits_one_more(budget: int) -> None:
    growth = Growth(lambda batch: conv_net(8, width=16 * batch))
    found = largest_batch(growth, budget, limit=1000, seconds=0.5)
    assert found.schedule is not None
    assert found.next_schedule is not None
    assert sc.simulate(growth.traced[found.size], found.schedule).peak_bytes <= budget
    assert sc.simulate(growth.traced[found.size + 1], found.next_schedule).peak_bytes > budget


def test_without_time_the_answer_still_fits() -> None:
    found = largest_batch(Growth(chain_with_weights), 200, limit=1000, seconds=1e-9)
    assert found.size >= 1
    assert found.schedule is not None
    assert sc.simulate(chain_with_weights(found.size), found.schedule).peak_bytes <= 200


def test_all_searches_together_take_no_more_than_the_time_limit() -> None:
    growth = Growth(lambda batch: conv_net(8, width=16 * batch))
    with FakeClock(seconds_per_look=0.01) as fake:
        largest_batch(growth, 5_000, limit=1000, seconds=1.0)
    assert fake.seconds < 1.2
