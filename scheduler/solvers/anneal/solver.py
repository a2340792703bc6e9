"""Slot annealing: change a sequence of runs at random, with exact memory, and accept worse ones less and less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from scheduler.errors import InvalidScheduleError
from scheduler.problem import Problem
from scheduler.schedule import Schedule, follows_input_order, runs_of, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solution import Proposal, is_close_enough
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.anneal.loop import anneal
from scheduler.solvers.anneal.memory import load
from scheduler.solvers.anneal.state import (
    AREA,
    BEST,
    BLOCK,
    COST,
    KEPT,
    WEIGHT,
    Flags,
    Floats,
    Ints,
    Model,
    State,
    new_state,
)
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.greedy import GreedySearch

WALKERS = 2
"""Number of threads, each of which anneals one sequence."""
FIRST_ROUND_MOVES = 200
"""Moves of a walker in the first round, per operation."""
TIME_SHARE = 0.85
"""Share of the time limit; the rest is for a bound from another solver, because annealing proves nothing."""
ROUND_GROWTH = 1.4
"""Ratio of the moves of successive rounds: several fresh starts of a useful length beat one long one."""
PATIENCE = 50
"""A search ends when its moves exceed this multiple of the moves that found its best schedule."""
LEAST_MOVES = 50
"""No search ends for lack of patience before so many moves per triple of operations."""
CHUNK_MOVES, CHUNK_WORK = 30_000, 2 * 10**8
"""Moves between two readings of the clock: at most the first, and about the second over the number of operations."""
SPREAD_MOVES = 20
"""Moves after which the runs are spaced evenly over the slots again, per operation."""
HOT, WARM, COLD = 0.5, 0.1, 0.005
"""Temperatures in mean times of an operation: at the start of a round from the initial schedule, at the
start of a round from the best schedule, and at the end of every round."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the best schedule that annealing over sequences of runs finds.

    A move inserts a recomputation (and recomputations of its missing inputs), drops one (and
    those that only it reads) or shifts one; in any order, first runs shift too. The energy is
    the time plus a weight times the area of memory over budget. Two walkers, each with its own
    random numbers, anneal in rounds of growing length, alternately from the best schedule
    known and from the save-everything schedule. They stop before the deadline if they have
    found nothing better for a long time.

    Guarantee: none, and no bound. Search space: input order, or any order if the problem
    allows it. When: irregular graphs, where `ilp` leaves a gap; up to some 10^4 operations,
    beyond 10^3 rather to improve another solver's schedule (`Problem.starts`). Cost: anytime;
    on the order of 10^6 moves a second at 10^2 operations. Memory: at most 16 MiB and 8 KiB an
    operation. Reference: Imanishi et al. 2023 (FastSA) for annealing over sequences in any order.
    """
    return search(problem, deadline=deadline.within(TIME_SHARE * deadline.remaining), seed=seed)


def search(problem: Problem, *, deadline: Deadline, seed: int, walkers: int = WALKERS) -> Proposal:
    """Return what `propose` returns, with so many walkers, and report each improvement."""
    found = Annealing(problem, walkers)
    if problem.floor.bytes > problem.budget_bytes:
        return replace(found.proposal(), infeasible=True)
    for start in (problem.save_everything, *problem.starts):
        found.offer(start)
    if not found.is_optimal:
        greedy = GreedySearch(problem.graph, problem.budget_bytes)
        greedy.fit(deadline.within(0.1 * deadline.remaining))
        found.offer(greedy.schedule())
        found.run(problem.save_everything, deadline, seed)
    return replace(found.proposal(), messages=(f"annealing moves: {found.moves}",))


class Walker:
    """One annealed sequence, with its own random numbers.

    Parameters
    ----------
    contraction : Contraction
    model : Model
    seed : int
    free : bool
        Whether first runs shift too.
    """

    def __init__(self, contraction: Contraction, model: Model, seed: int, *, free: bool) -> None:
        self.contraction, self.model, self.free = contraction, model, free
        self.random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
        self.state: State
        self.unit_time = _mean(model.time)
        self.unit_bytes = _mean(model.group_bytes)
        self.chunk = max(1, min(CHUNK_MOVES, CHUNK_WORK // len(model.time)))
        self.moves = 0
        self.seconds = 0.0

    def load(self, runs: Sequence[int], hot: float) -> None:
        """Start from these runs of the graph."""
        sequence, fixed, leads = self.contraction.contract(runs)
        slots = 3 * len(sequence) + BLOCK
        slots += -slots % BLOCK
        most = 2 * int(np.bincount(sequence).max()) + 14
        self.state = new_state(self.model, slots, most, self.random)
        self.state.lead[:] = [leads.get(task, i) for i, task in enumerate(self.contraction.graph.index.task_of)]
        self._spread(np.array(sequence, dtype=np.int64), np.array(fixed, dtype=np.bool_))
        fits = self.state.counts[AREA] == 0
        self.state.levels[BEST] = self.state.levels[COST] if fits else math.inf
        self.state.levels[WEIGHT] = hot * self.unit_time / self.unit_bytes

    def cool(self, hot: float, moves: int, deadline: Deadline) -> None:
        """Make moves while the temperature falls from `hot` to `COLD`, faster if time runs short.

        Parameters
        ----------
        hot : float
            In mean times of an operation.
        moves : int
        deadline : Deadline
        """
        started, available = clock.now(), deadline.remaining
        done = unspread = 0
        at = 0.0
        while at < 1 and not deadline.stopped:
            if unspread >= SPREAD_MOVES * len(self.model.time):
                filled = self.state.run >= 0
                self._spread(self.state.run[filled], self.state.fixed[filled])
                unspread = 0
            chunk = min(self.chunk, moves - done)
            then = min(1.0, at + chunk / moves)
            anneal(self.model, self.state, chunk, self._temperature(hot, at), self._temperature(hot, then), self.free)
            done, unspread = done + chunk, unspread + chunk
            elapsed = clock.now() - started
            at = max(done / moves, elapsed / available if available > 0 else 1.0)
        self.moves += done
        self.seconds += clock.now() - started

    def best(self) -> Schedule | None:
        """Return the fastest schedule that fits, if it is faster than the start."""
        if not self.state.counts[KEPT]:
            return None
        kept = self.state.kept_run
        return schedule_from_runs(self.contraction.graph, self.contraction.expand(kept[kept >= 0].tolist()))

    def _temperature(self, hot: float, at: float) -> float:
        return self.unit_time * hot * float((COLD / hot) ** at)

    def _spread(self, sequence: Ints, fixed: Flags) -> None:
        """Space the runs evenly over the slots."""
        slots = (2 * np.arange(len(sequence), dtype=np.int64) + 1) * len(self.state.run) // (2 * len(sequence))
        load(self.model, self.state, sequence, fixed, slots)


def _mean(values: Ints | Floats) -> float:
    """Return the mean of the positive values; 1 if there are none."""
    return float(values[values > 0].mean()) if (values > 0).any() else 1.0


class Annealing:
    """The best schedule so far, and rounds of annealing that improve it.

    Parameters
    ----------
    problem : Problem
    walkers : int
    """

    def __init__(self, problem: Problem, walkers: int = WALKERS) -> None:
        self.problem = problem
        self.count = walkers
        self.rounds = 0
        self.best: Schedule | None = None
        self.best_time = math.inf
        self.moves = 0
        self.moves_at_best = 0

    @property
    def is_optimal(self) -> bool:
        """Whether no schedule can be faster, by more than the problem's gap."""
        return is_close_enough(self.problem, self.best_time, self.problem.least_time)

    @property
    def is_exhausted(self) -> bool:
        """Whether the search has gone on too long without an improvement."""
        return self.moves > max(PATIENCE * self.moves_at_best, LEAST_MOVES * len(self.problem.graph.operations) ** 3)

    def offer(self, schedule: Schedule) -> None:
        """Simulate a schedule, and keep it if it is valid, fits and is faster."""
        problem = self.problem
        try:
            simulation = simulate(problem.graph, schedule)
        except InvalidScheduleError:
            return
        if not problem.reorder and not follows_input_order(problem.graph, schedule):
            return
        if simulation.peak_bytes <= problem.budget_bytes and simulation.time < self.best_time:
            self.best, self.best_time, self.moves_at_best = schedule, simulation.time, self.moves

    def proposal(self) -> Proposal:
        """Return the best schedule so far."""
        return Proposal(self.best, "any order" if self.problem.reorder else "input order")

    def run(self, start: Schedule, deadline: Deadline, seed: int, most_moves: int | None = None) -> None:
        """Anneal until time or moves run out, or further search is not worthwhile.

        Parameters
        ----------
        start : Schedule
        deadline : Deadline
        seed : int
        most_moves : int, optional
            Of all walkers together. With this limit, and if the deadline does not come first,
            the result depends on the arguments only.
        """
        contraction = Contraction(self.problem.graph)
        model = contraction.model(self.problem.budget_bytes)
        free = self.problem.reorder
        walkers = [Walker(contraction, model, seed * self.count + k, free=free) for k in range(self.count)]
        deadline = deadline.within(deadline.remaining)
        length = FIRST_ROUND_MOVES * len(self.problem.graph.operations)
        with ThreadPoolExecutor(self.count) as pool:
            try:
                while not (self.is_optimal or self.is_exhausted or deadline.passed):
                    if most_moves is not None:
                        left: float = (most_moves - self.moves) // self.count
                    elif self.moves:
                        left = min(
                            3 * length, deadline.remaining * self.moves / sum(walker.seconds for walker in walkers)
                        )
                    else:
                        left = 3 * length
                    if left < 1:
                        break
                    # A remainder too short for another round extends this one.
                    moves = length if left >= 3 * length else int(left)
                    self._round(pool, walkers, start, moves, deadline)
                    length = int(ROUND_GROWTH * length)
            finally:
                deadline.stop()

    def _round(
        self, pool: ThreadPoolExecutor, walkers: Sequence[Walker], start: Schedule, moves: int, deadline: Deadline
    ) -> None:
        """Anneal once with each walker, alternately from the best schedule and from the start; keep what is better."""
        best, initial = runs_of(self.problem.graph, self.best or start), runs_of(self.problem.graph, start)
        turns = range(self.rounds, self.rounds + self.count)
        starts = [(best, WARM) if turn % 2 and self.best else (initial, HOT) for turn in turns]
        self.rounds += 1
        futures = [
            pool.submit(_anneal, walker, begin, hot, moves, deadline)
            for walker, (begin, hot) in zip(walkers, starts, strict=True)
        ]
        found = [future.result() for future in futures]
        self.moves = sum(walker.moves for walker in walkers)
        before = self.best_time
        for schedule in found:
            if schedule is not None:
                self.offer(schedule)
        if self.best_time < before:
            deadline.report(self.proposal())


def _anneal(walker: Walker, runs: Sequence[int], hot: float, moves: int, deadline: Deadline) -> Schedule | None:
    """Anneal once; return the fastest schedule that fits, if it is faster than the start."""
    walker.load(runs, hot)
    walker.cool(hot, moves, deadline)
    return walker.best()
