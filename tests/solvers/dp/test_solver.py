"""The exact dynamic program against exhaustive searches, hand counts and the simulator."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.graph.layers import Mode
from scheduler.problem import Problem
from scheduler.schedule import follows_input_order
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp import pruned_search
from scheduler.solvers.dp.costs import chain_costs, chain_states
from scheduler.solvers.dp.dynamic_program import whole_frontier
from scheduler.solvers.dp.one_cut_bound import one_cut_bound
from scheduler.solvers.dp.pruned_search import PrunedSearch
from scheduler.solvers.dp.solver import chain_frontier, least_persistent_peak, propose
from scheduler.solvers.dp.two_passes import TwoPasses
from tests.support.deadlines import CountedDeadline
from tests.support.examples import examples
from tests.support.grid_reference import grid_time
from tests.support.oracle import best_schedule, least_peak, optimum
from tests.support.persistent_oracle import PersistentSearch
from tests.support.strategies import chains
from tests.support.training_graphs import three_layers, uniform_chain


def random_chain(seed: int, length: int, *, distinct: int | None = None, modes: int = 0) -> sc.Chain:
    """A chain with sizes of up to a million bytes and times that no power of two divides."""
    draw = random.Random(seed)
    size, time = (lambda: draw.randint(0, 10**6)), (lambda: draw.uniform(0.0, 10.0))
    kinds = [
        {
            "forward_time": time(),
            "backward_time": time(),
            "output_bytes": size(),
            "saved_bytes": 3 * size(),
            "parameter_gradient_bytes": draw.choice([0, size() // 10]),
            "keeps_output": draw.random() < 0.3,
            "forward_with_saving_workspace_bytes": draw.choice([0, size()]),
            "backward_workspace_bytes": draw.choice([0, size()]),
            "modes": [Mode(time(), time(), size()) for _ in range(modes)],
        }
        for _ in range(distinct or length)
    ]
    return sc.Chain([sc.Layer(f"l{i}", **kinds[i % len(kinds)]) for i in range(length)], size())


def fastest_schedule(chain: sc.Chain, budget: int) -> sc.Schedule | None:
    """The schedule of the frontier's last entry within a budget; None if there is none."""
    program = whole_frontier(chain)
    free = budget - chain.graph.resident_bytes
    return None if program.time(free) is None else program.schedule(free)


def pruned_time(chain: sc.Chain, budget: int) -> float:
    """The time of the pruned search's schedule, simulated, which its bound must meet; inf without one."""
    search = PrunedSearch(chain, budget - chain.graph.resident_bytes, Deadline(60.0))
    schedule = search.run()
    assert search.unfinished == ""
    if schedule is None:
        assert search.bound == math.inf
        return math.inf
    simulated = sc.simulate(chain.graph, schedule)
    assert simulated.peak_bytes <= budget
    assert search.bound == pytest.approx(simulated.time, rel=1e-9)
    return simulated.time


@pytest.mark.parametrize(("budget", "time"), [(11, 12.0), (12, 11.0), (13, 11.0), (14, 10.0), (15, 9.0), (16, 9.0)])
def test_the_worked_case_takes_the_times_counted_by_hand(budget: int, time: float) -> None:
    solution = sc.solve(three_layers(), budget, solver="dp")
    assert (solution.time, solution.bound, solution.status) == (time, time, sc.Status.OPTIMAL)
    assert solution.peak_bytes <= budget


def test_below_the_worked_case_s_floor_the_layer_that_needs_most_is_named() -> None:
    solution = sc.solve(three_layers(), 10, solver="dp")
    assert solution.status is sc.Status.INFEASIBLE
    assert '"l2.backward" alone needs 11 B' in solution.messages[0]


@settings(max_examples=examples(200))
@given(chain=chains(max_layers=4))
def test_unpruned_program_pruned_one_and_exhaustive_search_agree(chain: sc.Chain) -> None:
    frontier = chain_frontier(chain)
    assert frontier == PersistentSearch(chain).frontier()
    for peak, time in frontier:
        schedule = fastest_schedule(chain, peak)
        simulated = sc.simulate(chain.graph, schedule)
        assert (simulated.peak_bytes, simulated.time) == (peak, time)
        assert follows_input_order(chain.graph, schedule)
        assert pruned_time(chain, peak) == time
    least = frontier[0][0]
    assert least_persistent_peak(chain, CountedDeadline(100)) == least
    assert fastest_schedule(chain, least - 1) is None
    assert pruned_time(chain, least - 1) == math.inf


@pytest.mark.parametrize(
    "chain",
    [
        *(random_chain(seed, 24) for seed in range(4)),
        random_chain(4, 40, distinct=3),
        random_chain(5, 40, distinct=1),
        random_chain(6, 12, modes=2),
        random_chain(7, 72),  # so many states of one length that threads share them
    ],
    ids=["24", "24", "24", "24", "40 of three kinds", "40 equal", "12 with modes", "72"],
)
def test_the_pruned_search_loses_nothing_where_the_grid_is_coarser_than_the_sizes(chain: sc.Chain) -> None:
    frontier = chain_frontier(chain)
    for peak, time in frontier[:: max(1, len(frontier) // 6)]:
        assert pruned_time(chain, peak) == pytest.approx(time, rel=1e-9)
    assert pruned_time(chain, frontier[0][0] - 1) == math.inf


@settings(max_examples=examples(50))
@given(chain=chains(max_layers=2, max_modes=0), data=st.data())
def test_no_schedule_at_all_is_faster_than_the_bound_or_slower_than_the_persistent_optimum(
    chain: sc.Chain, data: st.DataObject
) -> None:
    frontier = chain_frontier(chain)
    plain = chain.graph.to_dict()
    least = least_peak(plain)
    assert least <= frontier[0][0]
    budget = data.draw(st.integers(max(0, least - 1), frontier[-1][0]))
    best = optimum(plain, budget)
    bound = one_cut_bound(chain_costs(chain), budget)
    assert bound <= (math.inf if best is None else best)
    if budget >= frontier[0][0]:
        assert best is not None
        assert best <= next(time for peak, time in reversed(frontier) if peak <= budget)


@settings(max_examples=examples(50))
@given(chain=chains(min_layers=4, max_layers=8))
def test_the_bound_over_all_schedules_never_exceeds_the_time_of_one(chain: sc.Chain) -> None:
    for peak, time in chain_frontier(chain):
        assert one_cut_bound(chain_costs(chain), peak) <= time


def test_where_backwards_run_twice_the_persistent_optimum_is_not_the_best_schedule() -> None:
    # The smallest case that random search over three layers found. Two persistent schedules
    # are useful: save everything (8 bytes), or run l0 twice (7 bytes). Seven bytes are enough
    # for the time of the first if l2's parameter gradient is freed before l1's backward, and
    # l2 is recomputed, which takes no time.
    layers = [
        sc.Layer("l0", 1.0, 1.0, 2, 1),
        sc.Layer("l1", 0.0, 1.0, 1, 0, parameter_gradient_bytes=1),
        sc.Layer("l2", 0.0, 0.0, 0, 0, parameter_gradient_bytes=1),
    ]
    chain = sc.Chain(layers, input_bytes=0)
    solution = sc.solve(chain, 7, solver="dp")
    assert (solution.status, solution.search_space, solution.time) == (sc.Status.OPTIMAL, "persistent", 4.0)
    best = best_schedule(chain.graph.to_dict(), 7)
    assert best is not None
    time, actions = best
    assert time == 3.0
    assert actions.count(("compute", "l2.backward")) == 2
    assert solution.global_bound <= 3.0
    assert solution.global_gap == (4.0 - solution.global_bound) / 4.0


def test_a_persistent_optimum_that_meets_the_bound_is_optimal_in_any_order() -> None:
    solution = sc.solve(three_layers(), 14, solver="dp")
    assert (solution.search_space, solution.global_bound, solution.time) == ("any order", 10.0, 10.0)


def test_where_only_other_schedules_fit_the_answer_is_unknown_and_says_why() -> None:
    # One byte: l1's parameter gradient leaves no space for what l0 saves, unless it is freed and
    # l1 runs backward again.
    layers = [sc.Layer("l0", 0.0, 1.0, 0, 1), sc.Layer("l1", 0.0, 0.0, 0, 0, parameter_gradient_bytes=1)]
    chain = sc.Chain(layers, input_bytes=0)
    assert optimum(chain.graph.to_dict(), 1) == 1.0
    solution = sc.solve(chain, 1, solver="dp")
    assert solution.status is sc.Status.UNKNOWN
    assert "no persistent schedule fits; the smallest peak of one is 2 bytes" in solution.messages[-1]


@settings(max_examples=examples(50))
@given(seed=st.integers(0, 10**6), length=st.integers(1, 12), slots=st.integers(20, 500))
def test_the_grid_program_is_never_better(seed: int, length: int, slots: int) -> None:
    chain = random_chain(seed, length)
    for peak, time in chain_frontier(chain):
        assert grid_time(chain, peak, slots) >= time * (1 - 1e-6)


def test_the_grid_program_meets_the_exact_one_where_slots_are_bytes() -> None:
    for peak, time in chain_frontier(three_layers()):
        assert grid_time(three_layers(), peak) == time


def test_a_faster_mode_is_taken_where_it_fits_and_the_smaller_one_where_not() -> None:
    # One layer, everything else free of bytes: 4 bytes saved take 1 + 1, 2 bytes take 1 + 3.
    chain = sc.Chain([sc.Layer("a", 1.0, 1.0, 0, 4, modes=[Mode(1.0, 3.0, 2)])], input_bytes=0)
    assert chain_frontier(chain) == [(2, 4.0), (4, 2.0)]


@pytest.mark.parametrize(("slots", "advances"), [(1, 45), (2, 20), (3, 15), (4, 14)])
def test_a_uniform_chain_recomputes_as_the_closed_form_of_revolve_says(slots: int, advances: int) -> None:
    # Ten steps: r n - C(c + r, r - 1) advances for the least r with C(c + r, r) >= n, and each
    # step's own run. Saved state is large, so that that of only one layer fits, and
    # a forward run without saving takes as much. A run off a slot has its input and output
    # in addition to the slots; the first slot is the resident input.
    assert advances == revolve_advances(10, slots)
    saved = 20
    layer = {"gradient_bytes": 0, "forward_without_saving_workspace_bytes": saved}
    chain = sc.Chain([sc.Layer(f"l{i}", 1.0, 0.0, 1, saved, **layer) for i in range(10)], input_bytes=1)
    schedule = fastest_schedule(chain, slots + 2 + saved)
    assert schedule is not None
    assert sc.simulate(chain.graph, schedule).time == advances + 10


def revolve_advances(steps: int, slots: int) -> int:
    """The optimal number of advances (Griewank and Walther 2000)."""
    repeats = next(r for r in range(steps) if math.comb(slots + r, r) >= steps)
    return repeats * steps - math.comb(slots + repeats, repeats - 1)


def test_times_that_are_not_multiples_of_each_other_are_exact_enough_to_be_called_optimal() -> None:
    chain = random_chain(7, 12)
    solution = sc.solve(chain, "50%", solver="dp")
    assert solution.status is sc.Status.OPTIMAL
    assert solution.time > solution.baseline_time
    assert solution.gap <= 1e-9


def test_repeated_layers_share_their_states() -> None:
    # Embedding, 49 times attention and MLP, head. Of each length there are at most four
    # distinct states: two inside (beginning with either), one that begins with the embedding
    # and one that ends with the head; of the full length there is one.
    attention, mlp = sc.Layer("a", 2.0, 4.0, 8, 40), sc.Layer("m", 3.0, 6.0, 8, 64)
    pairs = [(attention, mlp)[i % 2] for i in range(98)]
    layers = [sc.Layer("e", 1.0, 2.0, 8, 1), *pairs, sc.Layer("h", 5.0, 9.0, 1, 30)]
    named = [
        sc.Layer(f"{i}", x.forward_time, x.backward_time, x.output_bytes, x.saved_bytes) for i, x in enumerate(layers)
    ]
    states = chain_states(chain_costs(sc.Chain(named, input_bytes=4)))
    inside = 2 * 97 + 1  # lengths 1 to 97 in two kinds, length 98 in one
    assert len(states.first) == inside + 99 + 99 + 1


def test_a_graph_that_is_not_a_chain_is_rejected() -> None:
    with pytest.raises(UnsuitableProblemError, match="chains of layers"):
        sc.solve(uniform_chain(3), 20, solver="dp")


@pytest.mark.parametrize("share", [0.0, 0.6, 0.9])
def test_out_of_time_the_best_schedule_so_far_comes_with_a_bound_below_it(share: float) -> None:
    chain = random_chain(8, 120)
    budget = chain_budget(chain, 0.4)
    problem = Problem(chain.graph, budget, chain=chain)
    unlimited = CountedDeadline(10**9)
    best = propose(problem, deadline=unlimited, seed=0)
    assert best.schedule is not None
    time = sc.simulate(chain.graph, best.schedule).time
    looks = int(share * (10**9 - unlimited.looks))
    proposal = propose(problem, deadline=CountedDeadline(looks), seed=0)
    assert len(proposal.messages) == 1
    assert proposal.messages[0].startswith("out of time before the exact program")
    assert proposal.bound <= time
    assert proposal.schedule is not None or share == 0.0
    if proposal.schedule is not None:
        simulated = sc.simulate(chain.graph, proposal.schedule)
        assert simulated.peak_bytes <= budget
        assert simulated.time >= time * (1 - 1e-9)


def test_no_states_are_pruned_once_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = random_chain(8, 120)
    deadline = Deadline(1e6)
    pushed: list[int] = []

    def push_and_stop(*arguments: object) -> None:
        pushed.append(1)
        deadline.stop()

    monkeypatch.setattr(pruned_search, "push_around", push_and_stop)
    search = PrunedSearch(chain, chain_budget(chain, 0.4) - chain.graph.resident_bytes, deadline)
    assert len(list(search._states.chunks())) > 1
    assert search.run() is not None
    assert search.unfinished.startswith("out of time")
    assert len(pushed) == 1


def test_out_of_time_segments_on_several_levels_answer_where_two_passes_do_not_fit() -> None:
    chain = random_chain(8, 120)
    budget = chain_budget(chain, 0.06)
    problem = Problem(chain.graph, budget, chain=chain)
    passes = TwoPasses(chain, chain_costs(chain), budget)
    passes.run(CountedDeadline(10))
    assert passes.best is None
    proposal = propose(problem, deadline=CountedDeadline(60), seed=0)
    assert proposal.messages[0].startswith("out of time before the exact program")
    assert proposal.schedule is not None
    simulated = sc.simulate(chain.graph, proposal.schedule)
    assert simulated.peak_bytes <= budget
    assert proposal.bound <= simulated.time


def test_an_answer_for_a_long_chain_names_the_smallest_peak_of_all_persistent_schedules() -> None:
    chain = random_chain(9, 120)
    least = sc.solve(chain, "50%", solver="dp").smallest_peak_bytes
    assert least is not None
    fitting, failing = (sc.solve(chain, budget, solver="dp", time_limit=60) for budget in (least, least - 1))
    assert fitting.peak_bytes == least
    assert failing.schedule is None
    assert f"the smallest peak of one is {least} bytes" in " ".join(failing.messages)


def chain_budget(chain: sc.Chain, share: float) -> int:
    """That share of what the save-everything step adds to the resident bytes."""
    peak = Problem(chain.graph, 0).baseline.peak_bytes
    return chain.graph.resident_bytes + int(share * (peak - chain.graph.resident_bytes))
