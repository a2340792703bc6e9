"""Binomial and mixed schedules against published counts, a search over an abstract machine, and the simulator."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

import pytest

import scheduler as sc
from scheduler.errors import InvalidOptionError, UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.solution import grade
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import load_solver
from scheduler.solvers.revolve.solver import Action, chain_schedule, extra_forwards
from tests.support.training_graphs import uniform_chain as uniform_graph


def equal_layers(count: int, *, output: int = 4, saved: int = 8) -> sc.Chain:
    return sc.Chain([sc.Layer(f"l{i}", 1.0, 2.0, output, saved) for i in range(count)], input_bytes=output)


def runs_without_saving(actions: Iterable[Action]) -> int:
    return sum(stop - start for action, start, stop in actions if action == "forward")


def reads_and_creates(action: Action) -> tuple[list[str], list[str]]:
    action, start, stop = action
    if action == "forward":
        return [f"state {start}"], [f"state {stop}"]
    if action == "save":
        return [f"state {start}"], [f"data {start}", f"state {stop}"]
    return [f"data {start}"], []


def slots_used(actions: list[Action], steps: int) -> int:
    """Replay: inputs are live, each step runs backward once, the last first; count items that outlive one action."""
    readers: dict[str, list[int]] = {}
    for position, action in enumerate(actions):
        for item in reads_and_creates(action)[0]:
            readers.setdefault(item, []).append(position)
    assert [start for action, start, _ in actions if action == "backward"] == list(reversed(range(steps)))
    created_at = {"state 0": -1}
    most = 0
    for position, action in enumerate(actions):
        reads, creates = reads_and_creates(action)
        assert all(item in created_at for item in reads)
        created_at.update(dict.fromkeys(creates, position))
        held = 0
        for item in list(created_at):
            later = [reader for reader in readers.get(item, ()) if reader > position]
            if not later:
                del created_at[item]
            elif later[0] > position + 1 or len(later) > 1 or created_at[item] < position:
                held += 1
        most = max(most, held)
    return most


def least_extra(steps: int, slots: int, *, mixed: bool) -> int:
    """Search all schedules on a machine: items held in slots, and an available state.

    A node is (steps left, items held, available state). Every forward run costs 1, with saving
    or without, and each step needs one. A step may run with saving and backward at once if it
    is the next to run backward and its state is available.
    """
    queue = [(0, steps, (), 0)]
    best: dict[tuple[int, tuple[tuple[str, int], ...], int], int] = {}
    while queue:
        cost, left, held, hand = heapq.heappop(queue)
        if left == 0:
            return cost - steps
        if best.get((left, held, hand), math.inf) <= cost:
            continue
        best[left, held, hand] = cost
        following = [(cost, left, tuple(item for item in held if item != gone), hand) for gone in held]
        if len(held) < slots and hand >= 0 and ("state", hand) not in held:
            following.append((cost, left, tuple(sorted([*held, ("state", hand)])), hand))
        following += [(cost, left, held, state) for kind, state in held if kind == "state"]
        if hand >= 0 and hand < left - 1:
            following.append((cost + 1, left, held, hand + 1))
            if mixed and len(held) < slots and ("data", hand) not in held:
                following.append((cost + 1, left, tuple(sorted([*held, ("data", hand)])), hand + 1))
        if hand == left - 1:
            following.append((cost + 1, left - 1, held, -1))
        if ("data", left - 1) in held:
            following.append((cost, left - 1, tuple(item for item in held if item != ("data", left - 1)), -1))
        for node in following:
            heapq.heappush(queue, node)
    raise AssertionError("no schedule")


@cache
def binomial_by_recurrence(steps: int, slots: int) -> int:
    """Griewank and Walther 2000: the start takes a slot; advance, store, and solve both sides."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(
        split + binomial_by_recurrence(steps - split, slots - 1) + binomial_by_recurrence(split, slots)
        for split in range(1, steps)
    )


@cache
def mixed_by_recurrence(steps: int, slots: int) -> float:
    """Keep the first step's data, or its state and go on to the next kept item."""
    if steps == 1:
        return 0
    if slots == 0:
        return math.inf
    return min(
        mixed_by_recurrence(steps - 1, slots - 1),
        *(
            split + mixed_by_recurrence(steps - split, slots - 1) + mixed_by_recurrence(split, slots)
            for split in range(1, steps)
        ),
    )


@pytest.mark.parametrize(
    ("steps", "slots", "extra"), [(100, 5, 316), (1000, 10, 3636), (10000, 20, 37976), (100000, 50, 375196)]
)
def test_the_stream_and_the_closed_form_give_the_published_counts(steps: int, slots: int, extra: int) -> None:
    assert runs_without_saving(sc.revolve_actions(steps, slots)) == extra
    assert extra_forwards(steps, slots) == extra


@pytest.mark.parametrize(
    ("steps", "slots", "binomial", "mixed"),
    [
        *[(10, 3, 25, 19), (16, 4, 43, 33), (32, 4, 107, 87), (32, 6, 92, 68)],
        *[(64, 6, 220, 172), (64, 8, 201, 149), (100, 5, 416, 352), (100, 10, 322, 237)],
    ],
)
def test_totals_of_both_kinds_are_the_published_ones(steps: int, slots: int, binomial: int, mixed: int) -> None:
    assert steps + extra_forwards(steps, slots) == binomial
    assert steps + extra_forwards(steps, slots, mixed=True) == mixed
    assert steps + runs_without_saving(sc.revolve_actions(steps, slots, mixed=True)) == mixed


@pytest.mark.parametrize("mixed", [False, True])
def test_no_schedule_of_the_machine_takes_fewer_runs(mixed: bool) -> None:
    for steps in range(1, 8):
        for slots in range(1, 4):
            assert extra_forwards(steps, slots, mixed=mixed) == least_extra(steps, slots, mixed=mixed)


@pytest.mark.parametrize("mixed", [False, True])
def test_counts_equal_the_recurrence_in_all_small_cases(mixed: bool) -> None:
    recurrence = mixed_by_recurrence if mixed else binomial_by_recurrence
    for steps in range(1, 61):
        for slots in range(1, 13):
            assert extra_forwards(steps, slots, mixed=mixed) == recurrence(steps, slots)


@pytest.mark.parametrize("mixed", [False, True])
def test_streams_stay_within_their_slots(mixed: bool) -> None:
    for steps in [*range(1, 30), 77]:
        for slots in [1, 2, 3, 4, 7, 12, 40, 100]:
            actions = list(sc.revolve_actions(steps, slots, mixed=mixed))
            assert slots_used(actions, steps) <= slots
            assert len(actions) <= 3 * steps - 1
            assert runs_without_saving(actions) == extra_forwards(steps, slots, mixed=mixed)


def test_a_million_steps_stream_in_the_published_number_of_advances_without_being_held() -> None:
    actions = sc.revolve_actions(1_000_000, 50)
    assert isinstance(actions, Iterator)
    assert next(actions)[:2] == ("forward", 0)
    backward = extra = 0
    for action, start, stop in sc.revolve_actions(1_000_000, 50):
        if action == "forward":
            extra += stop - start
        elif action == "backward":
            backward += 1
    assert (extra, backward) == (4_658_945, 1_000_000)


def test_more_slots_than_steps_change_nothing() -> None:
    assert list(sc.revolve_actions(9, 10**9)) == list(sc.revolve_actions(9, 9))
    assert extra_forwards(9, 10**9, mixed=True) == 0


@pytest.mark.parametrize(("steps", "slots"), [(0, 1), (1, 0), (-3, 2), (2.0, 1), (True, 1), (3, "2"), (2**41, 5)])
def test_bad_numbers_are_rejected_at_the_call(steps: int, slots: int) -> None:
    with pytest.raises(InvalidOptionError, match=r"(steps|slots) must be"):
        sc.revolve_actions(steps, slots)


def test_a_mixed_table_that_is_too_large_is_rejected_with_the_fix() -> None:
    with pytest.raises(InvalidOptionError, match=r"the limit is 134217728: .*mixed=False"):
        sc.revolve_actions(10**7, 50, mixed=True)


def test_on_a_chain_the_simulator_counts_the_runs_of_the_stream() -> None:
    chain = equal_layers(10)
    # 10 layers of 1 forward and 2 backward; 25 and 19 forward runs in all are published.
    assert sc.simulate(chain.graph, chain_schedule(chain, 3)).time == 25 + 20
    assert sc.simulate(chain.graph, chain_schedule(chain, 3, mixed=True)).time == 19 + 20


@pytest.mark.parametrize("solver", ["revolve", "mixed"])
@pytest.mark.parametrize(("output", "saved"), [(4, 8), (4, 0), (1, 9), (6, 1)])
def test_the_most_slots_that_fit_are_taken(solver: str, output: int, saved: int) -> None:
    chain = equal_layers(11, output=output, saved=saved)
    simulated = [
        sc.simulate(chain.graph, chain_schedule(chain, slots, mixed=solver == "mixed")) for slots in range(1, 12)
    ]
    for budget in {entry.peak_bytes + off for entry in simulated for off in (-1, 0)}:
        problem = Problem(chain.graph, budget, chain=chain)
        proposal = load_solver(solver)(problem, deadline=Deadline(60), seed=0)
        solution = grade(problem, proposal, solver=solver, seconds=0.0)
        fitting = [entry.time for entry in simulated if entry.peak_bytes <= budget]
        assert solution.time == min(fitting, default=math.inf)
        if fitting:
            assert solution.status is sc.Status.OPTIMAL
            assert "slots of states" in solution.search_space or solution.search_space == "any order"


@pytest.mark.parametrize("solver", ["revolve", "mixed"])
def test_a_chain_whose_layers_differ_is_rejected_with_the_layer(solver: str) -> None:
    chain = equal_layers(4)
    layers = [*chain.layers[:2], replace(chain.layers[2], saved_bytes=9), chain.layers[3]]
    with pytest.raises(UnsuitableProblemError, match=r'"l2" differs from "l0" in saved_bytes: 9 against 8; use "dp"'):
        sc.solve(sc.Chain(layers, input_bytes=4), "60%", solver=solver)
    with pytest.raises(UnsuitableProblemError, match="not graphs"):
        sc.solve(uniform_graph(4), "60%", solver=solver)


def test_parameters_are_resident_and_may_differ() -> None:
    chain = equal_layers(4)
    layers = [replace(layer, parameter_bytes=i) for i, layer in enumerate(chain.layers)]
    assert sc.solve(sc.Chain(layers, input_bytes=4), "100%", solver="revolve").time == 4 * 3 + 3


def test_long_chains_with_one_or_two_slots_are_not_simulated() -> None:
    chain = equal_layers(2000)
    floor = Problem(chain.graph, 0).floor.bytes
    # One slot would take 2000 x 1999 / 2 runs, which takes too long; two take about 80 000.
    proposal = load_solver("revolve")(Problem(chain.graph, floor, chain=chain), deadline=Deadline(60), seed=0)
    assert proposal.schedule is None
    assert "fewest slots tried" in proposal.messages[0]
