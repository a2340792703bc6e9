"""Check the default solver: it returns the best answer of its parts, and ends at the first proof."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers import auto
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.solver import EXACT_LAYERS
from scheduler.solvers.eviction_walk import EvictionWalks
from scheduler.solvers.ilp.solver import ProgramSearch
from scheduler.solvers.late_order import late_order
from scheduler.solvers.smallest_peak import Smallest, Squeezed, smallest_peak
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import branches, conv_net, uniform_chain


def test_another_order_is_found_where_it_saves_recomputation() -> None:
    graph = branches(6)
    # One branch after another: 5 small results, the last large tensor and its result.
    solution = sc.solve(graph, 106, time_limit=20)
    assert (solution.time, solution.search_space, solution.status) == (12.0, "any order", sc.Status.OPTIMAL)
    given = sc.solve(graph, 106, reorder=False, time_limit=20)
    # All large tensors come first, each dropped for the next: all six are recomputed.
    assert given.time == 18.0


def keep_the_given_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the late order off: in it, `branches` need no recomputation."""
    monkeypatch.setattr(auto, "in_late_order", lambda problem: problem)


def test_the_walk_within_the_budget_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_given_order(monkeypatch)
    budgets: list[int] = []
    fitting = EvictionWalks.fitting

    def counted(walks: EvictionWalks, budget_bytes: int, deadline: Deadline, *, any_fits: bool) -> sc.Schedule | None:
        budgets.append(budget_bytes)
        assert not any_fits  # no other solver runs beside it
        return fitting(walks, budget_bytes, deadline)

    monkeypatch.setattr(EvictionWalks, "fitting", counted)
    with FakeClock(seconds_per_look=0.01):
        solution = sc.solve(branches(6), 106, time_limit=5)
    assert any(message.startswith("annealing moves") for message in solution.messages)
    assert budgets == [106]


def slices_for_a_sum() -> sc.Graph:
    """Steps and sums of their slices, which cannot run again, and a tensor that can be recomputed."""
    operations, tensors = [sc.Operation("x", [], ["x"], 1.0)], [sc.Tensor("x", 100), sc.Tensor("state0", 1)]
    for i in range(10):
        tensors += [sc.Tensor(f"slice{i}", 10), sc.Tensor(f"state{i + 1}", 1), sc.Tensor(f"sum{i + 1}", 100)]
        operations += [
            sc.Operation(f"step{i}", [f"state{i}"], [f"state{i + 1}", f"slice{i}"], 1.0, repeatable=False),
            sc.Operation(f"add{i}", [f"slice{i}", *([f"sum{i}"] if i else [])], [f"sum{i + 1}"], 1.0, repeatable=False),
        ]
    operations.append(sc.Operation("end", ["x", "sum10"], ["y"], 1.0))
    return sc.Graph(operations, [*tensors, sc.Tensor("y", 1)], resident=["state0"], results=["state10", "y"])


def test_walks_are_made_in_the_given_order_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices and two sums take 292 bytes in the late order, without "x", and 212 in the given one."""
    graph = slices_for_a_sum()
    assert late_order(graph) is not graph
    assert EvictionWalks(late_order(graph)).fitting(250, Deadline(math.inf)) is None

    def nothing(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        return Proposal(None, "input order")

    monkeypatch.setattr(auto, "load_solver", lambda name: nothing)
    monkeypatch.setattr(auto, "smallest_peak", lambda *arguments: pytest.fail("the walk has found a schedule"))
    solution = sc.solve(graph, 250, time_limit=5)
    assert solution.time <= 23.0  # "x" runs twice, or late


def test_walks_through_the_late_order_may_keep_what_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = slices_for_a_sum()
    made: set[tuple[bool, bool]] = set()
    init = EvictionWalks.__init__

    def recorded(walks: EvictionWalks, walked: sc.Graph, *, keeps_smaller: bool = False) -> None:
        made.add((walked.operations == graph.operations, keeps_smaller))
        init(walks, walked, keeps_smaller=keeps_smaller)

    def nothing(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        return Proposal(None, "input order")

    monkeypatch.setattr(EvictionWalks, "__init__", recorded)
    monkeypatch.setattr(auto, "load_solver", lambda name: nothing)
    monkeypatch.setattr(auto.anneal, "search", nothing)
    expected = {(False, False), (False, True), (True, False)}
    smallest_peak(Problem(graph, 0), Deadline(5))
    assert made == expected
    made.clear()
    sc.solve(graph, 250, time_limit=5)
    assert made == expected


@pytest.mark.parametrize(("gap", "asked"), [(0.04, False), (0.06, True)])
def test_quick_solvers_do_not_run_where_a_deep_network_has_a_good_answer(
    monkeypatch: pytest.MonkeyPatch, gap: float, asked: bool
) -> None:
    graph = conv_net(5)
    known = sc.solve(graph, "45%", solver="ilp", time_limit=20)
    names: list[str] = []

    def stub(name: str) -> auto.Propose:
        def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
            names.append(name)
            schedule = known.schedule if name == "hierarchical" else None
            return Proposal(schedule, "input order", (1 - gap) * known.time)

        return propose

    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, hierarchical_first_operations=1))
    monkeypatch.setattr(auto, "load_solver", stub)
    sc.solve(graph, "45%", time_limit=2)
    assert names[0] == "hierarchical"
    assert ("greedy" in names) == asked


def test_quick_solvers_of_a_deep_network_run_two_at_a_time_and_for_a_limited_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both, limits = threading.Barrier(2), []

    def stub(name: str) -> auto.Propose:
        def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
            if name in ("greedy", "segments"):
                limits.append(deadline.remaining)
                both.wait(timeout=20)  # fails unless the other one runs as well
            return Proposal(None, "input order")

        return propose

    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, hierarchical_first_operations=1))
    monkeypatch.setattr(auto, "load_solver", stub)
    sc.solve(conv_net(5), "45%", time_limit=2)
    assert len(limits) == 2
    assert max(limits) <= auto.SETTINGS.quick_share * 2


def test_annealing_of_a_deep_network_starts_from_what_hierarchical_found_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = conv_net(5)
    larger = sc.solve(graph, "60%", solver="ilp", time_limit=20).schedule
    assert larger is not None
    starts: list[sc.Schedule] = []

    def stub(name: str) -> auto.Propose:
        exceeding = (larger,) if name == "hierarchical" else ()
        return lambda problem, *, deadline, seed: Proposal(None, "input order", exceeding=exceeding)

    def search(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        starts.extend(problem.starts)
        deadline.stop()
        return Proposal(None, "any order")

    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, hierarchical_first_operations=1))
    monkeypatch.setattr(auto, "load_solver", stub)
    monkeypatch.setattr(auto.ilp, "propose", stub("ilp"))
    monkeypatch.setattr(auto.anneal, "search", search)
    monkeypatch.setattr(EvictionWalks, "fitting", lambda *_, any_fits: None)
    sc.solve(graph, "45%", time_limit=2)
    assert larger in starts


@pytest.mark.parametrize("is_near", [False, True])
def test_walks_and_programs_run_beside_hierarchical_once_it_says_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, *, is_near: bool
) -> None:
    graph = conv_net(5)
    larger = sc.solve(graph, "60%", solver="ilp", time_limit=20).schedule
    assert larger is not None
    began: list[str] = []
    proves = threading.Event()

    def stub(name: str) -> auto.Propose:
        def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
            if name == "hierarchical":
                deadline.report(Proposal(None, "input order", exceeding=(larger,)))
                assert proves.wait(timeout=20)
            return Proposal(None, "input order")

        return propose

    def look(problem: Problem, deadline: Deadline) -> Smallest:
        began.append("smallest peak")
        return Smallest(0, larger, larger)

    def relax(policy: auto._Policy, problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        began.append("relaxation")
        return Proposal(None, "input order")

    def prove(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        began.append("ilp")
        proves.set()
        return Proposal(None, "input order")

    nearly_fits = math.inf if is_near else 0.0
    monkeypatch.setattr(
        auto, "SETTINGS", replace(auto.SETTINGS, hierarchical_first_operations=1, nearly_fits=nearly_fits)
    )
    monkeypatch.setattr(auto, "load_solver", stub)
    monkeypatch.setattr(auto._Policy, "_relax", relax)
    monkeypatch.setattr(auto.ilp, "propose", prove)
    monkeypatch.setattr(EvictionWalks, "fitting", lambda *_, any_fits: began.append("walk"))
    monkeypatch.setattr(auto, "smallest_peak", look)
    sc.solve(graph, "45%", time_limit=2)
    assert proves.is_set()
    assert began[: 1 + is_near] == ["relaxation", "walk"][not is_near :]
    assert began.count("relaxation") == is_near
    assert began[-2:] == ["smallest peak", "ilp"]
    assert began.count("ilp") == began.count("smallest peak") == 1


def test_a_walk_beside_hierarchical_stops_once_a_schedule_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = conv_net(5)
    larger, smaller = (sc.solve(graph, budget, solver="ilp", time_limit=20).schedule for budget in ("60%", "45%"))
    assert larger is not None
    walks, stopped = threading.Event(), threading.Event()

    def stub(name: str) -> auto.Propose:
        def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
            if name == "hierarchical":
                deadline.report(Proposal(None, "input order", exceeding=(larger,)))
                assert walks.wait(timeout=20)
                deadline.report(Proposal(smaller, "input order"))
                assert stopped.wait(timeout=20)
            return Proposal(None, "input order")

        return propose

    def walk(walks_: EvictionWalks, budget_bytes: int, deadline: Deadline, *, any_fits: bool) -> None:
        assert any_fits
        walks.set()
        while not (deadline.stopped or stopped.is_set()):
            time.sleep(0.001)
        stopped.set()

    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, hierarchical_first_operations=1))
    monkeypatch.setattr(auto, "load_solver", stub)
    monkeypatch.setattr(EvictionWalks, "fitting", walk)
    answer = sc.solve(graph, "45%", time_limit=30)
    assert stopped.is_set()
    assert answer.schedule is not None


def replace_searches(
    monkeypatch: pytest.MonkeyPatch,
    load_solver: Callable[[str], auto.Propose],
    prove: auto.Propose,
    search: auto.Propose,
    walk: Callable[..., sc.Schedule | None] = lambda *_, any_fits: None,
) -> None:
    """Replace the solvers that `auto` loads, integer programs, annealing, and walks, of which by default none fits."""
    monkeypatch.setattr(auto, "load_solver", load_solver)
    monkeypatch.setattr(auto._Policy, "_bound_first", lambda policy: None)
    monkeypatch.setattr(auto.ilp, "propose", prove)
    monkeypatch.setattr(auto.anneal, "search", search)
    monkeypatch.setattr(EvictionWalks, "fitting", walk)


def test_where_nothing_fits_annealing_starts_from_the_smallest_peak_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = conv_net(5)
    larger = sc.solve(graph, "60%", solver="ilp", time_limit=20).schedule
    assert larger is not None
    begun: list[tuple[sc.Schedule, ...]] = []
    anneals = threading.Event()

    def stub(name: str) -> auto.Propose:
        return lambda problem, *, deadline, seed: Proposal(None, "input order")

    def prove(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        assert anneals.wait(timeout=20)
        return Proposal(None, "input order")

    def search(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        begun.append(problem.starts)
        anneals.set()
        deadline.stop()
        return Proposal(None, "any order")

    replace_searches(monkeypatch, stub, prove, search)
    monkeypatch.setattr(auto, "smallest_peak", lambda problem, deadline: Smallest(0, larger, larger))
    sc.solve(graph, "45%", time_limit=1)
    assert begun[0].count(larger) == 1


def test_integer_programs_go_on_from_their_first_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = conv_net(5)
    larger = sc.solve(graph, "60%", solver="ilp", time_limit=20).schedule
    assert larger is not None
    began, ran, runs = list[ProgramSearch](), list[ProgramSearch](), threading.Event()

    def stub(name: str) -> auto.Propose:
        exceeding = (larger,) if name == "hierarchical" else ()
        return lambda problem, *, deadline, seed: Proposal(None, "input order", exceeding=exceeding)

    def relax(search: ProgramSearch, deadline: Deadline) -> Proposal:
        began.append(search)
        return Proposal(None, "any order")

    def run(search: ProgramSearch, deadline: Deadline, known: float = math.inf) -> Proposal:
        ran.append(search)
        runs.set()
        return Proposal(None, "any order")

    def give_up(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        assert runs.wait(timeout=20)
        deadline.stop()
        return Proposal(None, "any order")

    settings = replace(auto.SETTINGS, hierarchical_first_operations=1, nearly_fits=math.inf)
    monkeypatch.setattr(auto, "SETTINGS", settings)
    monkeypatch.setattr(auto, "load_solver", stub)
    monkeypatch.setattr(auto.anneal, "search", give_up)
    monkeypatch.setattr(ProgramSearch, "relax", relax)
    monkeypatch.setattr(ProgramSearch, "run", run)
    sc.solve(graph, "45%", time_limit=2)
    assert len(began) == 1
    assert ran[0] is began[0]


@pytest.mark.parametrize("finder", ["annealing", "walk", "smallest peak"])
def test_annealing_begins_anew_once_another_search_has_found_what_fits(
    monkeypatch: pytest.MonkeyPatch, finder: str
) -> None:
    graph = conv_net(5)
    larger, smaller = (sc.solve(graph, budget, solver="ilp", time_limit=20).schedule for budget in ("60%", "45%"))
    assert larger is not None
    assert smaller is not None
    anneals, has_walked = threading.Event(), threading.Event()
    begun: list[tuple[sc.Schedule, ...]] = []

    def stub(name: str) -> auto.Propose:
        exceeding = (larger,) if name == "hierarchical" else ()
        return lambda problem, *, deadline, seed: Proposal(None, "input order", exceeding=exceeding)

    def walk(walks_: EvictionWalks, budget_bytes: int, deadline: Deadline, *, any_fits: bool) -> sc.Schedule | None:
        assert anneals.wait(timeout=20)
        return smaller if finder == "walk" else None

    def look(problem: Problem, deadline: Deadline) -> Smallest:
        known = smaller if finder == "smallest peak" else larger
        return Smallest(0, known, known)

    def prove(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        has_walked.set()
        return Proposal(None, "input order")

    def search(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        begun.append(problem.starts)
        anneals.set()
        if len(begun) > 1:
            return Proposal(None, "any order")
        if finder == "annealing":
            deadline.report(Proposal(smaller, "any order"))
        assert has_walked.wait(timeout=20)
        assert deadline.stopped == (finder != "annealing")
        deadline.stop()
        return Proposal(None, "any order")

    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, hierarchical_first_operations=1))
    replace_searches(monkeypatch, stub, prove, search, walk)
    monkeypatch.setattr(auto, "smallest_peak", look)
    sc.solve(graph, "45%", time_limit=4)
    assert smaller not in begun[0]
    assert smaller in begun[1]


@pytest.mark.parametrize("is_silent", [False, True])
def test_annealing_gets_both_cores_where_programs_have_run_beside_hierarchical(
    monkeypatch: pytest.MonkeyPatch, *, is_silent: bool
) -> None:
    graph = conv_net(5)
    larger = sc.solve(graph, "60%", solver="ilp", time_limit=20).schedule
    assert larger is not None
    walkers: list[object] = []
    anneals = threading.Event()

    def stub(name: str) -> auto.Propose:
        def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
            if name == "hierarchical" and not is_silent:
                deadline.report(Proposal(None, "input order", exceeding=(larger,)))
            return Proposal(None, "input order")

        return propose

    def prove(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        assert anneals.wait(timeout=20)
        return Proposal(None, "input order")

    def search(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        walkers.append(options["walkers"])
        anneals.set()
        deadline.stop()
        return Proposal(None, "any order")

    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, hierarchical_first_operations=1))
    replace_searches(monkeypatch, stub, prove, search)
    sc.solve(graph, "45%", time_limit=2)
    assert walkers[0] == (1 if is_silent else 2)


def test_integer_programs_do_not_delay_the_answer_for_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> Proposal:
        raise AssertionError("an integer program was solved")

    monkeypatch.setattr("scheduler.solvers.ilp.solver.ProgramSearch", fail)
    chain = sc.zoo.heterogeneous_chain(30)
    solution = sc.solve(chain, "60%", gap=0.005)
    assert (solution.status, solution.time) == (sc.Status.OPTIMAL, sc.solve(chain, "60%", solver="dp").time)


def test_a_chain_s_answer_is_final_where_no_schedule_can_be_noticeably_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **options: object) -> Proposal:
        raise AssertionError("an integer program was solved")

    monkeypatch.setattr("scheduler.solvers.ilp.solver.propose", fail)
    solution = sc.solve(sc.zoo.heterogeneous_chain(EXACT_LAYERS + 1), "50%")
    assert solution.status is sc.Status.FEASIBLE
    assert 0 < solution.global_gap <= auto.SETTINGS.other_orders_least_gain


def test_a_schedule_is_found_where_the_smallest_budget_has_one() -> None:
    # The loss needs 6 bytes with its input and workspace; so do x2 and g2: loss and x1 are dropped and recomputed.
    operations = [
        sc.Operation("f0", ["x0"], ["x1"], 0.0),
        sc.Operation("f1", ["x1"], ["x2"], 2.0),
        sc.Operation("loss", ["x2"], ["loss"], 0.0, workspace_bytes=3),
        sc.Operation("loss_backward", ["x2"], ["g2"], 0.0, phase="backward"),
        sc.Operation("b1", ["g2", "x1"], ["g1"], 0.0, phase="backward"),
        sc.Operation("b0", ["g1", "x1"], ["dw0"], 1.0, phase="backward"),
    ]
    sizes = {"x0": 0, "x1": 2, "x2": 2, "loss": 1, "g2": 4, "g1": 0, "dw0": 1}
    tensors = [sc.Tensor(name, size) for name, size in sizes.items()]
    graph = sc.Graph(operations, tensors, resident=["x0"], results=["loss", "dw0"])
    peak = sc.minimum_budget(graph).peak_bytes
    assert sc.solve(graph, peak).peak_bytes == peak == 6


def test_where_nothing_fits_the_smallest_peak_is_searched_for_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining: list[float] = []

    def spend(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        while not deadline.passed:
            pass
        return Proposal(None, "any order")

    def squeezed(problem: Problem, deadline: Deadline, *, known: Smallest) -> Squeezed:
        remaining.append(deadline.remaining)
        return Squeezed(0, known.schedule, problem.floor)

    monkeypatch.setattr(auto.ilp, "propose", spend)
    monkeypatch.setattr(auto.anneal, "search", spend)
    monkeypatch.setattr(auto, "squeeze", squeezed)
    monkeypatch.setattr(auto, "floor_of_live_sets", lambda *_, enough_bytes: None)
    with FakeClock(seconds_per_look=0.01):
        assert sc.solve(conv_net(5), "1%", time_limit=8.0).schedule is None
    assert remaining[0] > 0.4


def test_annealing_starts_again_where_it_gives_up_far_from_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def give_up(problem: Problem, *, deadline: Deadline, seed: int, **options: object) -> Proposal:
        seeds.append(seed)
        return Proposal(None, "any order")

    def prove_nothing(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        while not deadline.passed:
            pass
        return Proposal(None, "any order")

    monkeypatch.setattr(auto.anneal, "search", give_up)
    monkeypatch.setattr(auto.ilp, "propose", prove_nothing)
    with FakeClock(seconds_per_look=0.01):
        sc.solve(conv_net(5), "60%", time_limit=8.0)
    assert len(seeds) > 2  # once beside the proof, and once after it
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("is_small", "proven", "goes_on"),
    [(False, 0.5, True), (False, 0.99, False), (True, 0.99, True), (True, 0.999, False)],
)
def test_integer_programs_go_on_where_the_gap_is_large_and_in_a_small_graph_neighborhoods_follow_annealing(
    monkeypatch: pytest.MonkeyPatch, is_small: bool, proven: float, goes_on: bool
) -> None:
    graph, limit = conv_net(5), 20.0
    known = sc.solve(graph, "60%", solver="ilp", time_limit=20)
    ended: dict[str, float] = {}

    def prove(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        deadline.report(Proposal(None, "input order", global_bound=proven * known.time))
        return spend("proof", deadline)

    def spend(name: str, deadline: Deadline) -> Proposal:
        while not deadline.passed:
            time.sleep(0.001)
        ended[name] = fake.seconds - began
        return Proposal(None, "any order")

    def find(problem: Problem, *, deadline: Deadline, **options: object) -> Proposal:
        deadline.report(Proposal(known.schedule, "any order"))
        return spend("annealing", deadline)

    def improve(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        return spend("neighborhoods", deadline)

    small = len(graph.operations) + is_small
    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, ilp_alone_seconds=0.01, small_operations=small))
    monkeypatch.setattr(auto.neighborhoods, "suits", lambda graph: True)
    monkeypatch.setattr(auto.neighborhoods, "propose", improve)
    monkeypatch.setattr(auto.ilp, "propose", prove)
    monkeypatch.setattr(auto.anneal, "search", find)
    with FakeClock(seconds_per_look=0.01) as fake:
        began = fake.seconds
        assert sc.solve(graph, "60%", time_limit=limit).time == known.time
    assert (ended["proof"] > 0.8 * limit) == goes_on
    assert ("neighborhoods" in ended) == (is_small or not goes_on)
    if is_small and goes_on:
        assert ended["annealing"] < 0.9 * limit < ended["neighborhoods"]


def test_no_other_order_is_searched_for_if_it_could_save_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_the_given_order(monkeypatch)
    graph = branches(6)
    long = sc.Graph(
        [*graph.operations, sc.Operation("long", ["small0"], ["end"], 1e6)],
        [*graph.tensors, sc.Tensor("end", 0)],
        results=[*graph.results, "end"],
    )
    with FakeClock(seconds_per_look=0.01):
        solution = sc.solve(long, 106, time_limit=20)
    # As in the test above, another order would save 6, here of a million.
    assert (solution.time, solution.search_space) == (1e6 + 18, "input order")
    assert solution.status is sc.Status.OPTIMAL
    assert 1e6 <= solution.global_bound <= 1e6 + 12


@pytest.mark.parametrize("share", ["80%", "60%", "45%"])
def test_no_part_is_better(share: str) -> None:
    graph = conv_net(4)
    with FakeClock(seconds_per_look=0.005):
        best = sc.solve(graph, share, time_limit=10).time
    parts = {solver for stage in auto.STAGES for solver in stage.solvers} & set(sc.solver_names())
    assert parts >= {"dp", "save-all", "greedy", "segments", "ilp", "hierarchical", "anneal"}
    for part in sorted(parts):
        with contextlib.suppress(UnsuitableProblemError), FakeClock(seconds_per_look=0.005):
            assert best <= sc.solve(graph, share, solver=part, time_limit=1).time


def test_however_little_time_there_is_a_known_schedule_for_less_memory_is_not_the_answer() -> None:
    graph = conv_net(12)
    slow = sc.solve(graph, 2**30, solver="recompute-all")
    assert slow.schedule is not None
    assert slow.time > 3 * slow.baseline_time
    problem = Problem(graph, (slow.peak_bytes + slow.baseline_peak_bytes) // 2, starts=(slow.schedule,))
    schedule = auto.propose(problem, deadline=Deadline(1e-9), seed=0).schedule
    assert schedule is not None
    simulation = sc.simulate(graph, schedule)
    assert simulation.peak_bytes <= problem.budget_bytes
    assert simulation.time < 1.5 * slow.baseline_time


def test_a_proof_ends_the_search() -> None:
    with FakeClock(seconds_per_look=0.01) as fake:
        assert sc.solve(uniform_chain(6), 24, time_limit=60).status is sc.Status.OPTIMAL
        assert fake.seconds < 20


def test_without_a_time_limit_the_search_ends_by_itself() -> None:
    graph = conv_net(5)
    unlimited = sc.solve(graph, "60%", time_limit=math.inf)
    assert unlimited.time <= sc.solve(graph, "60%", time_limit=8).time
    assert unlimited.status is sc.Status.OPTIMAL


def test_the_search_ends_when_one_part_proves_what_another_one_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = conv_net(5)
    known = sc.solve(graph, "60%", solver="ilp", time_limit=20)
    assert known.time > sum(entry.time for entry in graph.operations)

    def report_and_wait(found: Proposal, deadline: Deadline) -> Proposal:
        deadline.report(found)
        while not deadline.stopped:
            time.sleep(0.01)
        return Proposal(None, "input order")

    def prove(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        return report_and_wait(Proposal(None, "input order", global_bound=known.time), deadline)

    def find(problem: Problem, *, deadline: Deadline, seed: int, walkers: int, only_starts: bool) -> Proposal:
        return report_and_wait(Proposal(known.schedule, "any order"), deadline)

    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, quick_solvers=()))
    monkeypatch.setattr(auto.ilp, "propose", prove)
    monkeypatch.setattr(auto.anneal, "search", find)
    # Neither part ends before it is stopped: an answer shows that both were.
    solution = sc.solve(graph, "60%", time_limit=2)
    assert (solution.time, solution.status) == (known.time, sc.Status.OPTIMAL)


def test_an_error_in_one_part_ends_the_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        while not deadline.passed:
            time.sleep(0.001)
        return Proposal(None, "input order")

    def fail(problem: Problem, *, deadline: Deadline, seed: int, walkers: int, only_starts: bool) -> Proposal:
        raise TypeError("broken")

    graph = conv_net(5)
    monkeypatch.setattr(auto.ilp, "propose", prove)
    monkeypatch.setattr(auto.anneal, "search", fail)
    monkeypatch.setattr(auto, "SETTINGS", replace(auto.SETTINGS, ilp_alone_seconds=0.01))
    with FakeClock(seconds_per_look=0.01) as fake:
        with pytest.raises(TypeError, match="broken"):
            sc.solve(graph, "60%", time_limit=1000)
        assert fake.seconds < 100
