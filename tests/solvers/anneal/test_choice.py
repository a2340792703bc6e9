"""Check how annealing chooses what its next turn does."""

from __future__ import annotations

from collections import Counter

import pytest

from scheduler.solvers.anneal.choice import Choice, Kind


def chosen(turns: int, paying: Kind | None) -> Counter[Kind]:
    """How often each kind is chosen if only one of them ever finds something."""
    choice, counts = Choice(), Counter[Kind]()
    for _ in range(turns):
        kind = choice.next()
        counts[kind] += 1
        choice.record(kind, improved=kind is paying)
    return counts


@pytest.mark.parametrize("paying", Kind)
def test_the_kind_that_pays_gets_most_turns_and_every_other_some(paying: Kind) -> None:
    counts = chosen(60, paying)
    assert counts[paying] > 40
    assert all(counts[kind] >= 2 for kind in Kind)


def test_where_nothing_pays_decisions_get_fewer_turns_than_either_start_of_the_runs() -> None:
    counts = chosen(60, None)
    assert 8 <= counts[Kind.DECISIONS] < min(counts[Kind.FROM_START], counts[Kind.RUNS_FROM_BEST])


def test_a_kind_that_no_longer_pays_loses_its_turns() -> None:
    choice, kinds = Choice(), []
    for turn in range(60):
        kinds.append(choice.next())
        choice.record(kinds[-1], improved=kinds[-1] is Kind.DECISIONS and turn < 30)
    assert kinds[10:30].count(Kind.DECISIONS) > 2 * kinds[40:].count(Kind.DECISIONS)
