"""Which calls to recompute: as good as trying every choice, with true bounds."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest

import scheduler as sc
from scheduler.cli import main
from scheduler.errors import BudgetTooSmallError, InvalidBudgetError, InvalidOptionError, OutOfTimeError
from scheduler.export.chrome_trace import plan_to_chrome_trace
from scheduler.graph.decisions import Decision
from scheduler.plan import Plan, plan_schema
from scheduler.pytorch.modules.choice import first_decisions, plan_modules, with_estimated_backward
from scheduler.pytorch.modules.lowering import lower, regions_of
from scheduler.pytorch.modules.program import Options, Program
from scheduler.pytorch.modules.regions import Layout
from scheduler.pytorch.modules.search import Chooser
from scheduler.solution import Status
from scheduler.solvers.deadline import Deadline
from tests.support.call_trees import Machine, block_tree, every_choice, random_tree, transformer_tree
from tests.support.fake_clock import FakeClock

SEEDS = (*range(12), 463, 652)
"""In the last two, only calls that keep results have the smallest peak, although that saves no time."""


@cache
def every_outcome(seed: int) -> list[tuple[int, float]]:
    """The peak and the time of every choice, by the definition."""
    tree = random_tree(seed, most_calls=5 + seed % 3)
    machines = [Machine(tree, regions) for regions in every_choice(tree)]
    return [(machine.peak_bytes, machine.time) for machine in machines]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_is_that_of_trying_every_choice(seed: int) -> None:
    tree, outcomes = random_tree(seed, most_calls=5 + seed % 3), every_outcome(seed)
    smallest, largest = min(outcomes)[0], max(outcomes)[0]
    lowered = lower(tree)
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        budget = smallest + math.floor(share * (largest - smallest))
        best = min(time for peak, time in outcomes if peak <= budget)
        plan = plan_modules(lowered, budget, gap=0.0)
        assert plan.time == pytest.approx(best)
        assert plan.status is Status.OPTIMAL
        assert plan.bound <= best
        assert plan.peak_bytes <= budget
        rough = plan_modules(lowered, budget, gap=0.1)
        assert rough.bound <= best <= rough.time <= best / (1 - 0.1) + 1e-9


@pytest.mark.parametrize("seed", SEEDS)
def test_no_choice_is_faster_than_the_relaxed_program(seed: int) -> None:
    outcomes, chooser = every_outcome(seed), Chooser(Layout(random_tree(seed, most_calls=5 + seed % 3)))
    smallest, plain = min(outcomes)[0], chooser.plain
    for budget in {smallest, (smallest + plain.peak_bytes) // 2}:
        program = Program(chooser.points, chooser.options, chooser.layout.tree.resident_bytes, budget, plain.peak_bytes)
        for _, point in plain.memory:
            program.add(point)
        added, _ = program.relax(Deadline(60.0))
        assert added <= min(time for peak, time in outcomes if peak <= budget) - plain.time + 1e-9
        assert added > 0 or all(amount <= budget for amount, _ in plain.memory)


@pytest.mark.parametrize("share", [60, 40])
def test_the_relaxed_program_is_close_to_the_answer_where_nested_calls_may_keep_results(share: int) -> None:
    chooser = Chooser(Layout(transformer_tree(3)))
    resident, plain = chooser.layout.tree.resident_bytes, chooser.plain
    budget = plain.peak_bytes * share // 100
    program = Program(chooser.points, chooser.options, resident, budget, plain.peak_bytes)
    for _, point in plain.memory:
        program.add(point)
    added = chooser.fastest(budget, gap=0.0, deadline=Deadline(60.0)).bound - plain.time
    relaxed, _ = program.relax(Deadline(60.0))
    assert 0.9 * added <= relaxed <= added


@pytest.mark.parametrize(("saved", "value"), [(1, 2), (2, 2), (3, 2)])
def test_calls_that_hold_as_much_as_they_free_are_left_out_and_no_answer_is_worse(saved: int, value: int) -> None:
    tree = block_tree(5, saved=saved, value=value)
    tree = replace(
        tree, segments=tuple(replace(segment, forward_peak_bytes=saved + value) for segment in tree.segments)
    )
    machines = [Machine(tree, regions) for regions in every_choice(tree)]
    lowered = lower(tree)
    assert set(Options.of(lowered.layout).times) == ({0} if saved <= value else {0, 1, 2, 3, 4})
    for budget in {machine.peak_bytes for machine in machines}:
        best = min(machine.time for machine in machines if machine.peak_bytes <= budget)
        assert plan_modules(lowered, budget, gap=0.0).time == best
    with pytest.raises(BudgetTooSmallError):
        plan_modules(lowered, min(machine.peak_bytes for machine in machines) - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_smallest_peak_is_that_of_trying_every_choice(seed: int) -> None:
    lowered, smallest = lower(random_tree(seed, most_calls=5 + seed % 3)), min(every_outcome(seed))[0]
    assert plan_modules(lowered, "min").peak_bytes == smallest
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_modules(lowered, smallest - 1)
    assert caught.value.proven
    assert f"{smallest} bytes" in str(caught.value)
    assert "The smallest possible schedule needs" in str(caught.value)


def test_a_proof_says_that_it_covers_choices_of_modules_and_what_else_may_help() -> None:
    smallest = plan_modules(block_tree(8), "min").peak_bytes
    with pytest.raises(BudgetTooSmallError) as caught:
        plan_modules(block_tree(8), smallest - 1)
    assert "this is proven for every choice of modules to recompute, although no moment" in str(caught.value)
    assert str(caught.value).endswith('If the step can be captured, granularity="operations" may need less.')


@pytest.mark.parametrize("count", [1, 3, 7])
def test_of_equal_blocks_as_many_are_recomputed_as_the_budget_demands(count: int) -> None:
    """Eight blocks save 10 bytes each and return 2; one that is recomputed holds its input of 2 instead.

    The first block has no input, so it is recomputed first: 80 - 10, then 80 - 18, ... bytes, and 2.
    """
    plan = plan_modules(block_tree(8, saved=10, value=2), 80 + 2 - 10 - 8 * (count - 1), gap=0.0)
    assert (plan.status, plan.search_space, plan.time) == (Status.OPTIMAL, "modules", 8 * 3 + count)
    assert plan.decisions[0] == Decision("blocks.0", 0)
    assert len(plan.decisions) == count


def test_the_last_block_is_never_recomputed_for_its_own_backward() -> None:
    """What it saves is live during its backward whether it was recomputed or not."""
    plan = plan_modules(block_tree(8, saved=10, value=2), "min", gap=0.0)
    assert plan.peak_bytes == 2 * 7 + 10
    assert len(plan.decisions) == 7


def test_saving_everything_is_the_answer_where_it_fits() -> None:
    plan = plan_modules(block_tree(4), "100%")
    assert (plan.overhead, plan.decisions, plan.status) == (0.0, (), Status.OPTIMAL)


@pytest.mark.parametrize("spread", [0, 100])
def test_no_random_choice_of_blocks_is_faster_at_the_same_peak(spread: int) -> None:
    lowered = lower(transformer_tree(6, spread=spread))
    tree = lowered.layout.tree
    blocks = [c for c, call in enumerate(tree.calls) if call.module.count(".") == 1]
    draw, outcomes = random.Random(5), {}
    for _ in range(200):
        chosen = draw.sample(blocks, draw.randint(0, len(blocks)))
        simulation = sc.simulate(lowered.graph, lowered.schedule(dict.fromkeys(chosen, False)))
        outcomes[simulation.peak_bytes] = min(simulation.time, outcomes.get(simulation.peak_bytes, math.inf))
    everything = sc.simulate(lowered.graph, lowered.schedule(dict.fromkeys(blocks, False)))
    assert plan_modules(lowered, everything.peak_bytes).time <= everything.time
    for budget in random.Random(6).sample(sorted(outcomes), 3):
        assert plan_modules(lowered, budget).time <= min(time for peak, time in outcomes.items() if peak <= budget)


@pytest.mark.parametrize(("seconds", "size"), [(1e-7, 2**32), (1e7, 3)])
def test_the_units_of_time_and_memory_do_not_matter(seconds: float, size: int) -> None:
    tree = random_tree(12, most_calls=7)
    segments = [
        replace(
            segment,
            forward_time=segment.forward_time * seconds,
            backward_time=segment.backward_time * seconds,
            expensive_time=segment.expensive_time * seconds,
            forward_peak_bytes=segment.forward_peak_bytes * size,
            saving_forward_peak_bytes=segment.saving_forward_peak_bytes * size,
            backward_peak_bytes=segment.backward_peak_bytes * size,
            gradient_bytes=segment.gradient_bytes * size,
            parameter_gradient_bytes=segment.parameter_gradient_bytes * size,
        )
        for segment in tree.segments
    ]
    scaled = replace(
        tree,
        segments=tuple(segments),
        storages=tuple(replace(storage, size_bytes=storage.size_bytes * size) for storage in tree.storages),
        calls=tuple(replace(call, copied_bytes=call.copied_bytes * size) for call in tree.calls),
        resident=tuple(replace(tensor, size_bytes=tensor.size_bytes * size) for tensor in tree.resident),
    )
    for budget in ("min", "min+30%", "min+70%"):
        one, other = plan_modules(tree, budget, gap=0.0), plan_modules(scaled, budget, gap=0.0)
        assert other.time == pytest.approx(one.time * seconds)
        assert other.status is Status.OPTIMAL
        assert plan_modules(scaled, other.peak_bytes, gap=0.0).time == pytest.approx(other.time)


def test_budgets_are_read_in_every_form() -> None:
    lowered = lower(transformer_tree(4))
    peaks = [plan_modules(lowered, budget).budget_bytes for budget in ("min", "min+50%", "100%")]
    assert peaks[1] == peaks[0] + (peaks[2] - peaks[0]) // 2
    assert peaks[2] == sc.simulate(lowered.graph, lowered.schedule({})).peak_bytes
    assert plan_modules(lowered, peaks[1]).budget_bytes == peaks[1]
    with pytest.raises(InvalidBudgetError, match="auto"):
        plan_modules(lowered, "auto")
    with pytest.raises(InvalidOptionError, match="gap must be"):
        plan_modules(lowered, "min", gap=2.0)
    with pytest.raises(InvalidOptionError, match="time_limit must be"):
        plan_modules(lowered, "min", time_limit=0.0)


def test_a_plan_of_modules_can_be_used_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, path, report = plan_modules(transformer_tree(3), "40%"), tmp_path / "plan.json", tmp_path / "report.html"
    plan.save(path)
    assert Plan.load(path) == plan
    assert plan.granularity == "modules"
    jsonschema.validate(json.loads(path.read_text(encoding="utf-8")), plan_schema())
    assert [str(decision) for decision in plan.decisions] == ["h.0", "h.1", "h.2"]
    assert "calls         3 recomputed: h.0-2" in plan.summary()
    for command in (
        ["show"],
        ["verify"],
        ["report", "-o", str(report)],
        ["export", "-o", str(tmp_path / "t")],
    ):
        assert main([command[0], str(path), *command[1:]]) == 0
    assert "\n43 calls of modules, 3 recomputed\n  recompute h.0-2\n" in capsys.readouterr().out
    assert '43 calls of modules, 3 recomputed.</p>\n<ul id="calls"><li>recompute h.0-2</li></ul>' in report.read_text()
    assert main(["show", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == ["h.0", "h.1", "h.2"]
    categories = [event.get("cat") for event in plan_to_chrome_trace(plan)["traceEvents"]]  # type: ignore[attr-defined]
    assert categories.count("recomputation") == 3 * 13


def test_a_claim_in_a_plan_of_modules_that_is_untrue_is_found(tmp_path: Path) -> None:
    plan, path = plan_modules(transformer_tree(3), "40%"), tmp_path / "plan.json"
    plan.save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    data["claims"]["peak_bytes"] -= 1
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(sc.PlanClaimError, match="peak_bytes"):
        Plan.load(path)


def test_a_search_without_time_to_solve_anything_says_so() -> None:
    with FakeClock(seconds_per_look=1.0), pytest.raises(OutOfTimeError, match=r"no schedule found in 0\.5 s"):
        plan_modules(transformer_tree(2), "1%", time_limit=0.5)
    with FakeClock(seconds_per_look=1.0):
        assert plan_modules(transformer_tree(2), "min", time_limit=0.5).peak_bytes > 0


def test_by_default_a_search_ends_soon_once_there_is_an_answer() -> None:
    tree = transformer_tree(6, spread=100)
    segments = (replace(one, forward_time=one.forward_time / 1e6, backward_time=0.0) for one in tree.segments)
    lowered = lower(replace(tree, segments=tuple(segments)))
    smallest = plan_modules(lowered, "min").peak_bytes
    with FakeClock(seconds_per_look=0.3):
        hurried, patient = plan_modules(lowered, "min+30%"), plan_modules(lowered, "min+30%", time_limit=60.0)
        assert plan_modules(lowered, smallest).peak_bytes <= smallest
    assert patient.gap <= 0.005 < hurried.gap


@pytest.mark.parametrize("spread", [0, 100])
def test_greedy_answers_fit_and_are_close_to_the_bound(spread: int) -> None:
    chooser = Chooser(Layout(transformer_tree(6, spread=spread)))
    plain = chooser.plain.peak_bytes
    for budget in (plain * 9 // 10, plain * 7 // 10, plain // 2):
        found = chooser.greedy(budget, Deadline(60.0))
        assert found.best is not None
        assert found.best.peak_bytes <= budget
        bound = plan_modules(chooser.layout.tree, budget, gap=0.0).bound
        assert found.best.time <= 1.05 * bound


@pytest.mark.parametrize("spread", [0, 100])
def test_first_decisions_recompute_no_more_than_the_budget_asks_for(spread: int) -> None:
    tree = with_estimated_backward(transformer_tree(6, spread=spread))
    chooser, times = Chooser(Layout(tree)), []
    resident, plain = tree.resident_bytes, chooser.plain.peak_bytes
    for share in (100, 60, 40):
        chosen = chooser.candidate(regions_of(tree, first_decisions(tree, f"{share}%", time_limit=60.0)))
        assert chosen.peak_bytes - resident <= (plain - resident) * share / 100
        assert first_decisions(tree, f"min+{share}%") == first_decisions(tree, f"{share}%")  # at least that much fits
        times.append(chosen.time)
    strictest = chooser.candidate(regions_of(tree, first_decisions(tree, time_limit=60.0)))
    assert strictest.peak_bytes <= min(one.peak_bytes for one in chooser.by_hand)
    assert times == sorted(times)
    assert times[0] < strictest.time
