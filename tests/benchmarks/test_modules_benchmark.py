"""Choose the calls of a deep transformer to recompute: CPU time beside that of simulating one choice.

    pytest -n 0 -s tests/benchmarks/test_modules_benchmark.py

Each row is one budget: from the smallest peak (0) to that of saving everything (1).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from scheduler.pytorch.modules.lowering import lower
from scheduler.pytorch.modules.search import Chooser, Found
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline
from tests.support.call_trees import transformer_tree

GAP = 0.005
SHARES = (0.0, 0.02, 0.1, 0.25, 0.4, 0.6, 0.8)


def timed(search: Callable[[], Found]) -> tuple[Found, float]:
    started = time.process_time()
    return search(), time.process_time() - started


@pytest.mark.parametrize("spread", [0, 100])
@pytest.mark.parametrize("blocks", [40, 80])
def test_a_choice_takes_as_long_as_few_simulations(blocks: int, spread: int) -> None:
    tree = transformer_tree(blocks, spread=spread)
    lowered = lower(tree)
    chooser = Chooser(lowered.layout)
    started = time.process_time()
    for _ in range(5):
        simulate(lowered.graph, lowered.schedule({}))
    simulation = (time.process_time() - started) / 5
    most = chooser.plain.peak_bytes
    smallest, seconds = timed(lambda: chooser.smallest(step=most // 500, deadline=Deadline(60)))
    least = smallest.smallest.peak_bytes
    print(f"\n{len(tree.calls)} calls; one simulation {simulation:.3f} s; smallest peak {seconds:.2f} s")
    for share in SHARES:
        budget = least + round(share * (most - least))
        found, seconds = timed(lambda budget=budget: chooser.fastest(budget, gap=GAP, deadline=Deadline(60)))
        assert found.best is not None
        gap = 1 - found.bound / found.best.time
        overhead = found.best.time / chooser.plain.time - 1
        print(f"{share:5.2f} overhead {overhead:6.2%} gap {gap:6.3%} {found.programs} programs, {seconds:.2f} s")
        assert gap <= GAP
        assert seconds < 150 * simulation
