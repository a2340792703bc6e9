"""Check long and thin networks: unrolled recurrent ones, which no residual stream divides."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import scheduler as sc
from scheduler.problem import Problem, parse_budget
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.hierarchical import propose, time_segments
from scheduler.solvers.hierarchical.bound import OneCut
from scheduler.solvers.hierarchical.solver import MOST_EXCEEDING
from scheduler.solvers.hierarchical.time_segments import TimeSegments, collectors, separators
from tests.support.fake_clock import FakeClock

STEPS = 200


def unrolled(steps: int, *, stacks: bool = False) -> sc.Graph:
    """Return a training step of a recurrent net: expensive gates, a cheap state, and outputs that the loss reads.

    No two steps take the same time, so that no two blocks are equal. If it stacks, a last layer reads all outputs as
    one tensor, and its backward writes a larger one before it reads that again.
    """
    forward, backward = [], []
    tensors = [sc.Tensor("state0", 0), sc.Tensor("loss", 1), sc.Tensor("gradient", 8 * steps if stacks else 4)]
    for t in range(1, steps + 1):
        tensors += [
            sc.Tensor(f"gates{t}", 16),
            sc.Tensor(f"state{t}", 4),
            sc.Tensor(f"out{t}", 4),
            sc.Tensor(f"d{t}", 4),
            sc.Tensor(f"e{t}", 4),
        ]
        forward += [
            sc.Operation(f"gates{t}", [f"state{t - 1}"], [f"gates{t}"], 100.0 + t / steps),
            sc.Operation(f"state{t}", [f"gates{t}", f"state{t - 1}"], [f"state{t}"], 1.0),
            sc.Operation(f"out{t}", [f"state{t}"], [f"out{t}"], 1.0),
        ]
        above = "gradient" if t == steps else f"d{t + 1}"
        backward += [
            sc.Operation(f"d{t}", [f"e{t}", f"state{t - 1}"], [f"d{t}"], 150.0, phase="backward"),
            sc.Operation(f"e{t}", [above, f"gates{t}", f"state{t}"], [f"e{t}"], 1.0, phase="backward"),
        ]
    outputs = [f"out{t}" for t in range(1, steps + 1)]
    if stacks:
        tensors.append(sc.Tensor("stack", 4 * steps))
        forward.append(sc.Operation("stack", outputs, ["stack"], 1.0))
        outputs = ["stack"]
    loss = [
        sc.Operation("loss", outputs, ["loss"], 1.0),
        sc.Operation("gradient", ["loss"], ["gradient"], 1.0, phase="backward"),
    ]
    results = ["d1"]
    if stacks:
        tensors.append(sc.Tensor("weights", 1))
        loss.append(sc.Operation("weights", ["gradient", "stack"], ["weights"], 1.0, phase="backward"))
        results.append("weights")
    return sc.Graph([*forward, *loss, *reversed(backward)], tensors, resident=["state0"], results=results)


def bidirectional(steps: int) -> sc.Graph:
    """Return a training step of two recurrent nets, one for each direction of time, and a layer that reads both.

    The states are read at the next step, and by the last layer when both loops are over. Its
    backward writes a gradient for each step before either loop runs backward.
    """
    tensors = [sc.Tensor("zero", 0), sc.Tensor("loss", 1)]
    loops: dict[str, list[sc.Operation]] = {"f": [], "b": []}
    backward_loops: dict[str, list[sc.Operation]] = {"f": [], "b": []}
    for way, operations in loops.items():
        for k in range(steps):
            before = f"{way}{k - 1}" if k else "zero"
            after = [f"d{way}{k + 1}"] if k + 1 < steps else []
            tensors += [sc.Tensor(f"gates_{way}{k}", 16), sc.Tensor(f"{way}{k}", 8), sc.Tensor(f"d{way}{k}", 8)]
            operations += [
                sc.Operation(f"gates_{way}{k}", [before], [f"gates_{way}{k}"], 3.0 + k / steps),
                sc.Operation(f"{way}{k}", [f"gates_{way}{k}", before], [f"{way}{k}"], 1.0),
            ]
            place = k if way == "f" else steps - 1 - k
            reads = [f"e{place}", f"gates_{way}{k}", before, *after]
            backward_loops[way].insert(0, sc.Operation(f"d{way}{k}", reads, [f"d{way}{k}"], 6.0, phase="backward"))
    last, first_gradients = [], []
    for place in range(steps):
        tensors += [sc.Tensor(f"y{place}", 1), sc.Tensor(f"e{place}", 8), sc.Tensor(f"w{place}", 0)]
        states = [f"f{place}", f"b{steps - 1 - place}"]
        last.append(sc.Operation(f"y{place}", states, [f"y{place}"], 1.0))
        reads, made = ["loss", *states], [f"e{place}", f"w{place}"]
        first_gradients.append(sc.Operation(f"e{place}", reads, made, 1.0, phase="backward"))
    loss = sc.Operation("loss", [f"y{place}" for place in range(steps)], ["loss"], 1.0)
    forward = [*loops["f"], *loops["b"], *last, loss]
    backward = [*reversed(first_gradients), *backward_loops["b"], *backward_loops["f"]]
    results = ["df0", "db0", *(f"w{place}" for place in range(steps))]
    return sc.Graph([*forward, *backward], tensors, resident=["zero"], results=results)


def two_loops(steps: int, size: int, wide: int) -> sc.Graph:
    """Return a training step of two recurrent nets, the second of which reads a stack of all states of the first.

    The stack is read once more when the backward of the second loop has ended, by a layer between the two. Until then
    a gradient of so many bytes is in memory.
    """
    tensors = [
        sc.Tensor("zero", 0),
        sc.Tensor("loss", 1),
        sc.Tensor("stack", size * steps),
        sc.Tensor("y", size * steps),
    ]
    tensors += [sc.Tensor("total", wide), sc.Tensor("weights", 0), sc.Tensor("gradient", size * steps)]
    loops: dict[str, list[sc.Operation]] = {"a": [], "b": []}
    backward_loops: dict[str, list[sc.Operation]] = {"a": [], "b": []}
    for name, operations in loops.items():
        reads, above = ([], "gradient") if name == "a" else (["y"], "total")
        for k in range(steps):
            state, gates, before = f"{name}{k}", f"gates_{name}{k}", f"{name}{k - 1}" if k else "zero"
            later = [f"d{name}{k + 1}"] if k + 1 < steps else []
            tensors += [sc.Tensor(gates, 16), sc.Tensor(state, size), sc.Tensor(f"d{state}", size)]
            operations += [
                sc.Operation(gates, [before, *reads], [gates], 3.0 + k / steps),
                sc.Operation(state, [gates, before], [state], 1.0),
            ]
            inputs = [above, gates, before, *later]
            backward_loops[name].insert(0, sc.Operation(f"d{state}", inputs, [f"d{state}"], 6.0, phase="backward"))
    stack = sc.Operation("stack", [f"a{k}" for k in range(steps)], ["stack"], 1.0)
    layer = sc.Operation("y", ["stack"], ["y"], 1.0)
    loss = sc.Operation("loss", [f"b{steps - 1}"], ["loss"], 1.0)
    total = sc.Operation("total", ["loss"], ["total"], 1.0, phase="backward")
    weights = sc.Operation("weights", ["total", "stack", "db0"], ["weights"], 1.0, phase="backward")
    gradient = sc.Operation("gradient", ["total", "db0"], ["gradient"], 1.0, phase="backward")
    forward = [*loops["a"], stack, layer, *loops["b"], loss]
    backward = [total, *backward_loops["b"], weights, gradient, *backward_loops["a"]]
    return sc.Graph([*forward, *backward], tensors, resident=["zero"], results=["da0", "weights"])


@pytest.mark.parametrize(
    ("graph", "budget", "gap"),
    [
        (unrolled(STEPS), "60%", 0.02),
        (unrolled(STEPS), "45%", 0.05),
        (unrolled(STEPS, stacks=True), "60%", 0.09),
        (bidirectional(130), "75%", 0.02),
    ],
    ids=["unrolled, 60%", "unrolled, 45%", "stacked, 60%", "bidirectional, 75%"],
)
def test_a_long_network_gets_a_schedule_near_its_bound(graph: sc.Graph, budget: str, gap: float) -> None:
    problem = Problem(graph, parse_budget(budget, graph))
    proposal = propose(problem, deadline=Deadline(60), seed=0)
    assert proposal.schedule is not None
    simulation = sc.simulate(graph, proposal.schedule)
    assert simulation.peak_bytes <= problem.budget_bytes
    assert proposal.bound <= simulation.time <= proposal.bound / (1 - gap)


def test_where_nothing_fits_the_smallest_peaks_are_passed_on() -> None:
    graph = unrolled(STEPS)
    problem = Problem(graph, parse_budget("17%", graph))
    reports: list[Proposal] = []
    proposal = propose(problem, deadline=Deadline(60).within(60, reports.append), seed=0)
    assert proposal.schedule is None
    assert reports[0].exceeding  # other searches do not wait for the end
    simulations = [sc.simulate(graph, schedule) for schedule in proposal.exceeding]
    assert 1 <= len(simulations) <= MOST_EXCEEDING
    assert all(problem.budget_bytes < one.peak_bytes < problem.baseline.peak_bytes for one in simulations)
    assert all(one.time >= proposal.bound for one in simulations)


def test_a_stack_that_cannot_be_kept_is_rebuilt_without_what_it_is_made_of() -> None:
    graph = two_loops(STEPS, 16, 800)
    problem = Problem(graph, 6000)  # the stack and what is made of it take 6400
    peaks: list[int] = []

    def offer(schedule: sc.Schedule) -> int:
        peaks.append(sc.simulate(graph, schedule).peak_bytes)
        return peaks[-1]

    TimeSegments(problem).run(Deadline(60), offer)
    assert min(peaks) - problem.budget_bytes < 1600  # half of the gates of the first loop


def programs_that_save_everything(monkeypatch: pytest.MonkeyPatch, *, fail: int = 0) -> list[tuple[int, float]]:
    """Replace programs by ones that save everything; the list gets the segments and the seconds left of each.

    The one of this number, from 1 on, has no point.
    """
    programs: list[tuple[int, float]] = []

    def solve(segments: TimeSegments, number: int, once: frozenset[int], deadline: Deadline) -> sc.Schedule | None:
        programs.append((number, deadline.remaining))
        return None if len(programs) == fail else segments.problem.save_everything

    monkeypatch.setattr(TimeSegments, "_solve_for_bound", lambda *_: False)
    monkeypatch.setattr(TimeSegments, "_solve_divided", solve)
    return programs


@pytest.mark.parametrize(
    ("excess", "tried"),
    [([0], [16]), ([100, 0], [16, 24]), ([100, 60, 50], [16, 24, 32]), ([100, 90], [16, 24]), ([100, 120], [16, 24])],
)
def test_more_segments_are_tried_while_that_brings_the_peak_much_nearer_to_the_budget(
    monkeypatch: pytest.MonkeyPatch, excess: list[int], tried: list[int]
) -> None:
    problem = Problem(unrolled(STEPS), 1000)
    programs = programs_that_save_everything(monkeypatch)
    monkeypatch.setattr(time_segments, "MOST_PROGRAMS", 0)
    TimeSegments(problem).run(Deadline(60), lambda _: 1000 + excess[len(programs) - 1])
    assert [segments for segments, _ in programs] == tried


@pytest.mark.parametrize(
    ("excess", "fail", "shares"),
    [(0.35, 0, [0.1] * 8), (0.35, 4, [0.1, 0.1, 0.4, *[0.1] * 5]), (0.45, 4, [1.0] * 8)],
)
def test_what_nearly_fits_is_soon_left_to_annealing_unless_it_keeps_too_much(
    monkeypatch: pytest.MonkeyPatch, excess: float, fail: int, shares: list[float]
) -> None:
    graph = unrolled(STEPS)
    problem = Problem(graph, parse_budget("40%", graph))
    peak = problem.budget_bytes + int(excess * (problem.budget_bytes - graph.resident_bytes))
    programs = programs_that_save_everything(monkeypatch, fail=fail)
    monkeypatch.setattr(TimeSegments, "_tighten", lambda *_: None)
    with FakeClock():
        TimeSegments(problem).run(Deadline(10.0), lambda _: peak)
    assert [left / 10.0 for _, left in programs] == pytest.approx([1.0] * 2 + shares)


def test_a_program_that_takes_long_is_followed_by_one_more_where_a_schedule_nearly_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = unrolled(STEPS)
    problem = Problem(graph, parse_budget("40%", graph))
    peak = int(1.3 * problem.budget_bytes)
    programs = programs_that_save_everything(monkeypatch)
    save_everything = TimeSegments._solve_divided
    monkeypatch.setattr(TimeSegments, "_tighten", lambda *_: None)
    with FakeClock() as fake:

        def solve(*arguments: Any) -> sc.Schedule | None:
            schedule = save_everything(*arguments)
            fake.advance(2.0 if len(programs) <= 2 else 2.1)
            return schedule

        monkeypatch.setattr(TimeSegments, "_solve_divided", solve)
        TimeSegments(problem).run(Deadline(10.0), lambda _: peak)
    assert [left for _, left in programs] == pytest.approx([10.0, 8.0, 4.0])  # and not .6 s


@pytest.mark.parametrize(("budget", "programs"), [("60%", 3), ("40%", 2)])
def test_no_program_begins_whose_limit_leaves_nothing_but_what_is_resident(
    budget: str, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = unrolled(STEPS)  # saving everything exceeds 60 % by two thirds of it, and 40 % by one and a half times
    problem = Problem(graph, parse_budget(budget, graph))
    begun = programs_that_save_everything(monkeypatch)
    TimeSegments(problem).run(Deadline(60), lambda schedule: sc.simulate(graph, schedule).peak_bytes)
    assert len(begun) == programs


def test_the_bound_is_that_of_the_integer_program_at_the_peak() -> None:
    graph = unrolled(STEPS // 4)
    problem = Problem(graph, parse_budget("60%", graph))
    segments = TimeSegments(problem)
    segments.run(Deadline(60), lambda schedule: problem.budget_bytes)
    exact = sc.solve(graph, "60%", solver="ilp", reorder=False, time_limit=20)
    assert problem.least_time < segments.bound <= exact.time
    assert segments.bound >= exact.bound * (1 - 0.01)


def test_segments_are_separated_by_the_state_alone() -> None:
    graph = unrolled(STEPS)
    names = {graph.tensors[t].name for t in separators(graph, 8)}
    assert 7 <= len(names) <= 16
    assert all(name.startswith("state") for name in names)


def test_a_state_that_is_read_again_after_the_loop_separates_segments() -> None:
    graph = bidirectional(STEPS)
    names = {graph.tensors[t].name for t in separators(graph, 8)}
    assert {name[0] for name in names} >= {"f", "b"}
    assert len(names) <= 16


def test_only_what_reads_all_outputs_collects() -> None:
    for graph, name in ((unrolled(STEPS), "loss"), (unrolled(STEPS, stacks=True), "stack")):
        assert [graph.operations[i].name for i in collectors(graph, 8)] == [name]


def test_segments_are_of_similar_length() -> None:
    graph = unrolled(STEPS)
    steps = sorted(int(graph.tensors[t].name.removeprefix("state")) for t in separators(graph, 8))
    assert max(after - before for before, after in itertools.pairwise([0, *steps, STEPS])) <= 2 * STEPS // 8


def test_short_graphs_are_not_divided() -> None:
    assert TimeSegments.suits(unrolled(STEPS))
    assert not TimeSegments.suits(unrolled(20))


def test_blocks_that_are_all_short_get_all_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = sc.zoo.transformer(24, width=64, heads=4, length=64, batch_size=16, vocabulary=64, separate_heads=True)
    assert TimeSegments.suits(graph)  # they may follow
    cut_share = 0.6  # of the time that blocks have

    def look(cut: OneCut, deadline: Deadline) -> None:
        assert deadline.remaining == pytest.approx(cut_share * 10)
        raise InterruptedError

    monkeypatch.setattr(OneCut, "run", look)
    with FakeClock(), pytest.raises(InterruptedError):  # the clock stands still
        propose(Problem(graph, parse_budget("60%", graph)), deadline=Deadline(10), seed=0)
