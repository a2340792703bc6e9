"""Check the smallest peak, and that the search for it ends at the budget."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest

import scheduler as sc
from scheduler.api import lower
from scheduler.problem import Problem, save_everything
from scheduler.schedule import runs_of
from scheduler.solution import Proposal
from scheduler.solvers import smallest_peak as module
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.smallest_peak import Smallest, Squeezed, smallest_peak, squeeze
from tests.support import oracle
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import conv_net, uniform_chain

GRAPH = uniform_chain(5, size=1)
LEAST = oracle.least_peak(GRAPH.to_dict())
EITHER = pytest.mark.parametrize("search", [smallest_peak, squeeze])

Search = Callable[[Problem, Deadline], Smallest | Squeezed]


@EITHER
def test_without_a_budget_the_smallest_peak_is_found(search: Search) -> None:
    peak, schedule = search(Problem(GRAPH, 0), Deadline(2.0))[:2]
    assert peak == sc.simulate(GRAPH, schedule).peak_bytes == LEAST


@EITHER
def test_the_search_ends_at_a_schedule_within_the_budget(search: Search) -> None:
    whole = Problem(GRAPH, 0).baseline.peak_bytes
    assert search(Problem(GRAPH, whole), Deadline(2.0))[:2] == (whole, save_everything(GRAPH))
    assert search(Problem(GRAPH, whole - 1), Deadline(2.0))[0] < whole


@EITHER
def test_a_start_within_the_budget_ends_the_search(search: Search) -> None:
    start = smallest_peak(Problem(GRAPH, 0), Deadline(2.0)).schedule
    assert search(Problem(GRAPH, LEAST, starts=(start,)), Deadline(1e-9))[:2] == (LEAST, start)


def test_what_is_known_is_not_searched_for_again() -> None:
    whole, nothing_left = save_everything(GRAPH), Deadline(1e-9)
    known = Smallest(Problem(GRAPH, 0).baseline.peak_bytes, whole, whole)
    assert squeeze(Problem(GRAPH, 0), nothing_left, known=known).schedule == whole
    assert squeeze(Problem(GRAPH, 0), nothing_left).schedule != whole


def test_a_quick_schedule_is_known_beside_the_one_with_the_smallest_peak() -> None:
    graph = uniform_chain(150, size=1)
    plain = Problem(graph, 0).baseline
    with FakeClock():
        found = smallest_peak(Problem(graph, 0), Deadline(2.0))
    smallest, quick = (sc.simulate(graph, schedule) for schedule in (found.schedule, found.quick))
    assert smallest.peak_bytes == found.peak_bytes <= quick.peak_bytes < plain.peak_bytes
    assert quick.time <= 2 * plain.time < smallest.time


def test_what_comes_nearest_to_a_budget_that_fails_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = conv_net(6)
    whole = save_everything(graph)
    known = Smallest(sc.simulate(graph, whole).peak_bytes, whole, whole)
    near = smallest_peak(Problem(graph, 0), Deadline(2.0)).schedule
    starts = []

    def fail(problem: Problem, *_: object) -> Proposal:
        starts.append(problem.starts)
        return Proposal(None, "any order", smallest=near)

    monkeypatch.setattr(module, "_fitting", fail)
    monkeypatch.setattr(module, "_floor", lambda problem, *_: problem.floor)
    found = squeeze(Problem(graph, 0), Deadline(2.0), known=known)
    assert found.schedule == near
    assert found.peak_bytes == sc.simulate(graph, near).peak_bytes < known.peak_bytes
    assert starts[:2] == [(whole,), (near,)]


@pytest.mark.parametrize("has_chain", [False, True])
def test_a_search_at_random_begins_again_from_the_floor(has_chain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every budget fails, and what comes near is a little smaller than what is known.
    graph, chain = lower(sc.zoo.uniform_chain(101))
    problem = Problem(graph, 0, chain=chain if has_chain else None)
    whole, near = save_everything(graph), sc.solve(graph, "90%", solver="greedy").schedule
    assert near is not None
    known = Smallest(problem.baseline.peak_bytes, whole, whole)
    budgets = []

    def fail(problem: Problem, *_: object) -> Proposal:
        budgets.append(problem.budget_bytes)
        return Proposal(None, "any order", smallest=near)

    monkeypatch.setattr(module, "_fitting", fail)
    squeeze(problem, Deadline(5.0), known=known)
    falls = [later for earlier, later in pairwise(budgets) if later < earlier]
    assert len(falls) == (0 if has_chain else 1)


def test_results_are_recomputed_where_operations_need_workspace() -> None:
    # The last two backward operations need 100 bytes of workspace while the gradients of the other weights are live.
    layers = range(12)
    sizes = {f"x{i}": 3 for i in range(13)} | {f"g{i}": 3 for i in range(13)} | {f"w{i}": 10 for i in layers}
    operations = [sc.Operation(f"f{i}", [f"x{i}"], [f"x{i + 1}"], 1.0) for i in layers]
    operations.append(sc.Operation("loss", ["x12"], ["g12"], 0.0, phase="backward"))
    operations += [
        sc.Operation(f"b{i}", [f"g{i + 1}", f"x{i}"], [f"g{i}", f"w{i}"], 2.0, 100 if i < 2 else 0, phase="backward")
        for i in reversed(layers)
    ]
    tensors = [sc.Tensor(name, size) for name, size in sizes.items()]
    problem = Problem(sc.Graph(operations, tensors, ["x0"], ["g0", *(f"w{i}" for i in layers)]), 0)
    # At the end there are the batch and all results, 3 + 3 + 120 bytes; b0 without recomputation needs 103 more.
    assert (problem.floor.bytes, problem.baseline.peak_bytes) == (126, 229)
    with FakeClock():
        assert smallest_peak(problem, Deadline(2.0))[0] <= 126 + 10


def test_an_endless_schedule_is_taken_only_where_nothing_else_fits() -> None:
    graph = uniform_chain(150, size=1)
    longest = 32 * len(graph.operations)
    nothing_saved = sc.solve(graph, 2**30, solver="recompute-all").schedule
    assert nothing_saved is not None
    fewest = sc.simulate(graph, nothing_saved).peak_bytes
    assert len(runs_of(graph, nothing_saved)) > longest
    with FakeClock(seconds_per_look=1.0):
        schedule = smallest_peak(Problem(graph, 0), Deadline(2.0)).schedule
        assert len(runs_of(graph, schedule)) <= longest
        peak = smallest_peak(Problem(graph, fewest), Deadline(2.0)).peak_bytes
    assert peak == fewest


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
import scheduler as sc
chain = sc.zoo.uniform_chain(4)
for call in (
    lambda: sc.solve(chain, "60%", solver="save-all"),
    lambda: sc.make_plan(chain, "60%"),
    lambda: sc.minimum_budget(chain),
):
    try:
        call()
    except sc.MissingExtraError as error:
        assert "needs numba, which is not installed: pip install" in str(error), error
    else:
        raise SystemExit("numba was not needed")
print(sc.solve(chain, "100%", solver="save-all").status.name)
"""


def test_without_numba_the_missing_package_is_named() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    # The bound is the least time, which needs no solver.
    assert ran.stdout == "OPTIMAL\n"
