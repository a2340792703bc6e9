"""Slot annealing: random changes of a sequence of runs, memory kept exactly, worse ones less and less."""

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
from scheduler.solution import TOLERANCE, Proposal, relative_gap
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
from scheduler.solvers.registry import Report, ignore_report

WALKERS = 2
FIRST_ROUND = 200
"""Moves of a walker in the first round, per operation."""
SHARE_OF_TIME = 0.85
"""The rest is left to prove a bound in: annealing proves nothing itself."""
GROWTH = 1.4
"""Of a round over the one before: several fresh starts of a useful length beat one long one."""
PATIENCE = 50
"""A search ends when it has gone on this many times as long as it took to find its best."""
LEAST_MOVES = 50
"""Moves of a search before patience ends, per triple of operations."""
CHUNK_MOVES, CHUNK_WORK = 30_000, 2 * 10**8
"""Moves between two looks at the clock: at most the first, and about the second divided by the operations."""
MOVES_PER_SPREAD = 20
"""Moves between two times that the runs are spaced evenly, per operation."""
HOT, WARM, COLD = 0.5, 0.1, 0.005
"""Temperatures in mean times of an operation: at the start of a round of the walkers that roam,
of the one that betters what fits already, and at the end."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the best schedule that annealing over sequences of runs finds.

    A recomputation comes (with recomputations of inputs that are gone), goes (with those
    that only it read) or moves; in any order, first runs move too. The energy is the time
    plus a weight times the area of memory over budget. Two walkers, each with its own
    random numbers, anneal again and again, in turn from the best schedule known and afresh,
    each time for longer; they stop before the deadline if that has long been in vain.

    Guarantee: none, and no bound. Search space: input order, or any order if the problem
    allows it. When: irregular graphs, where cuts leave a gap; up to some 10^4 operations,
    beyond 10^3 rather to polish another solver's schedule (`polish`). Cost: anytime; of the
    order of 10^6 moves a second at 10^2 operations. Memory: at most 16 MiB and 8 KiB an operation.
    Reference: Imanishi et al. 2023 (FastSA) for annealing over sequences in any order.
    """
    return search(problem, deadline=deadline.within(SHARE_OF_TIME * deadline.remaining), seed=seed)


def search(
    problem: Problem, *, deadline: Deadline, seed: int, walkers: int = WALKERS, report: Report = ignore_report
) -> Proposal:
    """Do as `propose` does, with that many walkers, each in a thread of its own, and report what each round betters."""
    found = _Search(problem, walkers, report)
    if problem.floor.bytes > problem.budget_bytes:
        return replace(found.proposal(), infeasible=True)
    for start in (problem.save_everything, *problem.starts):
        found.offer(start)
    if not found.closed:
        greedy = GreedySearch(problem.graph, problem.budget_bytes)
        greedy.fit(deadline.within(0.1 * deadline.remaining))
        found.offer(greedy.schedule())
        found.run(problem.save_everything, deadline, seed)
    return replace(found.proposal(), messages=(f"annealing moves: {found.moves}",))


def polish(problem: Problem, start: Schedule, *, deadline: Deadline, seed: int, moves: int | None = None) -> Schedule:
    """Return the best schedule that annealing finds from this one.

    Parameters
    ----------
    problem : Problem
    start : Schedule
        A schedule of the graph in the problem's order; one over budget serves as well.
    deadline : Deadline
    seed : int
    moves : int, optional
        Of all walkers together. The answer then depends on the arguments only, unless the
        deadline comes first.

    Returns
    -------
    Schedule
        The start itself if nothing faster that fits was found.

    Raises
    ------
    InvalidScheduleError
        If the start breaks a rule.
    """
    simulate(problem.graph, start)
    found = _Search(problem)
    found.offer(start)
    if not found.closed:
        found.run(start, deadline, seed, moves)
    return found.best or start


class Walker:
    """One annealed sequence, with its own random numbers.

    Parameters
    ----------
    contraction : Contraction
    model : Model
    seed : int
    free : bool
        Whether first runs move too.
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
        """Move while the temperature falls from hot to cold; hasten if time runs short.

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
            if unspread >= MOVES_PER_SPREAD * len(self.model.time):
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
        """Return the fastest fitting schedule since the start, if it is faster than the start."""
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
    """Return the mean of what is above 0; 1 if nothing is."""
    return float(values[values > 0].mean()) if (values > 0).any() else 1.0


class _Search:
    """The best schedule simulated so far, and the rounds that better it."""

    def __init__(self, problem: Problem, walkers: int = WALKERS, report: Report = ignore_report) -> None:
        self.problem = problem
        self.count = walkers
        self.report = report
        self.rounds = 0
        self.best: Schedule | None = None
        self.best_time = math.inf
        self.moves = 0
        self.moves_at_best = 0

    @property
    def closed(self) -> bool:
        """Whether no schedule can be faster."""
        return relative_gap(self.best_time, self.problem.least_time) <= TOLERANCE

    @property
    def tired(self) -> bool:
        """Whether going on is not worth while."""
        return self.moves > max(PATIENCE * self.moves_at_best, LEAST_MOVES * len(self.problem.graph.operations) ** 3)

    def offer(self, schedule: Schedule) -> None:
        """Judge a schedule, and keep it if it fits and is faster."""
        problem = self.problem
        try:
            simulated = simulate(problem.graph, schedule)
        except InvalidScheduleError:
            return
        if not problem.reorder and not follows_input_order(problem.graph, schedule):
            return
        if simulated.peak_bytes <= problem.budget_bytes and simulated.time < self.best_time:
            self.best, self.best_time, self.moves_at_best = schedule, simulated.time, self.moves

    def proposal(self) -> Proposal:
        """Return the best so far."""
        return Proposal(self.best, "any order" if self.problem.reorder else "input order")

    def run(self, start: Schedule, deadline: Deadline, seed: int, most_moves: int | None = None) -> None:
        """Anneal until time is up, the moves are spent, Ctrl-C, or going on is not worth while."""
        contraction = Contraction(self.problem.graph)
        model = contraction.model(self.problem.budget_bytes)
        free = self.problem.reorder
        walkers = [Walker(contraction, model, seed * self.count + k, free=free) for k in range(self.count)]
        deadline = deadline.within(deadline.remaining)
        length = FIRST_ROUND * len(self.problem.graph.operations)
        with ThreadPoolExecutor(self.count) as pool:
            try:
                while not (self.closed or self.tired or deadline.passed):
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
                    # What would be left over by a last full round makes it longer instead.
                    moves = length if left >= 3 * length else int(left)
                    self._round(pool, walkers, start, moves, deadline)
                    length = int(GROWTH * length)
            finally:
                deadline.stop()

    def _round(
        self, pool: ThreadPoolExecutor, walkers: Sequence[Walker], start: Schedule, moves: int, deadline: Deadline
    ) -> None:
        """Let every other walker anneal from the best so far, the rest afresh, and judge what they find."""
        best, fresh = runs_of(self.problem.graph, self.best or start), runs_of(self.problem.graph, start)
        turns = range(self.rounds, self.rounds + self.count)
        starts = [(best, WARM) if turn % 2 and self.best else (fresh, HOT) for turn in turns]
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
            self.report(self.proposal())


def _anneal(walker: Walker, runs: Sequence[int], hot: float, moves: int, deadline: Deadline) -> Schedule | None:
    """Anneal once from a start; return what is faster than it and fits."""
    walker.load(runs, hot)
    walker.cool(hot, moves, deadline)
    return walker.best()
