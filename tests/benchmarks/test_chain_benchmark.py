"""Time and answer of `dp`, beside the published program on a grid of 500 memory slots.

    pytest -n 0 tests/benchmarks/test_chain_benchmark.py

Chains of few distinct layers repeat a pattern (embedding, attention and MLP in turn, head);
in the others every layer differs. Times leave out what numba compiles on the first run.
"""

from __future__ import annotations

import random
import sys
import time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.solvers.dp.dynamic_program import whole_frontier
from tests.support.grid_reference import grid_time

MIB = 2**20
TIME_LIMIT = 60.0
LONGEST_GRID = 500
"""Layers; the tables of longer chains take gigabytes."""


def few_distinct(length: int) -> sc.Chain:
    """Embedding, attention and MLP in turn, head."""
    width = 8 * MIB
    block = [
        {"forward_time": 2.1, "backward_time": 4.4, "saved_bytes": 5 * width + 123, "backward_workspace_bytes": width},
        {"forward_time": 3.3, "backward_time": 6.5, "saved_bytes": 8 * width + 777, "backward_workspace_bytes": width},
    ]
    layers = [sc.Layer("embedding", 0.3, 0.6, width, MIB)]
    layers += [sc.Layer(f"block{i}", output_bytes=width, **block[i % 2]) for i in range(length - 2)]
    layers.append(sc.Layer("head", 5.0, 10.0, 4, 30 * MIB))
    return sc.Chain(layers, input_bytes=MIB)


def all_distinct(length: int) -> sc.Chain:
    """Layers of random sizes and times, about as far apart as those of a convolutional net."""
    draw = random.Random(length)
    layers = []
    for i in range(length):
        forward = draw.uniform(1.0, 10.0)
        layers.append(
            sc.Layer(
                f"l{i}",
                forward,
                forward * draw.uniform(1.6, 2.4),
                draw.randint(MIB, 20 * MIB),
                draw.randint(MIB, 60 * MIB),
                forward_with_saving_workspace_bytes=draw.randint(0, 5 * MIB),
                backward_workspace_bytes=draw.randint(0, 10 * MIB),
                parameter_gradient_bytes=draw.randint(0, 4 * MIB),
            )
        )
    return sc.Chain(layers, input_bytes=10 * MIB)


CHAINS = {"few": few_distinct, "all": all_distinct}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Compile the kernels, the whole frontier's and the pruned search's, before anything is timed."""
    for length in (50, 110):
        sc.solve(few_distinct(length), "50%", solver="dp")
    grid_time(few_distinct(10), 2**40)


@pytest.mark.parametrize("budget", ["50%", "30%"])
@pytest.mark.parametrize("length", [50, 100, 200, 300, 500, 1000])
@pytest.mark.parametrize("kind", list(CHAINS))
def test_chain_beside_the_grid(
    benchmark: BenchmarkFixture, capsys: pytest.CaptureFixture[str], kind: str, length: int, budget: str
) -> None:
    chain = CHAINS[kind](length)

    def solve() -> sc.Solution:
        # Nothing is remembered from the other budget: neither the lowered graph nor a frontier.
        whole_frontier.cache_clear()
        return sc.solve(sc.Chain(chain.layers, chain.input_bytes), budget, solver="dp", time_limit=TIME_LIMIT)

    solution = benchmark.pedantic(solve)
    seconds, grid = float("nan"), float("nan")
    if length <= LONGEST_GRID:
        started = time.perf_counter()
        grid = grid_time(chain, parse_budget(budget, chain.graph))
        seconds = time.perf_counter() - started
        assert grid >= solution.time * (1 - 1e-6)
    baseline = Problem(chain.graph, 0).baseline.time
    benchmark.extra_info.update(status=solution.status.name, overhead=solution.overhead, global_gap=solution.global_gap)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{kind} distinct, n = {length}, {budget}:"
            f" chain {solution.overhead:.4%} in {solution.solve_seconds:.2f} s"
            f" ({solution.status.name}, gap over all schedules {solution.global_gap:.3%});"
            f" grid {grid / baseline - 1:.4%} in {seconds:.2f} s"
        )
