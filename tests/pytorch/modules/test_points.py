"""Memory at a point as a sum over conditions: what the simulator counts, for every choice of calls."""

from __future__ import annotations

import random

import pytest

from scheduler.pytorch.modules.accounting import Accounts
from scheduler.pytorch.modules.calls import OUTSIDE
from scheduler.pytorch.modules.lowering import lower
from scheduler.pytorch.modules.points import Condition, Literal, Point, Points, simplify
from scheduler.pytorch.modules.regions import Kind, execute
from scheduler.schedule import Compute
from scheduler.simulator import simulate
from tests.support.call_trees import every_choice, random_tree


@pytest.mark.parametrize("seed", range(40))
def test_it_is_what_the_simulator_counts(seed: int) -> None:
    tree = random_tree(seed, most_calls=6)
    lowered = lower(tree)
    keepers = [
        c for c, call in enumerate(tree.calls) if any(s.expensive for s in tree.segments[call.start : call.stop])
    ]
    points, accounts = Points(lowered.layout, range(len(tree.calls)), keepers), Accounts(lowered.layout)
    choices = list(every_choice(tree))
    for regions in random.Random(seed).sample(choices, min(8, len(choices))):
        made = {Literal(c) for c in regions} | {Literal(c, True) for c, keeps in regions.items() if keeps}
        execution, schedule = execute(lowered.layout, regions), lowered.schedule(regions)
        simulation = simulate(lowered.graph, schedule)
        amounts = simulation.memory[[isinstance(action, Compute) for action in schedule]]
        assert accounts.count(execution) == (pytest.approx(simulation.time), amounts.tolist())
        for (kind, position), root, amount in zip(execution.runs, execution.roots, amounts.tolist(), strict=True):
            if kind in (Kind.CHECKPOINT, Kind.KEEPING_CHECKPOINT):
                continue
            backward = kind in (Kind.BACKWARD, Kind.GRADIENTS)
            memory = points.memory(Point(kind, position) if backward else Point(Kind.SAVING, position, root))
            held = [size for holding, size in memory.held.items() if any(_holds(c, made) for c in holding)]
            assert lowered.graph.resident_bytes + memory.constant + sum(held) == amount, (regions, kind, position, root)
            assert memory.region == (OUTSIDE if backward else root)


def _holds(condition: Condition, made: set[Literal]) -> bool:
    return condition.true <= made and not condition.false & made


def test_what_is_held_with_and_without_a_decision_does_not_depend_on_it() -> None:
    a, b, c = (frozenset([Literal(i)]) for i in range(3))
    with_a, without_a = Condition(a, b), Condition(frozenset(), a | b)
    assert simplify(frozenset([with_a, without_a])) == {Condition(frozenset(), b)}
    assert simplify(frozenset([with_a, without_a, Condition(b, c)])) == {
        Condition(frozenset(), b),
        Condition(frozenset(), c),
    }
