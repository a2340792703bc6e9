"""The default: the fast methods first, then those that prove and those that search, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from threading import TIMEOUT_MAX, Lock

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule, follows_input_order
from scheduler.simulator import simulate
from scheduler.solution import TOLERANCE, Proposal, relative_gap
from scheduler.solvers.anneal import solver as anneal
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.ilp import solver as ilp
from scheduler.solvers.registry import Propose, load_solver
from scheduler.solvers.smallest_peak import smallest_peak, squeeze

QUICK = ("save-all", "greedy", "segments")
PARTS = ("dp", *QUICK, "ilp", "hierarchical", "anneal")
WORTH_CUTTING, DEEP, VERY_DEEP = 500, 3_000, 30_000
"""Operations from which on `hierarchical` helps, comes first, and from which on nothing else is of use."""
SHARE_OF_BLOCKS = 0.2
"""Of the time, where `ilp` did not end the matter by itself."""
HEAD_START, SHARE_OF_HEAD_START = 4.0, 0.4
"""Seconds, and share of the time, that `ilp` has alone: mostly it needs no more."""
SHORT = 25.0
"""Seconds; with less, annealing leaves `ilp` a core of its own."""
SHARE_OF_FIRST_ROUND = 0.9
LEAST_SECOND_LOOK, SECOND_LOOK = 1.0, 2.0
"""For other schedules, once the search space of the answer is settled: seconds, and times what that took."""
WORTH_A_LOOK, WORTH_ALL_OF_IT = 1e-4, 5e-3
"""Shares of the step's time that other schedules may save at most: for less than the first none is looked for
then, for less than the second little longer than the least."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the best answer of several solvers, with the best bounds of all.

    Chains go to `dp`, whose answer stands unless another solver beats it. Otherwise the
    quick methods give a first answer, `ilp` proves it or finds a better one, and where a
    gap remains `hierarchical`, if the graph falls apart, and `anneal` search beside it, and once
    more from the best of all. Deep networks go to `hierarchical` first, and there the matter ends
    where it proves its answer.

    Guarantee: never worse than its parts in the time that each has, and a schedule wherever
    `minimum_budget` knows one. Search space: that of the part that found the answer. When:
    always. Memory: at most 768 MiB and 8 KiB an operation.
    """
    best = _Best(problem)
    if problem.chain is not None:
        best.ask("dp", deadline, seed, SHARE_OF_FIRST_ROUND)
        deadline = best.second_look(deadline)
    search = deadline.within(SHARE_OF_FIRST_ROUND * deadline.remaining)
    operations = len(problem.graph.operations)
    if problem.chain is None and operations >= DEEP:
        best.ask("hierarchical", search, seed)
        if best.schedule is not None and (best.settled or operations >= VERY_DEEP):
            return best.proposal()
    for name in QUICK:
        best.ask(name, search, seed)
    if best.schedule is None and not best.finished:
        best.offer(smallest_peak(problem, search)[1])
    with ThreadPoolExecutor(2) as pool:
        proof = pool.submit(best.search, ilp.search, search, seed)
        wait([proof], timeout=min(HEAD_START, SHARE_OF_HEAD_START * search.remaining))
        if not proof.done():
            if problem.chain is None and WORTH_CUTTING <= operations < DEEP:
                best.ask("hierarchical", search, seed, SHARE_OF_BLOCKS)
            walkers = 1 if search.remaining < SHORT else anneal.WALKERS
            walk = pool.submit(best.search, partial(anneal.search, walkers=walkers), search, seed)
            wait([proof])
            wait([walk], timeout=min(best.second_look(search).remaining, TIMEOUT_MAX))
            search.stop()
            walk.result()
        proof.result()
    best.search(anneal.search, best.second_look(deadline), seed + 1)
    if best.schedule is None and not best.finished:
        best.offer(squeeze(problem, deadline)[1], "any order")
    return best.proposal()


@dataclass
class _Best:
    """The best answer so far, and all that is proven."""

    problem: Problem
    schedule: Schedule | None = None
    space: str = "input order"
    time: float = math.inf
    bounds: dict[str, float] = field(default_factory=dict)
    global_bound: float = 0.0
    infeasible: bool = False
    messages: list[str] = field(default_factory=list)
    cuts: tuple[int, ...] = ()
    begun: float = field(default_factory=clock.now)
    end: float = math.inf
    """Of the second look, once there is one."""
    _lock: Lock = field(default_factory=Lock)

    @property
    def settled(self) -> bool:
        """Whether the answer is proven optimal in its own search space."""
        return relative_gap(self.time, max(self.bounds.get(self.space, 0.0), self.global_bound)) <= TOLERANCE

    def second_look(self, deadline: Deadline) -> Deadline:
        """Return the time for what lies outside the search space of the answer: short once that is settled."""
        if not self.settled:
            return deadline
        gain, now = relative_gap(self.time, self.global_bound), clock.now()
        if gain <= WORTH_A_LOOK:
            return deadline.within(0.0)
        more = SECOND_LOOK * (now - self.begun) * min(1.0, gain / WORTH_ALL_OF_IT)
        self.end = min(self.end, now + LEAST_SECOND_LOOK + more)
        return deadline.within(self.end - now)

    @property
    def finished(self) -> bool:
        """Whether nothing better can come."""
        if self.infeasible or relative_gap(self.time, max(self.global_bound, self.problem.least_time)) <= TOLERANCE:
            return True
        return not self.problem.reorder and self.space == "input order" and self.settled

    def ask(self, name: str, deadline: Deadline, seed: int, share: float = 1.0) -> None:
        """Take over what the solver of that name finds and proves in a share of the time."""
        self.take(load_solver(name), deadline, seed, share)

    def take(self, propose: Propose, deadline: Deadline, seed: int, share: float = 1.0) -> None:
        """Take over what a solver finds and proves in a share of the time, unless all is done or time is up."""
        if self.finished or deadline.passed:
            return
        starts = self.problem.starts if self.schedule is None else (self.schedule, *self.problem.starts)
        part = deadline.within(share * deadline.remaining)
        with suppress(UnsuitableProblemError):
            proposal = propose(replace(self.problem, starts=starts), deadline=part, seed=seed)
            self.messages += proposal.messages
            self.cuts = self.cuts or proposal.cuts
            self.hear(proposal, deadline)

    def search(self, search: Callable[..., Proposal], deadline: Deadline, seed: int) -> None:
        """Take over what a search finds and proves, while it goes on."""
        self.take(partial(search, report=partial(self.hear, deadline=deadline)), deadline, seed)

    def hear(self, proposal: Proposal, deadline: Deadline) -> None:
        """Take over what is found and proven; whatever finishes the matter stops those who share the deadline."""
        with self._lock:
            self.bounds[proposal.search_space] = max(self.bounds.get(proposal.search_space, 0.0), proposal.bound)
            self.global_bound = max(self.global_bound, proposal.global_bound)
            self.infeasible = self.infeasible or proposal.infeasible
            self.offer(proposal.schedule, proposal.search_space)
            if self.finished:
                deadline.stop()

    def offer(self, schedule: Schedule | None, space: str = "input order") -> None:
        """Judge a schedule, and keep it if it fits and is faster."""
        if schedule is None:
            return
        simulated = simulate(self.problem.graph, schedule)
        if space == "any order" and follows_input_order(self.problem.graph, schedule):
            space = "input order"
        # Of equal answers, one in the input order has the stronger bounds.
        rank, own_rank = (simulated.time, space == "any order"), (self.time, self.space == "any order")
        if simulated.peak_bytes <= self.problem.budget_bytes and rank < own_rank:
            self.schedule, self.time, self.space = schedule, simulated.time, space

    def proposal(self) -> Proposal:
        """Return the best answer with the bounds of its search space."""
        bound = max(self.bounds.get(self.space, 0.0), self.global_bound)
        schedule = None if self.infeasible else self.schedule
        return Proposal(
            schedule,
            self.space,
            bound,
            self.global_bound,
            infeasible=self.infeasible,
            messages=tuple(self.messages),
            cuts=self.cuts,
        )
