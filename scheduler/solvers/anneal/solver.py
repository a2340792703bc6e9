"""Slot annealing: change a sequence of runs at random, with exact memory, and accept worse ones less and less."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random

from scheduler.errors import InvalidScheduleError
from scheduler.problem import Problem
from scheduler.schedule import Schedule, follows_input_order, runs_of
from scheduler.simulator import Simulation, simulate
from scheduler.solution import Proposal, is_close_enough
from scheduler.solvers.anneal.beginnings import Beginnings
from scheduler.solvers.anneal.choice import Choice, Kind
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.anneal.crossing import Crossings
from scheduler.solvers.anneal.retention import RetentionWalker
from scheduler.solvers.anneal.walker import Walker
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.eviction_walk import EvictionWalks
from scheduler.solvers.greedy import GreedySearch

WALKERS = 2
"""Number of threads, each of which anneals one sequence."""
RUNS_EVERY = 2
"""Where nothing fits, turns are over decisions but in every so-manieth round, from the first on: some steps need
other orders of first runs, and others many recomputations at once."""
MOST_STARTS = 4
"""Known schedules, the fastest ones, that are each annealed once before only the best one is."""
FARTHEST = 1.0
"""In a large graph, where only runs are annealed from schedules that do not fit, no turn begins with one that exceeds
the budget by more than this share of it, without what is resident: it hardly ever ends with one that fits. That holds
for the initial schedule too, once something fits."""
SLOW = 1.1
"""What fits is slow if it takes this many times as long as a known schedule that does not fit."""
FIRST_ROUND_MOVES, MOST_FIRST_MOVES = 200, 300_000
"""Moves of a walker in the first round: per operation, and at most. In large graphs, of which each move costs more,
several rounds that begin anew beat one that takes all the time."""
TIME_SHARE = 0.85
"""Share of the time limit; the rest is for a bound from another solver, because annealing proves nothing."""
ROUND_GROWTH = 1.4
"""Ratio of the moves of successive rounds: several fresh starts of a useful length beat one long one."""
PATIENCE = 50
"""A search ends when its moves exceed this multiple of the moves that found its best schedule."""
LEAST_MOVES = 50
"""No search ends for lack of patience before so many moves per triple of operations."""
MOST_PARTS, PART_SECONDS, PART_SECONDS_PER_OPERATION = 5, 4.0, 0.005
"""The time is shared by so many searches at most, with so much for each at least: several short ones, each with other
random numbers, beat a long one, which seldom leaves what its first seconds have led to."""
LAST_ROUNDS = 3.0
"""A remainder of less than so many rounds is for crossings; if there are none, or the last round of them has found
nothing better, it extends the next round instead."""
CROSSED_LENGTH = 2.0
"""Longest round that anneals only from crossings, as a multiple of the first one: many short ones beat a long one."""
HOT, WARM = 0.5, 0.1
"""Temperatures in mean times of an operation: at the start of a round from the initial schedule, and at the start of
one from the best schedule or from a crossing."""
RETENTION_MOVES = 40
"""Moves of a walker in one cooling over retention decisions, per operation: many short ones beat a few long ones."""
MOST_RETENTION_MOVES, MOST_RETENTION_WORK = 12_000, 12_000_000
"""Most such moves in the first round, and most times the number of operations: each costs some steps per operation, and
a turn over runs should take as long. In a graph so large that these are less than one per operation, what does not fit
is annealed over runs only."""
WARMEST_SHIFTS = 1.0
"""Highest of these temperatures at which first runs shift too: hotter, their order would become random."""
LEAST_COOLING = 10_000
"""Fewest moves of one such cooling, unless its turn is shorter."""
RETENTION_HOT = (5.0, 2.0, 1.0, 0.5)
"""Temperatures at the start of coolings over retention decisions, in turn; a move changes many runs at once. In a large
graph it is the last one, since there are too few moves to come back from far away."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the best schedule that annealing over sequences of runs finds.

    A move inserts a recomputation (and recomputations of its missing inputs), drops one (and
    those that only it reads) or shifts one; in any order, first runs shift too. The energy is
    the time plus a weight times the area of memory over budget. In some turns a move changes a
    retention decision instead (`RetentionWalker`), which finds in a second what moves of single
    runs do not find in ten where the budget is tight. Two walkers, each with its own random
    numbers, anneal in rounds of growing length; what each does is chosen by what has found
    something better so far (`Choice`). Some rounds, the last ones above all, begin with what two
    known schedules make together, or with one that treats parts of the graph that repeat alike
    (`Crossings`). As long as known schedules that do not fit are much faster than what fits, rounds
    begin with these (in a large graph half of the turns do) until one finds nothing better, then
    with crossings until one finds nothing better, and so on. Later, too, turns begin with these if
    they have led to something faster than the initial schedule has (in a large graph, with all that
    lead to what fits; if there are none near the budget, decisions are annealed instead). With much
    time, several such searches follow each other, from the same starts. They stop before the deadline
    if one has found nothing better for a long time.

    Guarantee: none, and no bound. Search space: input order, or any order if the problem
    allows it. When: irregular graphs, where `ilp` leaves a gap; up to some 10^4 operations,
    beyond 10^3 rather to improve another solver's schedule (`Problem.starts`). Cost: anytime;
    on the order of 10^6 moves a second at 10^2 operations. Memory: at most 16 MiB and 8 KiB an
    operation. Reference: Imanishi et al. 2023 (FastSA) for annealing over sequences in any order.
    """
    return search(problem, deadline=deadline.within(TIME_SHARE * deadline.remaining), seed=seed)


def search(
    problem: Problem, *, deadline: Deadline, seed: int, walkers: int = WALKERS, only_starts: bool = False
) -> Proposal:
    """Return what `propose` returns, with so many walkers, and report each improvement.

    With `only_starts`, the greedy search and the walk that evicts are left out: the caller has tried them.
    """
    if problem.floor.bytes > problem.budget_bytes:
        return replace(Annealing(problem, walkers).proposal(), infeasible=True)
    starts = [problem.save_everything, *problem.starts]
    if problem.baseline.peak_bytes > problem.budget_bytes and not only_starts:
        starts += _quick_answers(problem, deadline)
    searches: list[Annealing] = []
    parts = _parts(problem, deadline)
    for part in range(parts):
        found = Annealing(problem, walkers)
        searches.append(found)
        for start in starts:
            if only_starts and deadline.passed:
                break  # the caller has these
            found.offer_start(start)
        if not found.is_optimal:
            limit = deadline.within(deadline.remaining / (parts - part), partial(_report_faster, searches, deadline))
            found.run(problem.save_everything, limit, MOST_PARTS * seed + part)
        if found.is_optimal or found.is_exhausted or deadline.passed:
            break
    best = min(searches, key=lambda each: each.best_time)
    moves = sum(each.moves for each in searches)
    return replace(best.proposal(), messages=(f"annealing moves: {moves}",))


def _quick_answers(problem: Problem, deadline: Deadline) -> list[Schedule]:
    """Return the schedule of the greedy search, and that of the walk that evicts if one fits."""
    greedy = GreedySearch(problem.graph, problem.budget_bytes)
    greedy.fit(deadline.within(0.1 * deadline.remaining))
    walk = EvictionWalks(problem.graph).fitting(problem.budget_bytes, deadline)
    return [greedy.schedule(), *([] if walk is None else [walk])]


def _parts(problem: Problem, deadline: Deadline) -> int:
    """Return how many searches share the time, each from the same starts."""
    if math.isinf(deadline.remaining):
        return 1
    seconds = max(PART_SECONDS, PART_SECONDS_PER_OPERATION * len(problem.graph.operations))
    return max(1, min(MOST_PARTS, int(deadline.remaining / seconds)))


def _report_faster(searches: Sequence[Annealing], deadline: Deadline, proposal: Proposal) -> None:
    """Pass on an answer of the last search unless one before has found a faster one."""
    if searches[-1].best_time <= min(each.best_time for each in searches):
        deadline.report(proposal)


def _is_large(problem: Problem) -> bool:
    """Return whether a turn over decisions is over before each operation has been looked at once."""
    return len(problem.graph.operations) ** 2 > MOST_RETENTION_WORK


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
        self.choice = Choice()
        self.best: Schedule | None = None
        self.best_time = math.inf
        self.moves = 0
        self.moves_at_best = 0
        self._rounds = 0
        self._smallest: Schedule | None = None
        """Of the known schedules that do not fit, the one with the smallest peak."""
        self._smallest_peak = math.inf
        self._starts: dict[float, Schedule] = {}
        """Known schedules from which nothing has been annealed yet, by their times."""
        self._beginnings = Beginnings()
        self._crossings = Crossings(problem.graph, problem.budget_bytes)
        self._do_crossings_pay = True
        """Whether no round of crossings has been in vain since something better was found."""
        self._is_to_cross = False
        """Whether the last round was over crossings and found something better, or over others and did not."""
        self._is_large = _is_large(problem)
        self._random: Random

    @property
    def is_optimal(self) -> bool:
        """Whether no schedule can be faster, by more than the problem's gap."""
        return is_close_enough(self.problem, self.best_time, self.problem.least_time)

    @property
    def is_exhausted(self) -> bool:
        """Whether the search has gone on too long without an improvement."""
        return self.moves > max(PATIENCE * self.moves_at_best, LEAST_MOVES * len(self.problem.graph.operations) ** 3)

    def offer(self, schedule: Schedule) -> float:
        """Keep a schedule if it is faster; return its time, or inf if it is invalid or does not fit."""
        simulation = self._simulate(schedule)
        return math.inf if simulation is None else self._keep(schedule, simulation)

    def offer_start(self, schedule: Schedule) -> None:
        """Do the same, and anneal from this schedule too if it is one of the fastest: they lead to different ones."""
        simulation = self._simulate(schedule)
        if simulation is None:
            return
        time = self._keep(schedule, simulation)
        if math.isfinite(time):
            self._starts[time] = schedule
            self._starts = {time: self._starts[time] for time in sorted(self._starts)[:MOST_STARTS]}
        elif schedule != self.problem.save_everything and self._may_fit_soon(simulation.peak_bytes):
            self._beginnings.add(schedule, simulation.time)

    def _may_fit_soon(self, peak: int) -> bool:
        """Whether annealing may make a schedule with this peak fit in one turn."""
        budget = self.problem.budget_bytes
        return not self._is_large or peak - budget <= FARTHEST * (budget - self.problem.graph.resident_bytes)

    def _keep(self, schedule: Schedule, simulation: Simulation) -> float:
        """Keep a schedule if it is faster, or has a smaller peak where none fits; return its time, or inf."""
        if simulation.peak_bytes > self.problem.budget_bytes:
            if simulation.peak_bytes < self._smallest_peak:
                self._smallest, self._smallest_peak = schedule, simulation.peak_bytes
            return math.inf
        self._crossings.add(schedule)
        if simulation.time < self.best_time:
            self.best, self.best_time, self.moves_at_best = schedule, simulation.time, self.moves
        return simulation.time

    def _simulate(self, schedule: Schedule) -> Simulation | None:
        """Simulate a schedule; None if it is invalid, or in an order that the problem does not allow."""
        problem = self.problem
        try:
            simulation = simulate(problem.graph, schedule)
        except InvalidScheduleError:
            return None
        return simulation if problem.reorder or follows_input_order(problem.graph, schedule) else None

    def proposal(self) -> Proposal:
        """Return the best schedule so far; where nothing fits, the one with the smallest peak beside it."""
        smallest = self._smallest if self.best is None else None
        return Proposal(self.best, "any order" if self.problem.reorder else "input order", smallest=smallest)

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
        contraction = Contraction(self.problem.graph, self.problem.budget_bytes)
        walkers = [_Pair(self.problem, contraction, seed * self.count + k) for k in range(self.count)]
        deadline = deadline.within(deadline.remaining)
        self._random = Random(seed)
        length, lengths = 1.0, 0.0
        with ThreadPoolExecutor(self.count) as pool:
            try:
                while not (self.is_optimal or self.is_exhausted or deadline.passed):
                    seconds = sum(walker.seconds for walker in walkers)
                    left = deadline.remaining * lengths / seconds if seconds > 0 else math.inf
                    most = math.inf if most_moves is None else (most_moves - self.moves) // self.count
                    if most < 1:
                        break
                    is_last = left < LAST_ROUNDS * length
                    kinds = self._next_kinds(is_last=is_last)
                    if all(kind is Kind.CROSSED for kind in kinds):
                        part = min(length, CROSSED_LENGTH)
                    else:
                        part = length = left if is_last else length
                        length *= ROUND_GROWTH
                    self._round(pool, walkers, kinds, start, part, most, deadline)
                    lengths += self.count * part
            finally:
                deadline.stop()

    def _round(
        self,
        pool: ThreadPoolExecutor,
        walkers: Sequence[_Pair],
        kinds: Sequence[Kind],
        start: Schedule,
        length: float,
        most_moves: float,
        deadline: Deadline,
    ) -> None:
        """Anneal once with each walker, and keep what is better."""
        before = self.best_time

        def turn(walker: _Pair, kind: Kind, begin: Schedule) -> tuple[int, list[Schedule]]:
            runs = runs_of(self.problem.graph, begin)
            if kind is Kind.DECISIONS:
                moves, found = walker.anneal_decisions(runs, before, length, most_moves, deadline)
                fits = bool(found) or math.isfinite(before)
                return moves, found if fits else [walker.over_decisions.last()]
            if kind is Kind.FROM_START and begin is not start and math.isfinite(before) and not self._is_large:
                return walker.anneal_exceeding(runs, length, most_moves, deadline)
            hot = WARM if kind in (Kind.RUNS_FROM_BEST, Kind.CROSSED) and math.isfinite(before) else HOT
            return walker.anneal_runs(runs, hot, length, most_moves, deadline)

        begins = [self._next_begin(kind, deadline) for kind in kinds]
        answers = list(pool.map(turn, walkers, kinds, [begin or start for begin in begins]))
        for kind, begin, (moves, found) in zip(kinds, begins, answers, strict=True):
            self.moves += moves
            # A crossing is new, and may be faster than what was found from there.
            begin_time, time = self.offer(begin or start), min(map(self.offer, found), default=math.inf)
            self.choice.record(kind, improved=min(begin_time, time) < before)
            if kind is Kind.FROM_START:
                self._beginnings.record(begin, time)
                if self._is_large and math.isfinite(before) and begin and not found:
                    self._beginnings.drop(begin)
        is_better, are_crossed = self.best_time < before, all(kind is Kind.CROSSED for kind in kinds)
        self._is_to_cross = is_better == are_crossed
        if is_better:
            self._do_crossings_pay = True
            deadline.report(self.proposal())
        elif are_crossed:
            self._do_crossings_pay = False

    @property
    def _is_slow(self) -> bool:
        """Whether known schedules that do not fit are so much faster that turns begin with one of them.

        All do that are not over crossings, but in a large graph where something fits only half of them: runs alone may
        never lead to what fits. There it is true where nothing fits as well, since turns over decisions have no chance.
        """
        is_open = math.isfinite(self.best_time) or self._is_large
        return is_open and self._beginnings.has_exceeding and self.best_time > SLOW * self._beginnings.least_time

    def _next_kinds(self, *, is_last: bool) -> list[Kind]:
        """Return what each walker does in the next round."""
        only_decisions = self.best is None and self._rounds % RUNS_EVERY != 0
        self._rounds += 1
        if self._is_slow:
            if self._is_to_cross and self._crossings.are_possible:
                return [Kind.CROSSED] * self.count
            has_other = self._is_large and self.best is not None
            return [
                Kind.FROM_START if not has_other or (self._rounds + k) % 2 == 0 else Kind.RUNS_FROM_BEST
                for k in range(self.count)
            ]
        if only_decisions:
            return [Kind.DECISIONS] * self.count
        if is_last and self._crossings.are_possible and self._do_crossings_pay:
            return [Kind.CROSSED] * self.count
        return [self.choice.next(self._kinds) for _ in range(self.count)]

    @property
    def _kinds(self) -> list[Kind]:
        """What a turn may do where something fits that is not slow."""
        if not self._is_large:
            return list(Kind)
        has_start = self._beginnings.has_exceeding or self._may_fit_soon(self.problem.baseline.peak_bytes)
        return [Kind.FROM_START if has_start else Kind.DECISIONS, Kind.RUNS_FROM_BEST, Kind.CROSSED]

    def _next_begin(self, kind: Kind, deadline: Deadline) -> Schedule | None:
        """Return where a turn begins; None for the initial schedule.

        It is the best schedule, but for turns over runs, each known one once before it. What does not fit comes in
        turn while nothing fits, or what does is slow, and in a large graph as long as that leads to what fits.
        Turns over crossings begin with a new one, if there is any. While nothing fits, decisions begin with the
        smallest known peak.
        """
        if kind is Kind.FROM_START:
            return self._beginnings.next(in_turn=self.best is None or self._is_slow or self._is_large)
        if self.best is None:
            return self._smallest if kind is Kind.DECISIONS else None
        if kind is Kind.RUNS_FROM_BEST and self._starts:
            return self._starts.pop(min(self._starts))
        if kind is Kind.CROSSED:
            return self._crossings.next(self._random, deadline) or self.best
        return self.best


class _Pair:
    """A walker over sequences of runs and one over retention decisions; one of them anneals at a time."""

    def __init__(self, problem: Problem, contraction: Contraction, seed: int) -> None:
        self.operations = len(problem.graph.operations)
        self.over_runs = Walker(contraction, seed, free=problem.reorder)
        self.over_decisions = RetentionWalker(contraction, seed)
        self.is_large = _is_large(problem)
        self.coolings = 0
        # With alternatives, tensors are recomputed by operations that are chosen for the input order.
        self.may_shift = problem.reorder and all(len(task) == 1 for task in problem.graph.index.tasks)

    @property
    def seconds(self) -> float:
        """Time that both have annealed for."""
        return self.over_runs.seconds + self.over_decisions.seconds

    def anneal_runs(
        self, runs: Sequence[int], hot: float, length: float, most_moves: float, deadline: Deadline
    ) -> tuple[int, list[Schedule]]:
        """Anneal the runs themselves; return the number of moves and the fastest schedule that fits, if there is one.

        Parameters
        ----------
        runs : sequence of int
            Where to start.
        hot : float
            In mean times of an operation.
        length : float
            As a multiple of the first round.
        most_moves : float
        deadline : Deadline
        """
        first = min(FIRST_ROUND_MOVES * self.operations, MOST_FIRST_MOVES)
        moves = max(1, int(min(first * length, most_moves)))
        before = self.over_runs.moves
        self.over_runs.load(runs, hot)
        self.over_runs.cool(hot, moves, deadline)
        best = self.over_runs.best()
        return self.over_runs.moves - before, [] if best is None else [best]

    def anneal_exceeding(
        self, runs: Sequence[int], length: float, most_moves: float, deadline: Deadline
    ) -> tuple[int, list[Schedule]]:
        """Anneal the retention decisions of runs that do not fit, and then the runs that these lead to.

        Often the latter fit where the former end over budget. Return the number of moves and the
        fastest schedule that fits of each, if there is one.
        """
        self.over_decisions.load(runs)
        self.coolings = 0  # the hottest one is next
        moves, found = self.anneal_decisions(runs, math.inf, length, most_moves, deadline)
        if 0 < moves < most_moves:
            end = found[0] if found else self.over_decisions.last()
            runs = runs_of(self.over_runs.contraction.graph, end)
            further, others = self.anneal_runs(runs, HOT, length, most_moves - moves, deadline)
            moves, found = moves + further, found + others
        return moves, found

    def anneal_decisions(
        self, runs: Sequence[int], time: float, length: float, most_moves: float, deadline: Deadline
    ) -> tuple[int, list[Schedule]]:
        """Anneal the retention decisions of runs, in several coolings, each from the best so far.

        Return the number of moves and the fastest schedule that fits, if there is one. While
        nothing fits, each cooling goes on from where the last one ended: memory over budget then
        weighs more and more.

        Parameters
        ----------
        runs : sequence of int
            Where to start.
        time : float
            Their time if they fit; only faster schedules replace them.
        length, most_moves, deadline
            As for `anneal_runs`.
        """
        walker, best = self.over_decisions, None
        cooling = RETENTION_MOVES * self.operations
        first = min(cooling, MOST_RETENTION_MOVES, MOST_RETENTION_WORK / self.operations)
        begun, moves = walker.moves, max(1, int(min(first * length, most_moves)))
        while (left := moves - (walker.moves - begun)) > 0:
            if math.isfinite(time) or walker.moves == 0:
                walker.load(runs, fit=math.isfinite(time))
            hot = RETENTION_HOT[-1 if self.is_large else self.coolings % len(RETENTION_HOT)]
            self.coolings += 1
            free = self.may_shift and hot <= WARMEST_SHIFTS
            walker.cool(hot, min(left, max(LEAST_COOLING, cooling)), deadline, free=free)
            if walker.best_time < time:
                best, time = walker.best(), walker.best_time
                runs = runs_of(self.over_runs.contraction.graph, best)
            if deadline.passed:
                break
        return walker.moves - begun, [] if best is None else [best]
