"""Lazily generated cuts: the solver that mostly proves its own answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.graph import Graph
from scheduler.problem import Problem, runs_of, working_set_bytes
from scheduler.schedule import Compute, Schedule, schedule_from_runs
from scheduler.simulator import Simulation, simulate
from scheduler.solution import Proposal, relative_gap
from scheduler.solvers.greedy import GreedySearch
from scheduler.solvers.registry import Deadline
from scheduler.solvers.relaxation import CutRelaxation, Precedence
from scheduler.solvers.walk import Walk

CLOSED = 1e-7
MOST_CUTS = 12
SHARE_OF_TIME = 0.8
"""Of the time left, what one programme may take: a bound cut short still holds."""
_WINDOWS = 24
_SHARE_OF_TRIALS = 0.15


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return a schedule in the given order, with bounds for that order and for any.

    An integer programme looks at the schedule only where the save-everything step needs most
    memory; its answer is a lower bound and says what to keep there. A walk through the
    given order keeps that and computes the rest again when it is needed. If the judge finds
    that it fits and costs what the programme claims, it is optimal; if not, the moment at
    which it fails becomes a further cut.

    Guarantee: the bounds hold for every schedule of the given order and of any order; the
    schedule is optimal in the given order when time and bound meet, which on training
    graphs they mostly do. When: training graphs of up to some thousand operations. Cost: one
    integer programme of about 2 n binaries per cut, 0.01 to 1 s at n <= 1000.
    """
    search = _Search(problem, deadline)
    search.run()
    bound_any = any_order_bound(problem, search.cuts, search.bound, deadline)
    infeasible = bound_any == math.inf or (problem.order == "given" and search.bound == math.inf)
    if search.bound == math.inf and not infeasible:
        search.messages.append("proven: no schedule fits in the given order; another order may")
    return Proposal(
        search.best,
        "given order",
        bound=search.bound,
        bound_any=bound_any,
        infeasible=infeasible,
        messages=tuple(search.messages),
    )


def any_order_bound(problem: Problem, cuts: Sequence[int], bound_given: float, deadline: Deadline) -> float:
    """Return a lower bound on the time of every schedule of any order; inf if none fits.

    Parameters
    ----------
    problem : Problem
    cuts : sequence of int
        Tasks, the most useful first; those that follow one another in every order are kept.
    bound_given : float
        What the same cuts prove in the given order: returned where both orders agree.
    deadline : Deadline
    """
    if not cuts:
        return bound_given
    graph = problem.graph
    given, free = Precedence(graph, "given"), Precedence(graph, "any")
    chain = free.chain(cuts)
    everything = (1 << len(graph.index.tasks)) - 1
    if len(chain) == len(cuts) and all(
        free.before(cut) == given.before(cut) and free.after(cut) == given.after(cut) & everything for cut in chain
    ):
        return bound_given
    return CutRelaxation(graph, free, chain, [problem.budget_bytes] * len(chain)).solve(deadline).bound


@dataclass
class _Search:
    """The loop: bound, decode, judge, add the cut that was missing."""

    problem: Problem
    deadline: Deadline
    best: Schedule | None = None
    best_time: float = math.inf
    bound: float = 0.0
    cuts: list[int] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    trials: list[tuple[float, int]] | None = None

    def run(self) -> None:
        """Search until the gap is closed, nothing is left to try, or time is up."""
        problem = self.problem
        if problem.baseline.peak_bytes <= problem.budget_bytes:
            self.best, self.best_time = problem.save_everything, problem.baseline.time
            if relative_gap(self.best_time, problem.least_time) <= CLOSED:
                self.bound = problem.least_time
                return
        if problem.floor.bytes > problem.budget_bytes:
            self.bound = math.inf
            return
        precedence = Precedence(problem.graph, "given")
        schedule, judged = problem.save_everything, problem.baseline
        while len(self.cuts) < MOST_CUTS and not self.deadline.passed:
            cut = self._next_cut(schedule, judged)
            if cut is None:
                break
            self.cuts.append(cut)
            chain = precedence.chain(self.cuts)
            budgets = [problem.budget_bytes] * len(chain)
            answer = CutRelaxation(problem.graph, precedence, chain, budgets).solve(self._slice())
            self.bound = max(self.bound, answer.bound)
            if answer.infeasible or answer.live is None:
                break
            schedule, judged = self._decode(chain, answer.live)
            if self._closed():
                break
            self._repair(chain, answer.live)
            if self._closed() or not answer.exact:
                break
        self.messages.append(f"cuts: {len(self.cuts)}")

    def _slice(self) -> Deadline:
        return self.deadline.within(max(1.0, SHARE_OF_TIME * self.deadline.remaining))

    def _closed(self) -> bool:
        return self.best is not None and relative_gap(self.best_time, self.bound) <= CLOSED

    def _decode(self, chain: list[int], live: Sequence[frozenset[int]]) -> tuple[Schedule, Simulation]:
        """Turn the programme's point into a schedule, and judge it."""
        schedule = decode(self.problem.graph, chain, live)
        return schedule, self._keep_if_better(schedule)

    def _repair(self, chain: list[int], live: Sequence[frozenset[int]]) -> None:
        """Evict more, greedily, until the programme's point fits."""
        greedy = GreedySearch(self.problem.graph, self.problem.budget_bytes)
        for cut, kept in zip(chain, live, strict=True):
            greedy.evict_across(cut, kept)
        greedy.fit(self.deadline)
        greedy.restore(self.deadline)
        self._keep_if_better(greedy.schedule())

    def _keep_if_better(self, schedule: Schedule) -> Simulation:
        judged = simulate(self.problem.graph, schedule)
        if judged.peak_bytes <= self.problem.budget_bytes and judged.time < self.best_time:
            self.best, self.best_time = schedule, judged.time
        return judged

    def _next_cut(self, schedule: Schedule, judged: Simulation) -> int | None:
        """Return the task to look at next: where the schedule peaks; from the third on, where it pays most."""
        if len(self.cuts) >= 2:
            if self.trials is None:
                self.trials = self._try_pairs()
            taken = {self._window(cut) for cut in self.cuts}
            for gain, task in self.trials:
                window = self._window(task)
                if gain > 0 and not taken & {window - 1, window, window + 1}:
                    return task
        firsts = first_runs(self.problem.graph, schedule)
        peak = int(judged.memory.argmax())
        around = sorted(firsts, key=lambda task: (firsts[task] < peak, abs(firsts[task] - peak)))
        behind = sorted(firsts, key=lambda task: (firsts[task] > peak, abs(firsts[task] - peak)))
        for task in (around[0], behind[0]):
            if task not in self.cuts:
                return task
        return None

    def _try_pairs(self) -> list[tuple[float, int]]:
        """Return what each of some tasks adds to the bound of the first cut alone, the most first.

        The tasks are those with the largest working set in each of some windows of the order.
        """
        graph, first = self.problem.graph, self.cuts[0]
        precedence = Precedence(graph, "given")
        needs = [working_set_bytes(graph, operations[0]) for operations in graph.index.tasks]
        champions: dict[int, int] = {}
        for task in sorted(range(len(needs)), key=needs.__getitem__, reverse=True):
            champions.setdefault(self._window(task), task)
        deadline = self.deadline.within(_SHARE_OF_TRIALS * self.deadline.remaining)
        alone = self._bound_of(precedence, [first], deadline)
        gains = [
            (self._bound_of(precedence, sorted((first, task)), deadline) - alone, task)
            for task in champions.values()
            if task != first and not deadline.passed
        ]
        return sorted(gains, reverse=True)

    def _bound_of(self, precedence: Precedence, cuts: list[int], deadline: Deadline) -> float:
        budgets = [self.problem.budget_bytes] * len(cuts)
        programme = CutRelaxation(self.problem.graph, precedence, cuts, budgets)
        answer = programme.solve(deadline.within(deadline.remaining / 3))
        self.bound = max(self.bound, answer.bound)
        return answer.bound

    def _window(self, task: int) -> int:
        return task * _WINDOWS // len(self.problem.graph.index.tasks)


def decode(graph: Graph, chain: Sequence[int], live: Sequence[frozenset[int]]) -> Schedule:
    """Return the schedule that keeps exactly these tensors at the cuts.

    The walk follows the given order; at a cut it makes sure of the tensors to keep and
    drops the others, and before each operation it computes again what is missing.

    Parameters
    ----------
    graph : Graph
    chain : sequence of int
        Tasks, ascending.
    live : sequence of frozenset of int
        Tensors to keep when each of them first runs.
    """
    index = graph.index
    keep = dict(zip(chain, live, strict=True))
    walk = Walk(graph)
    for i in index.defaults:
        task = index.task_of[i]
        if task in keep:
            walk.ensure(t for t in keep[task] if walk.can_make(t))
            walk.keep_only(keep[task])
        walk.run(i)
    walk.ensure(t for t, result in enumerate(index.is_result) if result)
    return schedule_from_runs(graph, walk.runs)


def first_runs(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """Return the position of the verb at which each task first runs."""
    index = graph.index
    firsts: dict[int, int] = {}
    runs = iter(runs_of(graph, schedule))
    for position, verb in enumerate(schedule):
        if isinstance(verb, Compute):
            firsts.setdefault(index.task_of[next(runs)], position)
    return firsts
