"""Solve an integer program with lazily generated cuts; it usually proves its own answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem, working_set_bytes
from scheduler.schedule import Schedule, first_runs
from scheduler.simulator import Simulation, simulate
from scheduler.solution import Proposal, relative_gap
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.greedy import GreedySearch
from scheduler.solvers.ilp.any_order import AnyOrderBound
from scheduler.solvers.ilp.decoding import decode
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation

CLOSED_GAP = 1e-7
"""The search ends at this gap, or at that of the problem if it is larger."""
SLACK_SHARE = 0.4
"""Share of the problem's gap to which the first integer program is solved; the rest is left for decoding."""
MOST_OPERATIONS = 20_000
"""Precedence takes one bit per pair of tasks: for more operations, more than some hundred MB."""
MOST_CUTS = 16
PROGRAM_SHARE = 0.95
"""Share of the remaining time for one integer program; its bound holds even if it is stopped early."""
SHARED_PROGRAM_SHARE = 0.5
"""The same while the bound over all orders needs programs too."""
GLOBAL_SHARE = 0.2
"""Share of the remaining time for a further cut of the bound over all orders."""
IDLE_FACTOR = 2.0
"""Time that did not raise a bound counts so many times when the two bounds take turns."""
LEAST_GLOBAL_SECONDS = 1.0
"""Least time for that bound after the search."""
_WINDOWS = 24
"""The order is divided into so many windows; a task within one window's length of a cut is near it."""
_TRIALS_SHARE = 0.15
"""Share of the remaining time to find what each candidate adds to the bound."""
_FAR_OVER_BUDGET = 1.2
"""The peak of a schedule is a good next cut unless it exceeds this multiple of the budget."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return a schedule in the input order, with bounds for that order and for any.

    An integer program constrains memory only at the peak of the save-everything step; its
    answer is a lower bound, and the set of tensors to keep there. A walk through the input
    order keeps these tensors and recomputes the others when they are needed. If simulation
    shows that the schedule fits and takes the time that the program claims, it is optimal;
    otherwise the moment at which it fails becomes a further cut. The bound over all orders has
    cuts of its own, `AnyOrderBound`.

    Guarantee: the bounds hold for every schedule in the input order and in any order; the
    schedule is optimal in the input order if its time equals the bound, which is usually the
    case on training graphs. When: training graphs of up to some thousand operations. Cost: one
    integer program of about 2 n binaries per cut, 0.01 to 1 s at n <= 1000. Memory: at most
    512 MiB, for `MOST_OPERATIONS`. Reference: this package.

    Raises
    ------
    UnsuitableProblemError
        If the graph has more than `MOST_OPERATIONS` operations.
    """
    return propose_with_cuts(problem, deadline, MOST_CUTS)


def propose_with_cuts(problem: Problem, deadline: Deadline, most_cuts: int, *, repair: bool = True) -> Proposal:
    """Return what `propose` finds with at most so many cuts.

    Without `repair`, points that do not fit are not repaired by the greedy search, which needs compiled kernels.

    Raises
    ------
    UnsuitableProblemError
        As for `propose`.
    """
    count = len(problem.graph.operations)
    if count > MOST_OPERATIONS:
        raise UnsuitableProblemError(
            f'"ilp" needs a graph of at most {MOST_OPERATIONS} operations, got {count}: use "auto" or "greedy"'
        )
    found = _Search(problem, deadline, repair)
    found.run(most_cuts)
    if found.bound == math.inf and not found.infeasible:
        found.messages.append("proven: no schedule fits in the input order; another order may")
    return found.proposal()


@dataclass
class _Search:
    """The loop of `propose`: bound, decode, simulate, add the missing cut."""

    problem: Problem
    deadline: Deadline
    repair: bool = True
    best: Schedule | None = None
    best_time: float = math.inf
    bound: float = 0.0
    global_bound: float = 0.0
    cuts: list[int] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    gains: dict[int, float] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=lambda: {"input order": 0.0, "any order": 0.0})
    _began: float = field(default_factory=clock.now)

    @cached_property
    def input_order(self) -> Precedence:
        """Precedence in the input order."""
        return Precedence(self.problem.graph, reorder=False)

    @cached_property
    def any_order(self) -> Precedence:
        """Precedence in any order."""
        return Precedence(self.problem.graph, reorder=True)

    @cached_property
    def any_order_bound(self) -> AnyOrderBound:
        """The bound over all orders, with cuts of its own."""
        return AnyOrderBound(self.problem, self.any_order)

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that no schedule fits."""
        return self.global_bound == math.inf or (not self.problem.reorder and self.bound == math.inf)

    def proposal(self) -> Proposal:
        """Return the best schedule and bounds so far."""
        return Proposal(
            self.best,
            "input order",
            bound=self.bound,
            global_bound=self.global_bound,
            infeasible=self.infeasible,
            messages=tuple(self.messages),
            cuts=tuple(self.cuts),
        )

    def run(self, most_cuts: int) -> None:
        """Search until the gap is closed, nothing is left to try, or time is up."""
        problem = self.problem
        if problem.baseline.peak_bytes <= problem.budget_bytes:
            self.best, self.best_time = problem.save_everything, problem.baseline.time
            if relative_gap(self.best_time, problem.least_time) <= CLOSED_GAP:
                self.bound = self.global_bound = problem.least_time
                return
        if problem.floor.bytes > problem.budget_bytes:
            self.bound = self.global_bound = math.inf
            return
        schedule, simulation = problem.save_everything, problem.baseline
        while len(self.cuts) < most_cuts and not self.deadline.passed:
            if self._is_turn_of_any_order():
                self._raise_global_bound()
                continue
            cut = self._next_cut(schedule, simulation)
            if cut is None:
                break
            began, known = clock.now(), self.bound
            self.cuts.append(cut)
            chain = self.input_order.chain(self.cuts)
            answer = self._program(self.input_order, chain).solve(self._slice(), self._slack())
            self.bound = max(self.bound, answer.bound)
            if self._orders_agree(chain):
                self.global_bound = max(self.global_bound, answer.bound)
            self.deadline.report(self.proposal())
            if answer.infeasible or answer.live is None:
                break
            schedule, simulation = self._decode(chain, answer.live)
            if self._closed():
                break
            if self.repair:
                self._repair(chain, answer.live)
            if self._closed() or not answer.exact:
                break
            self.deadline.report(self.proposal())
            self._count("input order", began, self.bound > known)
        self.deadline.report(self.proposal())
        self._raise_global_bound_to_the_answer()
        self.messages.append(f"cuts: {len(self.cuts)}")

    def _is_turn_of_any_order(self) -> bool:
        """Return whether the bound over all orders gets the next program: the two share time by what has paid."""
        if not self.problem.reorder or not self.cuts or self.infeasible or self._is_any_order_exhausted:
            return False
        spent = self._spent["any order"] <= self._spent["input order"]
        return spent and not self._orders_agree(self.input_order.chain(self.cuts))

    def _count(self, order: str, began: float, has_risen: bool) -> None:
        self._spent[order] += (clock.now() - began) * (1.0 if has_risen else IDLE_FACTOR)

    def _raise_global_bound_to_the_answer(self) -> None:
        """Add cuts to the bound over all orders while a gap is left: for as long as the search has taken."""
        least = LEAST_GLOBAL_SECONDS if self.problem.reorder else 0.0
        end = self.deadline.within(max(least, clock.now() - self._began))
        while self.cuts and not (self._is_closed_in_any_order() or self._is_any_order_exhausted or end.passed):
            self._raise_global_bound(end)

    @property
    def _is_any_order_exhausted(self) -> bool:
        return self.any_order_bound.is_exhausted or len(self.any_order_bound.cuts) >= MOST_CUTS

    def _raise_global_bound(self, deadline: Deadline | None = None) -> None:
        """Solve a program of the bound over all orders, whose points are answers too."""
        deadline, began, bound = deadline or self.deadline, clock.now(), self.any_order_bound
        share, known = GLOBAL_SHARE if bound.cuts else 1.0, bound.bound
        for schedule in bound.raise_bound(self.cuts, deadline.within(share * deadline.remaining), self._slack()):
            self._keep_if_better(schedule)
        self.global_bound = max(self.global_bound, bound.bound)
        self.bound = max(self.bound, self.global_bound)
        self._count("any order", began, bound.bound > known)
        self.deadline.report(self.proposal())

    def _is_closed_in_any_order(self) -> bool:
        closed_gap = max(CLOSED_GAP, self.problem.gap)
        bound = max(self.global_bound, self.problem.least_time)
        return self.infeasible or (self.best is not None and relative_gap(self.best_time, bound) <= closed_gap)

    def _orders_agree(self, chain: list[int]) -> bool:
        """Return whether the program over these cuts is the same for the input order and for any order."""
        everything = (1 << len(self.problem.graph.index.tasks)) - 1
        return self.any_order.chain(self.cuts) == chain and all(
            self.any_order.before(cut) == self.input_order.before(cut)
            and self.any_order.after(cut) & everything == self.input_order.after(cut) & everything
            for cut in chain
        )

    def _program(self, precedence: Precedence, chain: list[int]) -> CutRelaxation:
        budgets = [self.problem.budget_bytes] * len(chain)
        return CutRelaxation(self.problem.graph, precedence, chain, budgets, self.deadline)

    def _slice(self) -> Deadline:
        waits = self.problem.reorder and not self._is_any_order_exhausted
        share = SHARED_PROGRAM_SHARE if waits else PROGRAM_SHARE
        return self.deadline.within(max(1.0, share * self.deadline.remaining))

    def _slack(self) -> float:
        """Return by how much the point of the next program may exceed its bound: less with every cut."""
        return SLACK_SHARE * self.problem.gap * self.problem.least_time * 0.5 ** (len(self.cuts) - 1)

    def _closed(self) -> bool:
        closed_gap = max(CLOSED_GAP, self.problem.gap)
        return self.best is not None and relative_gap(self.best_time, self.bound) <= closed_gap

    def _decode(self, chain: list[int], live: Sequence[frozenset[int]]) -> tuple[Schedule, Simulation]:
        """Turn the program's point into a schedule, and simulate it."""
        schedule = decode(self.problem.graph, chain, live)
        return schedule, self._keep_if_better(schedule)

    def _repair(self, chain: list[int], live: Sequence[frozenset[int]]) -> None:
        """Evict more tensors, greedily, until the program's point fits."""
        greedy = GreedySearch(self.problem.graph, self.problem.budget_bytes)
        for cut, kept in zip(chain, live, strict=True):
            greedy.evict_across(cut, kept)
        greedy.fit(self.deadline)
        greedy.restore(self.deadline)
        self._keep_if_better(greedy.schedule())

    def _keep_if_better(self, schedule: Schedule) -> Simulation:
        simulation = simulate(self.problem.graph, schedule)
        if simulation.peak_bytes <= self.problem.budget_bytes and simulation.time < self.best_time:
            self.best, self.best_time = schedule, simulation.time
        return simulation

    def _next_cut(self, schedule: Schedule, simulation: Simulation) -> int | None:
        """Return the task of the next cut: where the schedule peaks, or elsewhere if a cut is near."""
        firsts = first_runs(self.problem.graph, schedule)
        peak = int(simulation.memory.argmax())
        around = min(firsts, key=lambda task: (firsts[task] < peak, abs(firsts[task] - peak)))
        behind = min(firsts, key=lambda task: (firsts[task] > peak, abs(firsts[task] - peak)))
        far = simulation.peak_bytes > _FAR_OVER_BUDGET * self.problem.budget_bytes
        if len(self.cuts) >= 2 and far and self._is_near_a_cut(around):
            shared = [task for task in self.problem.cuts if not self._is_near_a_cut(task)]
            if shared:
                return shared[0]
            self._try_pairs([self._last_over(firsts, simulation), *self._largest_of_windows()])
            gains = {task: gain for task, gain in self.gains.items() if gain > 0 and not self._is_near_a_cut(task)}
            if gains:
                return max(gains, key=lambda task: gains[task])
        highest = sorted(firsts, key=lambda task: simulation.memory[firsts[task]], reverse=True)
        return next((task for task in (around, behind, *highest) if task not in self.cuts), None)

    def _last_over(self, firsts: dict[int, int], simulation: Simulation) -> int:
        """Return the last task, from the peak on, before first runs fit the budget again."""
        peak, last = int(simulation.memory.argmax()), -1
        for task in sorted(firsts, key=firsts.__getitem__):
            if last >= 0 and firsts[task] >= peak and simulation.memory[firsts[task]] <= self.problem.budget_bytes:
                break
            last = task
        return last

    def _is_near_a_cut(self, task: int) -> bool:
        return any(abs(task - cut) * _WINDOWS < len(self.problem.graph.index.tasks) for cut in self.cuts)

    def _largest_of_windows(self) -> list[int]:
        """Return the task with the largest working set in each window of the order, largest first."""
        graph = self.problem.graph
        needs = [working_set_bytes(graph, operations[0]) for operations in graph.index.tasks]
        largest: dict[int, int] = {}
        for task in sorted(range(len(needs)), key=needs.__getitem__, reverse=True):
            largest.setdefault(task * _WINDOWS // len(needs), task)
        return list(largest.values())

    def _try_pairs(self, tasks: Sequence[int]) -> None:
        """Find by how much each task, as a second cut, raises the bound of the first cut alone."""
        first = self.cuts[0]
        deadline = self.deadline.within(_TRIALS_SHARE * self.deadline.remaining)
        self.gains.setdefault(first, self._bound_of([first], deadline))
        for task in tasks:
            if task not in self.gains and not deadline.passed:
                self.gains[task] = self._bound_of(sorted((first, task)), deadline) - self.gains[first]

    def _bound_of(self, chain: list[int], deadline: Deadline) -> float:
        answer = self._program(self.input_order, chain).solve(deadline.within(deadline.remaining / 3))
        self.bound = max(self.bound, answer.bound)
        return answer.bound
