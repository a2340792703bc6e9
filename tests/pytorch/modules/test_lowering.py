"""A call tree as a graph: memory as the definition says, and decisions that can be read back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.errors import InvalidOptionError
from scheduler.graph.decisions import Decision, decisions_of
from scheduler.problem import save_everything
from scheduler.pytorch.modules.calls import OUTSIDE, Call, CallTree, Segment, Storage
from scheduler.pytorch.modules.lowering import lower, regions_of, schedule_of
from scheduler.schedule import runs_of
from scheduler.simulator import simulate
from tests.support.call_trees import Machine, block_tree, every_choice, random_tree


@pytest.mark.parametrize("seed", range(60))
def test_the_simulator_counts_time_and_memory_as_the_definition_does(seed: int) -> None:
    tree = random_tree(seed, most_calls=6)
    lowered = lower(tree)
    choices = list(every_choice(tree))
    for regions in random.Random(seed).sample(choices, min(12, len(choices))):
        simulation = simulate(lowered.graph, lowered.schedule(regions))
        machine = Machine(tree, regions)
        assert (simulation.peak_bytes, simulation.time) == (machine.peak_bytes, machine.time), regions


@pytest.mark.parametrize("seed", range(30))
def test_saving_everything_is_recomputing_no_call(seed: int) -> None:
    lowered = lower(random_tree(seed))
    plain, baseline = (
        simulate(lowered.graph, schedule) for schedule in (lowered.schedule({}), save_everything(lowered.graph))
    )
    assert (plain.peak_bytes, plain.time) == (baseline.peak_bytes, baseline.time)


@pytest.mark.parametrize("seed", range(30))
def test_decisions_can_be_read_back_from_a_schedule(seed: int) -> None:
    tree = random_tree(seed, most_calls=6)
    lowered = lower(tree)
    for regions in every_choice(tree):
        decisions = {Decision(tree.calls[c].module, tree.calls[c].number, keeps) for c, keeps in regions.items()}
        schedule = schedule_of(lowered, decisions)
        assert schedule == lowered.schedule(regions)
        assert set(decisions_of(lowered.graph, runs_of(lowered.graph, schedule))) == decisions
        if len(regions) == 3:
            break


def test_equal_blocks_that_are_all_recomputed_hold_their_inputs_and_what_one_saves() -> None:
    """Seven blocks that save 10 bytes and return 2: six inputs of 2 bytes, one more value, and 10 saved at a time."""
    lowered = lower(block_tree(7, saved=10, value=2))
    assert simulate(lowered.graph, lowered.schedule({})).peak_bytes == 7 * 10 + 2
    everything = dict.fromkeys(range(7), False)
    simulation = simulate(lowered.graph, lowered.schedule(everything))
    assert simulation.peak_bytes == 6 * 2 + 10
    assert simulation.time == 7 * 3 + 7


def test_the_calls_of_one_module_are_told_apart() -> None:
    calls = [Call(module="shared", number=i, caller=OUTSIDE, start=i, stop=i + 1) for i in range(3)]
    tree = CallTree(
        calls=tuple(calls), segments=(Segment(call=0), Segment(call=1), Segment(call=2)), storages=(), resident=()
    )
    lowered = lower(tree)
    decisions = {Decision("shared", 0), Decision("shared", 2)}
    assert set(decisions_of(lowered.graph, runs_of(lowered.graph, schedule_of(lowered, decisions)))) == decisions


def test_names_and_measured_peaks_and_times_leave_the_structure_as_it_is() -> None:
    tree = random_tree(1)
    other = replace(
        tree,
        segments=tuple(replace(s, forward_time=9.0, forward_peak_bytes=99) for s in tree.segments),
        name="other",
    )
    assert lower(tree).graph.structure_digest == lower(other).graph.structure_digest
    moved = replace(tree, calls=(replace(tree.calls[0], module="moved"), *tree.calls[1:]))
    assert lower(tree).graph.structure_digest != lower(moved).graph.structure_digest


def test_decisions_that_cannot_be_followed_are_refused() -> None:
    saved = Storage(size_bytes=8, born=0, dies=0, saved_by=(0,))
    outer = Call(module="a", number=0, caller=OUTSIDE, start=0, stop=2)
    inner = Call(module="a.b", number=0, caller=0, start=0, stop=1)
    frozen = Call(module="a.c", number=0, caller=0, start=1, stop=2, refusal="it changes its argument")
    tree = CallTree(
        calls=(outer, inner, frozen, Call(module="b", number=0, caller=OUTSIDE, start=2, stop=3)),
        segments=(Segment(call=1, expensive=(0,)), Segment(call=2), Segment(call=3)),
        storages=(saved,),
        resident=(),
    )
    for decisions, message in (
        ([Decision("a.b", 1)], 'no call 1 of module "a.b"'),
        ([Decision("a.c", 0)], '"a.c" cannot be recomputed: it changes its argument'),
        ([Decision("a", 0), Decision("a", 0, True)], 'one decision for call "a"'),
        ([Decision("a", 0), Decision("a.b", 0, True)], '"a" and "a.b"'),
        ([Decision("b", 0, True)], 'call "b" has no expensive results that could be kept'),
    ):
        with pytest.raises(InvalidOptionError, match=message):
            regions_of(tree, decisions)
