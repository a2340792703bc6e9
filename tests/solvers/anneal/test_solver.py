"""Check annealing: its memory, its answers, and how it ends."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import InvalidScheduleError
from scheduler.problem import Problem, parse_budget
from scheduler.schedule import follows_input_order, runs_of, schedule_from_runs
from scheduler.solvers import greedy
from scheduler.solvers.anneal import propose, solver
from scheduler.solvers.anneal.choice import Kind
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.anneal.crossing import Crossings
from scheduler.solvers.anneal.solver import RETENTION_HOT, Annealing, _Pair, search
from scheduler.solvers.anneal.state import AREA, COST
from scheduler.solvers.anneal.walker import Walker
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.smallest_peak import smallest_peak
from tests.support.annealing import polish
from tests.support.examples import examples
from tests.support.fake_clock import FakeClock
from tests.support.oracle import optimum
from tests.support.strategies import graphs, joint_graphs
from tests.support.training_graphs import conv_net, uniform_chain

NEVER = Deadline(1e6)


def walker_after(graph: sc.Graph, budget: int, moves: int, *, free: bool) -> Walker:
    """A walker that has made hot moves from the save-everything schedule."""
    walker = Walker(Contraction(graph, budget), 0, free=free)
    walker.load(runs_of(graph, Problem(graph, budget).save_everything), 0.5)
    walker.cool(0.5, moves, NEVER)
    return walker


def memory_kept(walker: Walker) -> np.ndarray:
    """Memory during each run according to the walker, relative to the budget."""
    state = walker.state
    return (state.profile.memory + state.profile.pending[:, None]).ravel()[state.run >= 0]


def simulated(graph: sc.Graph, walker: Walker) -> tuple[sc.Simulation, np.ndarray]:
    """The simulation of the walker's sequence, which raises if a rule is broken, and memory during each run."""
    runs = walker.contraction.expand(walker.state.run[walker.state.run >= 0].tolist())
    schedule = schedule_from_runs(graph, runs)
    simulation = sc.simulate(graph, schedule)
    during = [isinstance(action, sc.Compute) for action in schedule]
    return simulation, simulation.memory[during]


@settings(max_examples=examples(150))
@given(data=st.data(), free=st.booleans())
def test_every_state_is_valid_and_its_memory_is_at_least_that_of_the_simulator(data: st.DataObject, free: bool) -> None:
    graph = data.draw(st.one_of(graphs(), joint_graphs()))
    budget = data.draw(st.integers(0, 40))
    walker = walker_after(graph, budget, data.draw(st.integers(1, 400)), free=free)
    simulation, _ = simulated(graph, walker)
    kept = memory_kept(walker)
    assert simulation.peak_bytes <= int(kept.max()) + budget
    assert walker.state.counts[AREA] == np.maximum(kept, 0).sum()
    assert walker.state.levels[COST] == pytest.approx(simulation.time)


@settings(max_examples=examples(150))
@given(data=st.data(), free=st.booleans())
def test_without_shared_storages_memory_and_time_are_those_of_the_simulator(data: st.DataObject, free: bool) -> None:
    drawn = data.draw(st.one_of(graphs(), joint_graphs()))
    graph = sc.Graph(
        drawn.operations,
        [sc.Tensor(tensor.name, tensor.size_bytes) for tensor in drawn.tensors],
        drawn.resident,
        drawn.results,
        drawn.required,
    )
    budget = data.draw(st.integers(0, 40))
    walker = walker_after(graph, budget, data.draw(st.integers(1, 400)), free=free)
    simulation, during = simulated(graph, walker)
    assert np.array_equal(memory_kept(walker) + budget, during)
    assert walker.state.levels[COST] == pytest.approx(simulation.time)


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("budget", [20, 24, 28])
def test_on_a_chain_of_six_it_finds_what_the_exhaustive_search_finds(budget: int, reorder: bool) -> None:
    graph = uniform_chain(6)
    best = optimum(graph.to_dict(), budget, "any" if reorder else "input order")
    problem = Problem(graph, budget, reorder)
    found = polish(problem, problem.save_everything, deadline=NEVER, seed=0, moves=400_000)
    assert sc.simulate(graph, found).peak_bytes <= budget
    assert sc.simulate(graph, found).time == best


def test_another_order_needs_no_recomputation_where_the_input_order_does() -> None:
    # Two large tensors, each reduced to a small one: in the right order, never both are live.
    graph = sc.Graph(
        [
            sc.Operation("make_a", [], ["a"], 5.0),
            sc.Operation("make_b", [], ["b"], 5.0),
            sc.Operation("reduce_a", ["a"], ["small_a"], 1.0),
            sc.Operation("reduce_b", ["b"], ["small_b"], 1.0),
        ],
        [sc.Tensor("a", 8), sc.Tensor("b", 8), sc.Tensor("small_a", 1), sc.Tensor("small_b", 1)],
        results=["small_a", "small_b"],
    )
    free = propose(Problem(graph, 10), deadline=Deadline(5), seed=0)
    assert free.schedule is not None
    assert sc.simulate(graph, free.schedule).time == 12.0
    assert sc.simulate(graph, free.schedule).peak_bytes == 10
    # In the input order each is computed twice: first both, and then each one just before it is reduced.
    input_order = propose(Problem(graph, 10, reorder=False), deadline=Deadline(5), seed=0)
    assert input_order.schedule is not None
    assert sc.simulate(graph, input_order.schedule).time == 22.0


@pytest.mark.parametrize("reorder", [False, True])
def test_the_same_seed_and_moves_give_the_same_answer(reorder: bool) -> None:
    graph = conv_net(6)
    problem = Problem(graph, parse_budget("60%", graph), reorder)
    first, second = (polish(problem, problem.save_everything, deadline=NEVER, seed=7, moves=60_000) for _ in range(2))
    assert first == second
    assert first != problem.save_everything


@pytest.mark.parametrize("share", ["80%", "60%"])
def test_polishing_never_makes_a_start_slower_and_keeps_to_the_budget_and_the_order(share: str) -> None:
    graph = conv_net(8)
    problem = Problem(graph, parse_budget(share, graph), reorder=False)
    start = greedy.propose(problem, deadline=NEVER, seed=0).schedule
    assert start is not None
    found = polish(problem, start, deadline=NEVER, seed=1, moves=40_000)
    simulation = sc.simulate(graph, found)
    assert simulation.time <= sc.simulate(graph, start).time
    assert simulation.peak_bytes <= problem.budget_bytes
    assert follows_input_order(graph, found)


def test_polishing_returns_the_start_where_nothing_fits() -> None:
    graph = uniform_chain(6)
    problem = Problem(graph, 15)
    start = problem.save_everything
    assert polish(problem, start, deadline=Deadline(0.2), seed=0, moves=5_000) is start


@pytest.mark.parametrize("seed", range(4))
def test_a_schedule_is_found_below_the_smallest_peak_that_is_known(seed: int) -> None:
    graph = sc.zoo.unet()
    problem = Problem(graph, 0)
    known_bytes, smallest, _ = smallest_peak(problem, NEVER)
    problem = Problem(graph, known_bytes - (known_bytes - problem.floor.bytes) // 20)
    found = polish(problem, smallest, deadline=NEVER, seed=seed, moves=20_000)
    assert sc.simulate(graph, found).peak_bytes <= problem.budget_bytes


def test_where_nothing_fits_the_smallest_peak_is_told() -> None:
    problem = Problem(sc.zoo.unet(), 0)
    problem = Problem(problem.graph, problem.floor.bytes)
    annealing = Annealing(problem, walkers=1)
    annealing.offer(problem.save_everything)
    annealing.run(problem.save_everything, NEVER, seed=0, most_moves=50_000)
    found = annealing.proposal()
    assert found.schedule is None
    assert found.smallest is not None
    assert sc.simulate(problem.graph, found.smallest).peak_bytes < problem.baseline.peak_bytes


def test_an_invalid_start_is_rejected() -> None:
    graph = uniform_chain(3)
    with pytest.raises(InvalidScheduleError, match="not live"):
        polish(Problem(graph, 100), sc.Schedule([sc.Compute("f1")]), deadline=NEVER, seed=0, moves=1)


def test_a_budget_under_the_floor_is_proven_impossible() -> None:
    proposal = propose(Problem(uniform_chain(5), 15), deadline=Deadline(10), seed=0)
    assert proposal.infeasible
    assert proposal.schedule is None


def test_views_are_recomputed_with_their_base() -> None:
    # v views x; x is large and cheap, y needs its memory between the two readers of the view.
    graph = sc.Graph(
        [
            sc.Operation("x", [], ["x"], 1.0),
            sc.Operation("v", ["x"], ["v"], 0.0),
            sc.Operation("p", ["v"], ["p"], 1.0),
            sc.Operation("y", ["p"], ["y"], 50.0),
            sc.Operation("q", ["y"], ["q"], 1.0),
            sc.Operation("r", ["q", "v"], ["r"], 1.0),
        ],
        [sc.Tensor(name, size, storage) for name, size, storage in
         [("x", 8, "x"), ("v", 8, "x"), ("p", 1, "p"), ("y", 8, "y"), ("q", 1, "q"), ("r", 1, "r")]],
        results=["r"],
    )  # fmt: skip
    found = polish(Problem(graph, 10), Problem(graph, 10).save_everything, deadline=NEVER, seed=0, moves=20_000)
    simulation = sc.simulate(graph, found)
    assert simulation.peak_bytes <= 10
    assert simulation.recomputed == {"x": 1, "v": 1, "p": 0, "y": 0, "q": 0, "r": 0}


def test_the_time_limit_holds_on_thousands_of_operations() -> None:
    graph = conv_net(500)
    problem = Problem(graph, parse_budget("50%", graph))
    with FakeClock(seconds_per_look=0.02, seconds_per_call=1e-7) as fake:
        propose(problem, deadline=Deadline(1.0), seed=0)
        assert fake.seconds < 2.0


def test_an_interrupt_returns_the_best_schedule_so_far() -> None:
    # The time limit would come at the 2000th look. The walkers' threads look until the main thread gets the signal.
    with FakeClock(seconds_per_look=0.01, at_look={40: partial(os.kill, os.getpid(), signal.SIGINT)}) as fake:
        solution = sc.solve(conv_net(40), "50%", solver="anneal", time_limit=20)
        assert 40 <= fake.looks < 140
    assert solution.schedule is not None


def test_two_searches_in_threads_do_not_disturb_each_other() -> None:
    graph = conv_net(4)
    problem = Problem(graph, parse_budget("60%", graph))
    found: dict[int, sc.Schedule] = {}

    def anneal(seed: int) -> None:
        found[seed] = polish(problem, problem.save_everything, deadline=NEVER, seed=seed, moves=30_000)

    threads = [threading.Thread(target=anneal, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        assert found[seed] == polish(problem, problem.save_everything, deadline=NEVER, seed=seed, moves=30_000)


def test_with_much_time_searches_follow_each_other_from_the_same_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = uniform_chain(4)
    known, *answers = [
        schedule_from_runs(graph, runs)
        for runs in (
            [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6, 0, 1, 0, 7, 8],
            [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6, 0, 7, 8],
            [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6, 0, 0, 7, 8],
            [0, 1, 2, 3, 4, 0, 1, 2, 5, 1, 6, 0, 7, 8],
        )
    ]
    times = [sc.simulate(graph, schedule).time for schedule in answers]
    assert times[2] < times[0] < times[1]
    most = max(sc.simulate(graph, schedule).peak_bytes for schedule in (known, *answers))
    begun: list[tuple[sc.Schedule | None, int, float]] = []

    def run(search: Annealing, start: sc.Schedule, deadline: Deadline, seed: int) -> None:
        begun.append((search.best, seed, deadline.remaining))
        search.offer(answers[len(begun) - 1])
        deadline.report(search.proposal())
        fake.advance(deadline.remaining)

    monkeypatch.setattr(Annealing, "run", run)
    reported: list[sc.Schedule | None] = []
    with FakeClock() as fake:
        deadline = Deadline(12.5).within(12.5, lambda found: reported.append(found.schedule))
        found = search(Problem(graph, most, starts=(known,)), deadline=deadline, seed=2, only_starts=True)
    assert found.schedule == answers[2]
    assert reported == [answers[0], answers[2]]
    assert [start for start, _, _ in begun] == [known] * 3
    assert len({seed for _, seed, _ in begun}) == 3
    assert sum(seconds for _, _, seconds in begun) == pytest.approx(12.5)


def test_while_nothing_fits_turns_begin_in_turn_with_known_schedules() -> None:
    graph = uniform_chain(4)
    problem = Problem(graph, 16)
    exceeding = [
        schedule_from_runs(graph, runs) for runs in ([0, 1, 2, 3, 4, 0, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 0, 6, 7, 8])
    ]
    assert all(sc.simulate(graph, schedule).peak_bytes > problem.budget_bytes for schedule in exceeding)
    search = Annealing(problem, walkers=1)
    assert search._next_begin(Kind.FROM_START, NEVER) is None
    invalid = (sc.Free("x1"), *exceeding[0])
    for schedule in (*exceeding, invalid, problem.save_everything):
        search.offer_start(schedule)
    assert search.best is None
    begins = [search._next_begin(Kind.FROM_START, NEVER) for _ in range(3)]
    assert begins == [exceeding[1], exceeding[0], exceeding[1]]


def test_while_what_fits_is_slow_all_turns_begin_with_what_does_not() -> None:
    graph = uniform_chain(4)
    slow = schedule_from_runs(graph, [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6, 0, 7, 8])
    problem = Problem(graph, sc.simulate(graph, slow).peak_bytes)
    exceeding = [
        schedule_from_runs(graph, runs) for runs in ([0, 1, 2, 3, 4, 0, 5, 6, 7, 8], [0, 1, 2, 3, 4, 5, 0, 6, 7, 8])
    ]
    assert all(sc.simulate(graph, schedule).peak_bytes > problem.budget_bytes for schedule in exceeding)
    search = Annealing(problem, walkers=2)
    for schedule in (slow, *exceeding):
        search.offer_start(schedule)
    assert [search._next_kinds(is_last=is_last) for is_last in (False, True)] == [[Kind.FROM_START] * 2] * 2
    assert [search._next_begin(Kind.FROM_START, NEVER) for _ in range(3)] == [exceeding[1], exceeding[0], exceeding[1]]
    search.best_time = 1.05 * sc.simulate(graph, exceeding[0]).time
    assert [search._next_begin(Kind.FROM_START, NEVER) for _ in range(3)] == [None, exceeding[0], exceeding[1]]


def rebuilt(graph: sc.Graph, layers: int) -> sc.Schedule:
    """Of a uniform chain of eight, the schedule that recomputes the inputs of so many first layers one by one."""
    backward = [[*(range(layer) if layer <= layers else ()), 16 - layer] for layer in reversed(range(8))]
    return schedule_from_runs(graph, [*range(9), *chain.from_iterable(backward)])


@pytest.mark.parametrize(("work", "over"), [(10**9, "anneal_decisions"), (0, "anneal_runs")])
def test_in_a_large_graph_what_does_not_fit_is_annealed_over_runs_only(
    work: int, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = uniform_chain(8)
    slow, near = rebuilt(graph, 7), rebuilt(graph, 4)
    problem = Problem(graph, sc.simulate(graph, slow).peak_bytes)
    begun: list[str] = []
    for name in ("anneal_runs", "anneal_decisions"):
        monkeypatch.setattr(_Pair, name, lambda *_, name=name: (begun.append(name), (0, []))[1])
    monkeypatch.setattr(solver, "MOST_RETENTION_WORK", work)
    search = Annealing(problem)
    search.offer_start(slow)
    search.offer_start(near)
    pairs = [_Pair(problem, Contraction(graph, problem.budget_bytes), seed) for seed in range(2)]
    with ThreadPoolExecutor(2) as pool:
        kinds = search._next_kinds(is_last=False)
        search._round(pool, pairs, kinds, problem.save_everything, 1.0, math.inf, NEVER)
    assert begun == [over] * 2


@pytest.mark.parametrize("walkers", [1, 2])
def test_in_a_large_graph_every_second_turn_begins_with_what_fits_however_slow_it_is(
    walkers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = uniform_chain(8)
    slow, near = rebuilt(graph, 7), rebuilt(graph, 4)
    monkeypatch.setattr(solver, "MOST_RETENTION_WORK", 0)
    search = Annealing(Problem(graph, sc.simulate(graph, slow).peak_bytes), walkers)
    search.offer_start(near)
    assert set(search._next_kinds(is_last=False)) == {Kind.FROM_START}
    search.offer_start(slow)
    kinds = [kind for _ in range(4) for kind in search._next_kinds(is_last=False)]
    assert kinds.count(Kind.FROM_START) == kinds.count(Kind.RUNS_FROM_BEST) == 2 * walkers
    assert search._next_begin(Kind.FROM_START, NEVER) == near
    assert search._next_begin(Kind.RUNS_FROM_BEST, NEVER) == slow


def test_while_what_fits_is_slow_turns_from_what_does_not_and_crossings_relieve_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each goes on for as long as it finds something better."""
    graph = uniform_chain(8)
    near, first, *faster = rebuilt(graph, 4), *(wasteful(rebuilt(graph, 7), graph, times) for times in (3, 2, 1, 0))
    problem = Problem(graph, sc.simulate(graph, first).peak_bytes)
    answers = [faster[0], None, faster[1], faster[2], None, None]

    def turn(*_: object) -> tuple[int, list[sc.Schedule]]:
        answer = answers.pop(0)
        return 1, [] if answer is None else [answer]

    for name in ("anneal_runs", "anneal_exceeding"):
        monkeypatch.setattr(_Pair, name, turn)
    monkeypatch.setattr(Crossings, "next", lambda *_: None)
    search = Annealing(problem, 1)
    search._random = Random(0)
    search.offer_start(first)
    search.offer_start(near)
    pair, kinds = _Pair(problem, Contraction(graph, problem.budget_bytes), 0), []
    with ThreadPoolExecutor(1) as pool:
        while answers:
            kinds += search._next_kinds(is_last=False)
            search._round(pool, [pair], kinds[-1:], problem.save_everything, 1.0, math.inf, NEVER)
    assert kinds == [*[Kind.FROM_START] * 2, *[Kind.CROSSED] * 3, Kind.FROM_START]


def test_in_a_large_graph_turns_begin_with_what_does_not_fit_as_long_as_that_leads_to_what_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = uniform_chain(8)
    best, slower = (wasteful(rebuilt(graph, 7), graph, times) for times in (0, 1))
    fruitless, fruitful = wasteful(rebuilt(graph, 4), graph, 20), wasteful(rebuilt(graph, 5), graph, 20)
    begun: list[tuple[int, ...]] = []

    def turn(pair: _Pair, runs: Sequence[int], *_: object) -> tuple[int, list[sc.Schedule]]:
        begun.append(tuple(runs))
        return 1, [slower] if begun[-1] == tuple(runs_of(graph, fruitful)) else []

    monkeypatch.setattr(_Pair, "anneal_runs", turn)
    monkeypatch.setattr(solver, "MOST_RETENTION_WORK", 0)
    problem = Problem(graph, sc.simulate(graph, best).peak_bytes)
    search = Annealing(problem, 1)
    for start in (best, fruitful, fruitless):
        search.offer_start(start)
    pair = _Pair(problem, Contraction(graph, problem.budget_bytes), 0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(4):
            search._round(pool, [pair], [Kind.FROM_START], problem.save_everything, 1.0, math.inf, NEVER)
    assert begun == [tuple(runs_of(graph, start)) for start in (fruitless, fruitful, fruitful, fruitful)]


def test_turns_from_the_start_begin_with_what_last_led_to_the_fastest_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is tried first: one leads to nothing, one to 2, 1 and 4 runs more, the initial one to 3."""
    graph = uniform_chain(8)
    best, *found = (wasteful(rebuilt(graph, 7), graph, times) for times in (0, 1, 2, 3, 4))
    initial, fruitless, fruitful = list(range(17)), *(wasteful(rebuilt(graph, k), graph, 20) for k in (4, 5))
    answers = {tuple(initial): [found[2]] * 3, tuple(runs_of(graph, fruitful)): [found[1], found[0], found[3]]}
    begun: list[list[int]] = []

    def turn(pair: _Pair, runs: Sequence[int], *_: object) -> tuple[int, list[sc.Schedule]]:
        begun.append(list(runs))
        return 1, [answers[tuple(runs)].pop(0)] if tuple(runs) in answers else []

    for name in ("anneal_runs", "anneal_exceeding"):
        monkeypatch.setattr(_Pair, name, turn)
    problem = Problem(graph, sc.simulate(graph, best).peak_bytes)
    search = Annealing(problem, 1)
    for start in (best, fruitful, fruitless):
        search.offer_start(start)
    assert not search._is_slow
    pair = _Pair(problem, Contraction(graph, problem.budget_bytes), 0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(6):
            search._round(pool, [pair], [Kind.FROM_START], problem.save_everything, 1.0, math.inf, NEVER)
    others = [list(runs_of(graph, start)) for start in (fruitless, fruitful)]
    assert begun == [*others, initial, others[1], others[1], initial]


@pytest.mark.parametrize(
    ("work", "farthest", "missing"),
    [(10**9, 0.0, set()), (0, 9.0, {Kind.DECISIONS}), (0, 0.0, {Kind.FROM_START})],
)
def test_in_a_large_graph_turns_are_over_decisions_only_if_no_start_is_near_the_budget(
    work: int, farthest: float, missing: set[Kind], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solver, "MOST_RETENTION_WORK", work)
    monkeypatch.setattr(solver, "FARTHEST", farthest)
    graph = uniform_chain(8)
    search = Annealing(Problem(graph, sc.simulate(graph, rebuilt(graph, 7)).peak_bytes))
    search.offer_start(rebuilt(graph, 7))
    assert {kind for _ in range(20) for kind in search._next_kinds(is_last=False)} == set(Kind) - missing


@pytest.mark.parametrize(("work", "hot"), [(10**9, list(RETENTION_HOT)), (0, [RETENTION_HOT[-1]] * 4)])
def test_in_a_large_graph_coolings_over_decisions_are_cold(
    work: int, hot: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = uniform_chain(8)
    problem = Problem(graph, sc.simulate(graph, rebuilt(graph, 7)).peak_bytes)
    monkeypatch.setattr(solver, "MOST_RETENTION_WORK", work)
    pair, cooled = _Pair(problem, Contraction(graph, problem.budget_bytes), 0), list[float]()
    cool = pair.over_decisions.cool
    monkeypatch.setattr(
        pair.over_decisions, "cool", lambda hot, *args, **kwargs: (cooled.append(hot), cool(hot, *args, **kwargs))
    )
    for _ in range(4):
        pair.anneal_decisions(runs_of(graph, rebuilt(graph, 7)), 100.0, 1.0, 1, NEVER)
    assert cooled == hot


def wasteful(schedule: sc.Schedule, graph: sc.Graph, times: int) -> sc.Schedule:
    """The schedule, but its first operation runs so many more times right before the last one, for nothing."""
    *runs, last = runs_of(graph, schedule)
    return schedule_from_runs(graph, [*runs, *[0] * times, last])


@pytest.mark.parametrize(("work", "kind", "starts"), [(10**9, Kind.DECISIONS, [4, 2]), (0, Kind.FROM_START, [4, 4])])
def test_where_nothing_fits_all_turns_in_a_large_graph_begin_with_what_nearly_does(
    work: int, kind: Kind, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = uniform_chain(8)
    problem = Problem(graph, sc.simulate(graph, rebuilt(graph, 6)).peak_bytes)
    monkeypatch.setattr(solver, "MOST_RETENTION_WORK", work)
    search = Annealing(problem)
    for layers in (2, 4):
        search.offer_start(rebuilt(graph, layers))
    rounds = [search._next_kinds(is_last=False) for _ in range(2)]
    assert rounds[1] == [kind] * 2
    begins = [search._next_begin(Kind.FROM_START, NEVER) for _ in starts]
    assert begins == [rebuilt(graph, layers) for layers in starts]


def test_the_first_round_is_not_longer_in_large_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = conv_net(4)
    problem = Problem(graph, parse_budget("60%", graph))
    pair = _Pair(problem, Contraction(graph, problem.budget_bytes), 0)
    runs = runs_of(graph, problem.save_everything)
    operations = len(graph.operations)
    monkeypatch.setattr(solver, "MOST_FIRST_MOVES", 2 * operations)
    monkeypatch.setattr(solver, "MOST_RETENTION_WORK", 3 * operations**2)
    assert pair.anneal_runs(runs, 0.5, 2.0, math.inf, NEVER)[0] == 4 * operations
    assert pair.anneal_decisions(runs, math.inf, 2.0, math.inf, NEVER)[0] == 6 * operations


def test_runs_that_do_not_fit_are_annealed_over_their_decisions_and_by_themselves() -> None:
    graph = conv_net(4)
    problem = Problem(graph, parse_budget("60%", graph))
    pair = _Pair(problem, Contraction(graph, problem.budget_bytes), 0)
    runs = runs_of(graph, problem.save_everything)
    moves, found = pair.anneal_exceeding(runs, 1.0, math.inf, NEVER)
    assert len(found) == 2
    assert all(sc.simulate(graph, schedule).peak_bytes <= problem.budget_bytes for schedule in found)
    assert min(pair.over_decisions.moves, pair.over_runs.moves) > 0
    assert pair.over_decisions.moves + pair.over_runs.moves == moves


@pytest.mark.parametrize(("budget", "do_decisions_fit"), [("60%", True), ("1%", False)])
def test_runs_are_annealed_from_where_their_decisions_ended(
    budget: str, do_decisions_fit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = conv_net(4)
    problem = Problem(graph, parse_budget(budget, graph))
    pair = _Pair(problem, Contraction(graph, problem.budget_bytes), 0)
    begins: list[list[int]] = []
    load = pair.over_runs.load
    monkeypatch.setattr(pair.over_runs, "load", lambda runs, hot: (begins.append(list(runs)), load(runs, hot)))
    _, found = pair.anneal_exceeding(runs_of(graph, problem.save_everything), 1.0, math.inf, NEVER)
    assert math.isfinite(pair.over_decisions.best_time) == do_decisions_fit
    end = found[0] if do_decisions_fit else pair.over_decisions.last()
    assert begins == [list(runs_of(graph, end))] != [list(runs_of(graph, problem.save_everything))]


def test_runs_whose_decisions_could_not_be_annealed_in_time_are_left_alone() -> None:
    graph = conv_net(4)
    problem = Problem(graph, parse_budget("60%", graph))
    pair, stopped = _Pair(problem, Contraction(graph, problem.budget_bytes), 0), Deadline(1e6)
    stopped.stop()
    assert pair.anneal_exceeding(runs_of(graph, problem.save_everything), 1.0, math.inf, stopped) == (0, [])


def test_the_moves_of_both_are_limited_together() -> None:
    graph = conv_net(4)
    problem = Problem(graph, parse_budget("60%", graph))
    pair = _Pair(problem, Contraction(graph, problem.budget_bytes), 0)
    moves, _ = pair.anneal_exceeding(runs_of(graph, problem.save_everything), 1.0, 500, NEVER)
    assert (moves, pair.over_decisions.moves, pair.over_runs.moves) == (500, 500, 0)
