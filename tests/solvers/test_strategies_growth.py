"""The three strategies of the introductory literature on uniform chains: exponents of simulated schedules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import scheduler as sc
from scheduler.problem import Problem
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import load_solver
from scheduler.solvers.revolve.solver import chain_schedule

LENGTHS = [16, 64, 256, 1024, 4096]
LENGTHS_OF_QUADRATIC = [64, 128, 256, 512]
"""Simulated run by run; keeping nothing, 4096 layers take 8 million runs forward, which are streamed below."""


def equal_layers(count: int) -> sc.Chain:
    return sc.Chain([sc.Layer(f"l{i}", 1.0, 2.0, 4, 8) for i in range(count)], input_bytes=4)


def simulated(solver: str, lengths: Sequence[int]) -> list[sc.Simulation]:
    answers = []
    for count in lengths:
        chain = equal_layers(count)
        problem = Problem(chain.graph, 2**50, chain=chain)
        schedule = load_solver(solver)(problem, deadline=Deadline(60), seed=0).schedule
        assert schedule is not None
        answers.append(sc.simulate(chain.graph, schedule))
    return answers


def exponent(lengths: Sequence[int], values: Sequence[float]) -> float:
    slope, _ = np.polyfit(np.log(lengths), np.log(values), 1)
    return float(slope)


@pytest.mark.parametrize(
    ("solver", "lengths", "memory", "time"),
    [
        ("save-all", LENGTHS, 1.0, 1.0),
        ("segments", LENGTHS, 0.5, 1.0),
        ("recompute-all", LENGTHS_OF_QUADRATIC, 0.0, 2.0),
    ],
)
def test_memory_and_time_grow_as_the_literature_says(
    solver: str, lengths: list[int], memory: float, time: float
) -> None:
    answers = simulated(solver, lengths)
    assert exponent(lengths, [answer.peak_bytes - 4 for answer in answers]) == pytest.approx(memory, abs=0.05)
    # The 2 n of the backward runs hide the square of short chains: count the forward runs.
    forward_runs = [answer.time - 2 * count for answer, count in zip(answers, lengths, strict=True)]
    assert exponent(lengths, forward_runs) == pytest.approx(time, abs=0.1)


def test_keeping_nothing_takes_the_square_up_to_4096_layers_as_a_stream() -> None:
    totals = []
    for count in LENGTHS:
        extra = sum(stop - start for action, start, stop in sc.revolve_actions(count, 1) if action == "forward")
        totals.append(count + extra)
    assert totals == [count * (count + 1) // 2 for count in LENGTHS]
    assert exponent(LENGTHS, totals) == pytest.approx(2.0, abs=0.02)


def test_the_simulator_and_the_stream_agree_on_keeping_nothing() -> None:
    peaks = set()
    for count in (16, 64, 128):
        chain = equal_layers(count)
        answer = sc.simulate(chain.graph, chain_schedule(chain, 1))
        assert answer.time == count * (count + 1) // 2 + 2 * count
        peaks.add(answer.peak_bytes)
    # The resident input, then a layer's input, saved set, output's gradient and input's gradient.
    assert peaks == {4 + 4 + 8 + 4 + 4}
