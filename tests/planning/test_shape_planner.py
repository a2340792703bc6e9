"""One step in several shapes: what was found for one is where the search for the next begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import scheduler as sc
from scheduler.planning.shape_planner import LATER_SEARCH_SHARE, ShapePlanner
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers import registry
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import load_solver
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import conv_net, uniform_chain

BLOCKS = 6


def grown(length: int, graph: sc.Graph | None = None) -> sc.Graph:
    """The same network at another length: bytes and times in proportion, the batch of fixed size."""
    graph = graph or conv_net(BLOCKS, width=1)
    return replace(
        graph,
        tensors=[replace(tensor, size_bytes=tensor.size_bytes * length) for tensor in graph.tensors],
        operations=[replace(operation, time=operation.time * length) for operation in graph.operations],
    )


class Searcher:
    """A solver that takes all the time that it has, notes what it was given, and may find nothing."""

    finds = True

    def __init__(self, fake: FakeClock) -> None:
        self.fake = fake
        self.problems: list[Problem] = []
        self.seconds: list[float] = []

    def propose(self, problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        self.problems.append(problem)
        self.seconds.append(deadline.remaining)
        found = load_solver("greedy")(problem, deadline=deadline, seed=seed)
        self.fake.advance(deadline.remaining)
        found = found if self.finds else Proposal(None, "input order")
        return replace(found, bound=1e-9)  # a bound that proves nothing, so that none is looked for


@pytest.fixture
def searcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[Searcher]:
    with FakeClock(seconds_per_look=0.001) as fake:
        found = Searcher(fake)
        monkeypatch.setitem(registry.REGISTERED, "searcher", found.propose)
        yield found


def planner(graph: sc.Graph, share: float, **options: object) -> ShapePlanner:
    """A planner with a budget between the resident bytes and the peak of saving everything."""
    everything = sc.solve(graph, 2**40, solver="save-all").peak_bytes
    return ShapePlanner(int(share * everything), {"solver": "searcher", "time_limit": 20.0, "gap": 0.005, **options})


def test_a_schedule_within_the_gap_of_the_bound_is_taken_over_without_a_search(searcher: Searcher) -> None:
    # Of a block's 312 units of time, its ReLU takes 1: recomputing all of them costs 0.3 %.
    graph = grown(100)
    plans = planner(graph, 0.9)
    first = plans.plan(graph)
    assert 0 < first.overhead < 0.005
    second = plans.plan(grown(90))
    assert second.schedule == first.schedule
    assert second.budget_bytes == first.budget_bytes
    assert second.overhead == pytest.approx(first.overhead)
    assert second.bound <= second.time
    assert plans.searches == len(searcher.problems) == 1


def test_a_schedule_that_is_slower_or_does_not_fit_is_where_the_search_begins(searcher: Searcher) -> None:
    graph = grown(100, uniform_chain(8, size=1))
    plans = planner(graph, 0.6)
    first = plans.plan(graph)
    assert first.overhead > 0.005
    plans.plan(grown(90, uniform_chain(8, size=1)))
    plans.plan(grown(110, uniform_chain(8, size=1)))
    starts = [problem.starts for problem in searcher.problems]
    assert starts[0] == ()
    assert all(first.schedule in known for known in starts[1:])
    later = 20.0 * LATER_SEARCH_SHARE
    assert searcher.seconds == pytest.approx([20.0, later, later], abs=0.5)


def test_a_step_of_the_same_sizes_is_planned_without_a_search(searcher: Searcher) -> None:
    """A loss weight that a schedule changes gives an equal graph, except for noise in measured times."""
    graph = grown(100, uniform_chain(8, size=1))
    noisy, slower = (
        replace(graph, operations=[replace(operation, time=operation.time * factor) for operation in graph.operations])
        for factor in (1.005, 2)
    )
    plans = planner(graph, 0.6)
    first = plans.plan(graph)
    for again in (noisy, graph):
        assert plans.plan(again).schedule == first.schedule
    assert first.overhead > 0.005
    assert plans.searches == 1
    plans.plan(slower)
    assert plans.searches == 2


def test_ten_lengths_take_at_most_three_times_the_seconds_of_one(searcher: Searcher) -> None:
    plans = planner(grown(100, uniform_chain(8, size=1)), 0.7)
    for length in (100, 97, 103, 95, 99, 90, 101, 98, 92, 96):
        plans.plan(grown(length, uniform_chain(8, size=1)))
    assert plans.searches == len(searcher.seconds) == 10
    assert sum(searcher.seconds) <= 3 * searcher.seconds[0]


def test_a_shape_that_needed_no_recomputation_does_not_shorten_the_search_for_a_longer_one(searcher: Searcher) -> None:
    plans = planner(grown(100, uniform_chain(8, size=1)), 0.7)
    assert plans.plan(grown(50, uniform_chain(8, size=1))).overhead == 0
    assert plans.plan(grown(100, uniform_chain(8, size=1))).overhead > 0
    assert searcher.seconds == pytest.approx([20.0, 20.0], abs=0.5)


def test_a_step_with_other_operations_gets_a_search_of_its_own(searcher: Searcher) -> None:
    graph = grown(100)
    plans = planner(graph, 0.85)
    plans.plan(graph)
    plans.plan(conv_net(BLOCKS - 1, width=100))
    assert [problem.starts for problem in searcher.problems] == [(), ()]
    assert searcher.seconds == pytest.approx([20.0, 20.0], abs=0.5)


def test_a_short_search_without_a_schedule_is_followed_by_one_with_the_full_limit(searcher: Searcher) -> None:
    graph = grown(100, uniform_chain(8, size=1))
    plans = planner(graph, 0.6)
    plans.plan(graph)
    searcher.finds = False
    with pytest.raises(sc.OutOfTimeError):
        plans.plan(grown(110, uniform_chain(8, size=1)))
    assert searcher.seconds[1:] == pytest.approx([20.0 * LATER_SEARCH_SHARE, 20.0], abs=0.5)


def test_a_percentage_means_the_bytes_of_the_first_shape_for_all() -> None:
    plans = ShapePlanner("50%", {"solver": "greedy"})
    with FakeClock(seconds_per_look=0.1):
        first = plans.plan(grown(100))
        assert plans.budget_bytes == first.budget_bytes
        assert plans.plan(grown(80)).budget_bytes == first.budget_bytes
        with pytest.raises(sc.BudgetTooSmallError, match=r'The budget "50%" means .* plan the largest shape first'):
            plans.plan(grown(10_000))


def test_min_keeps_its_bytes_where_they_suffice_and_is_raised_where_they_do_not() -> None:
    # The smallest peak of the uniform chain is four sizes; between it and ten sizes, the half is seven.
    sizes = {"min": 4, "min+50%": 7}
    for budget, size in sizes.items():
        plans = ShapePlanner(budget, {"time_limit": 5.0})
        bytes_of = {length: plans.plan(uniform_chain(8, size=length)).budget_bytes for length in (100, 90, 300)}
        assert bytes_of == {100: 100 * size, 90: 100 * size, 300: 300 * size}
        assert plans.budget_bytes == 300 * size


@pytest.mark.parametrize("reorder", [True, False])
def test_the_known_schedules_come_first_in_auto(reorder: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from scheduler.solvers import auto

    graph = conv_net(BLOCKS)
    best = sc.solve(graph, "70%", time_limit=20.0, reorder=False)
    monkeypatch.setattr(auto, "STAGES", auto.STAGES[:1])
    problem = Problem(graph, best.budget_bytes, reorder, starts=(best.schedule,))
    assert load_solver("auto")(problem, deadline=Deadline(20.0), seed=0).schedule == best.schedule


@pytest.mark.parametrize(
    ("time", "unit", "seconds"), [(0.1, "s", 4.5), (1.0, "s", 9.0), (9.0, "s", 20.0), (0.1, "FLOP", 20.0)]
)
def test_without_a_time_limit_a_search_takes_four_seconds_and_five_steps(
    time: float, unit: str, seconds: float, searcher: Searcher
) -> None:
    step = uniform_chain(8, size=1)
    whole = sum(one.time for one in step.operations)
    operations = [replace(one, time=one.time * time / whole) for one in step.operations]
    graph = sc.Graph(operations, step.tensors, step.resident, step.results, time_unit=unit)
    ShapePlanner("60%", {"solver": "searcher"}).plan(graph)
    assert searcher.seconds == [pytest.approx(seconds, abs=0.1)]


def test_a_search_that_finds_nothing_in_time_goes_on_for_twenty_seconds(
    searcher: Searcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finds_late(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        found = searcher.propose(problem, deadline=deadline, seed=seed)
        return found if searcher.seconds[-1] > 10 else replace(found, schedule=None)

    monkeypatch.setitem(registry.REGISTERED, "searcher", finds_late)
    graph = uniform_chain(8, size=1)
    brief = sc.Graph(
        [replace(one, time=1e-6) for one in graph.operations], graph.tensors, graph.resident, graph.results
    )
    assert ShapePlanner("60%", {"solver": "searcher"}).plan(brief).overhead > 0
    assert searcher.seconds == [pytest.approx(4.0, abs=0.1), pytest.approx(20.0, abs=0.1)]
