"""Ctrl-C at random moments of every solver: the best answer so far, simulated, and soon."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import scheduler as sc
from scheduler.errors import MissingExtraError, UnsuitableProblemError
from scheduler.problem import Problem, parse_budget
from tests.abuse.tally import BOOK
from tests.support.training_graphs import conv_net

pytestmark = pytest.mark.abuse
MOMENTS, LONGEST, LIMIT = 4, 0.4, 3600.0
"""Interrupts per solver, the latest of them in seconds, and the time limit: an answer shows that Ctrl-C ended it."""
STEPS = (
    sc.zoo.random_layered(60, seed=3),
    sc.zoo.transformer(4),
    conv_net(12),
    sc.zoo.heterogeneous_chain(40),
    sc.zoo.uniform_chain(40),
)


@contextlib.contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """Send Ctrl-C once, so many seconds from now, or as soon after that as the solver handles it."""
    over = threading.Event()

    def ring() -> None:
        over.wait(seconds)
        while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            if over.wait(0.001):
                return
        if not over.is_set():
            os.kill(os.getpid(), signal.SIGINT)  # as a terminal does: to the process, wherever it is

    ringer = threading.Thread(target=ring)
    ringer.start()
    try:
        yield
    finally:
        over.set()
        ringer.join()


def seconds_of(step: sc.Graph | sc.Chain, solver: str) -> float | None:
    """How long a solver takes; None if it does not serve the step."""
    try:
        sc.solve(step, "100%", solver=solver, time_limit=LONGEST)  # what is imported on first use is imported
        started = time.monotonic()
        sc.solve(step, "70%", solver=solver, time_limit=LONGEST)
    except (MissingExtraError, UnsuitableProblemError):
        return None
    return min(LONGEST, time.monotonic() - started)


@pytest.mark.parametrize("solver", sc.solver_names())
def test_ctrl_c_at_any_moment_gives_the_best_answer_so_far(solver: str) -> None:
    tally, draw = BOOK.of("Ctrl-C"), random.Random(solver)
    served = 0
    for step in STEPS:
        seconds = seconds_of(step, solver)
        if seconds is None:
            continue
        served += 1
        graph = step.graph if isinstance(step, sc.Chain) else step
        budget = parse_budget("70%", graph)
        floor = Problem(graph, budget).floor.bytes
        for _ in range(MOMENTS):
            try:
                with interrupted_after(draw.uniform(0, seconds)):
                    solution = tally.attempt(sc.solve, step, budget, solver=solver, time_limit=LIMIT)
            except KeyboardInterrupt:
                tally.keep(False, "the answer is gone")
                raise
            tally.keep(isinstance(solution, sc.Solution), solution)
            if solution.schedule is None:
                assert solution.messages
                tally.accept(solution.status is sc.Status.UNKNOWN or floor > budget, solution.status)
                continue
            simulated = sc.simulate(graph, solution.schedule)
            tally.accept((simulated.time, simulated.peak_bytes) == (solution.time, solution.peak_bytes))
            tally.accept(solution.peak_bytes <= budget)
            tally.accept(solution.bound <= solution.time)
            tally.accept(solution.global_bound <= solution.time)
    assert served


def test_ctrl_c_leaves_a_frontier_with_an_answer_to_every_budget() -> None:
    tally, draw = BOOK.of("Ctrl-C"), random.Random(0)
    graph = conv_net(12)
    budgets = ["100%", "90%", "80%", "70%"]
    for _ in range(MOMENTS):
        with interrupted_after(draw.uniform(0, 1)):
            rows = tally.attempt(sc.frontier, graph, budgets, time_limit=LIMIT)
        tally.keep(len(rows) == len(budgets))
        times = [row.time for row in rows]
        tally.accept(times == sorted(times) or times == sorted(times, reverse=True), times)
