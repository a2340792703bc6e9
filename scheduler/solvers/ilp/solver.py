"""Solve integer programs with lazily generated cuts; they usually prove their own answer."""

from __future__ import annotations

import math

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import Proposal, relative_gap
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.greedy import GreedySearch
from scheduler.solvers.ilp.cut_search import CutSearch
from scheduler.solvers.ilp.order_branches import LEAST_GAP, OrderBranches
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.reduction import Reduction

CLOSED_GAP = 1e-7
"""The search ends at this gap, or at that of the problem if it is larger."""
SLACK_SHARE = 0.4
"""Share of the problem's gap to which the first integer program is solved; the rest is left for decoding."""
MOST_OPERATIONS = 20_000
"""Precedence takes one bit per pair of tasks: for more operations, more than some hundred MB."""
MOST_PROGRAMS = 100
PROGRAM_SHARE = 0.95
"""Share of the remaining time for one integer program; its bound holds even if it is stopped early."""
SHARED_PROGRAM_SHARE, AGREED_PROGRAM_SHARE = 0.5, 0.7
"""The same for the input order while the other one needs programs too, and while its last program was one for both."""
LEAST_PROGRAM_SECONDS = 1.0
RELAXED_FIRST, FIRST_SHARE = 2_000, 0.8
"""From so many operations on, one program may take all the time, and bound hardly better than its relaxation: those for
any order come first, in this share of the time."""
REPAIR_SHARE, MOST_REPAIRED = 0.2, 3_000
"""Share of the remaining time to make a point that does not fit one that does, and most operations of a graph where
that is tried: in larger ones it takes as long as a program."""
INPUT_FACTOR, IDLE_FACTOR = 3.0, 2.0
"""When the two orders take turns, time for the input order counts so many times, since its bound holds for fewer
schedules; and so does time that did not raise a bound."""
FAR_GAP, FAR_SHARE = 0.5, 0.25
"""If the fastest known schedule exceeds the bound by more than the first share of its time after a program, a linear
relaxation for the input order follows, in the second share of the remaining time: its points lead other searches to
schedules that walks and greedy searches do not find."""
MOST_EXCEEDING = 3
"""So many of the last points that do not fit are passed on to other searches."""
LEAST_GLOBAL_SECONDS = 2.0
"""Least time for the bound over all orders once nothing is left to do for the input order. If the bound is then still
more than `LEAST_GAP` below the answer, it gets these seconds once more."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return a schedule, in the input order or in any, with the bound for its order and that for any.

    An integer program constrains memory only at some moments, the cuts: at first only at the
    peak of the save-everything step. Its optimum is a lower bound, and says which tensors to
    keep at the cuts. A walk through the operations keeps these and recomputes the others when
    they are needed. If simulation shows that this schedule fits and takes the time that the
    program claims, it is optimal; otherwise the prices of memory in a linear relaxation say
    which cuts the next program has (`CutSearch`). The two orders take turns; in large steps, those for
    any order come first while known schedules are far from the bound. For any order, pairs of tasks
    that may run in either order make branches (`OrderBranches`).

    Guarantee: the bounds hold for every schedule in the input order and in any order; the
    schedule is optimal in the input order if its time equals the bound, which is usually the
    case on training graphs. When: training graphs of up to some thousand operations. Cost: 0.01
    to 1 s for a program of few cuts at n <= 1000, which has about 2 n binaries per cut; many
    times as long for ten cuts. Memory: at most 512 MiB, for `MOST_OPERATIONS`. Reference: this
    package.

    Raises
    ------
    UnsuitableProblemError
        If the graph has more than `MOST_OPERATIONS` operations.
    """
    return ProgramSearch(problem).run(deadline)


class _Order:
    """What is known of one order of first runs: a schedule, a bound, and how much time that took.

    Parameters
    ----------
    space : str
        What the proposal calls it.
    search : CutSearch or OrderBranches
        What raises its bound.
    """

    def __init__(self, space: str, search: CutSearch | OrderBranches) -> None:
        self.space, self.search = space, search
        self.best: Schedule | None = None
        self.time = math.inf
        self.bound = 0.0
        self.programs = 0
        self.spent = 0.0
        """Seconds, more of those that did not raise the bound."""


class ProgramSearch:
    """The loop of `propose`: bound, decode, simulate, and choose the cuts of the next program.

    Parameters
    ----------
    problem : Problem
    most_programs : int
        For each order.
    repair : bool
        Whether points that do not fit are repaired by the greedy search, which needs compiled kernels.

    Raises
    ------
    UnsuitableProblemError
        As for `propose`.
    """

    def __init__(self, problem: Problem, most_programs: int = MOST_PROGRAMS, *, repair: bool = True) -> None:
        count = len(problem.graph.operations)
        if count > MOST_OPERATIONS:
            raise UnsuitableProblemError(
                f'"ilp" needs a graph of at most {MOST_OPERATIONS} operations, got {count}: use "auto" or "greedy"'
            )
        self.problem, self.most_programs = problem, most_programs
        self.repair = repair and count <= MOST_REPAIRED
        reduction = Reduction(problem.graph, absorbs=True)
        self.given = CutSearch(problem, Precedence(problem.graph, reorder=False), reduction)
        self.free = OrderBranches(problem, reduction, self.given)
        self.input, self.any = _Order("input order", self.given), _Order("any order", self.free)
        self.exceeding: list[Schedule] = []
        self._has_points = False
        """Whether the points of a relaxation for the input order are among them, or fit."""
        self._end: Deadline | None = None
        self._is_extended = False

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that no schedule fits."""
        return self.any.bound == math.inf or (not self.problem.reorder and self.input.bound == math.inf)

    def proposal(self) -> Proposal:
        """Return the faster one of the schedules for the two orders, with the bounds for its order and for any."""
        found = self.any if self.any.time < self.input.time else self.input
        messages = [f"cuts: {len(self.given.cuts)}"]
        if self.input.bound == math.inf and not self.infeasible:
            messages.append("proven: no schedule fits in the given order; another order may")
        return Proposal(
            found.best,
            found.space,
            bound=found.bound,
            global_bound=self.any.bound,
            infeasible=self.infeasible,
            messages=tuple(messages),
            exceeding=tuple(self.exceeding),
        )

    def relax(self, deadline: Deadline) -> Proposal:
        """Return the bound of relaxations for any order; in a small graph, where programs bound better, there are none.

        `run` goes on from there.
        """
        problem = self.problem
        is_large = len(problem.graph.operations) >= RELAXED_FIRST
        if problem.reorder and is_large and problem.floor.bytes <= problem.budget_bytes:
            self.free.relax(deadline)
            self._raise(self.free.bound)
        return self.proposal()

    def run(self, deadline: Deadline, known: float = math.inf) -> Proposal:
        """Search until the gap is closed, nothing is left to try, or time is up.

        `known` is the time of a schedule that has been found since the problem was made.
        """
        self.deadline, self._began = deadline, clock.now()
        self.free.known = min(self.free.known, known)
        problem = self.problem
        if problem.baseline.peak_bytes <= problem.budget_bytes:
            self._keep_if_better(problem.save_everything, self.input)
            if relative_gap(self.input.time, problem.least_time) <= CLOSED_GAP:
                self._raise(problem.least_time)
                return self.proposal()
        if problem.floor.bytes > problem.budget_bytes:
            self._raise(math.inf)
            return self.proposal()
        deadline.report(self.relax(deadline.within(FIRST_SHARE * deadline.remaining)))
        while (order := self._next_order()) is not None:
            self._raise_bound(order)
            if self._is_far:
                self._relax_given()
        return self.proposal()

    def _raise(self, bound: float) -> None:
        """Take over a bound for any order, which holds for the input order too."""
        self.any.bound = max(self.any.bound, bound)
        self.input.bound = max(self.input.bound, bound)

    @property
    def _is_far(self) -> bool:
        """Whether known schedules are so slow that points that do not fit are better starts for other searches."""
        bound = self.input.bound
        return not self._has_points and bound < math.inf and relative_gap(self.free.known, bound) > FAR_GAP

    def _relax_given(self) -> None:
        """Relax the program for the input order at many moments, and take over its bound and its points."""
        self._has_points = True
        program = self.given.relax(self.deadline.within(FAR_SHARE * self.deadline.remaining))
        self.input.bound = max(self.input.bound, self.given.bound)
        for schedule in self.given.points(program) if program else ():
            self._take(schedule, self.input)
        self.deadline.report(self.proposal())

    def _next_order(self) -> _Order | None:
        """Return the order that gets the next program; None ends the search."""
        if self.deadline.passed or self.infeasible or self._is_closed(min(self.input.time, self.any.time), self.any):
            return None
        if self._is_done(self.input):
            return self.any if self._needs_any_order() and self._has_global_time() else None
        shares = self.input.programs and self._needs_any_order()
        is_next = self.free.comes_first or self.any.spent <= INPUT_FACTOR * self.input.spent
        return self.any if shares and is_next else self.input

    def _has_global_time(self) -> bool:
        """Return whether the bound over all orders has time left, once nothing is left to do for the input order.

        It has as much time as all before it; if it is then still far below, some more.
        """
        if self._end is None:
            self._end = self.deadline.within(max(LEAST_GLOBAL_SECONDS, clock.now() - self._began))
        elif self._end.passed and not self._is_extended and relative_gap(self.input.time, self.any.bound) > LEAST_GAP:
            self._is_extended = True
            self._end = self.deadline.within(LEAST_GLOBAL_SECONDS)
        return not self._end.passed

    def _needs_any_order(self) -> bool:
        """Return whether any order needs a program that the next one for the input order does not replace."""
        replaces = self._do_orders_agree() and not self.free.comes_first
        return self.problem.reorder and not self._is_done(self.any) and not replaces

    def _is_done(self, order: _Order) -> bool:
        """Return whether an order needs no further program."""
        tried = order.search.is_exhausted or order.programs >= self.most_programs
        return tried or self._is_closed(order.time, order)

    def _is_closed(self, time: float, order: _Order) -> bool:
        bound = max(order.bound, self.problem.least_time)
        return bound == math.inf or relative_gap(time, bound) <= max(CLOSED_GAP, self.problem.gap)

    def _raise_bound(self, order: _Order) -> None:
        """Solve a program for an order, and take over its bound and its schedule."""
        search, began, known = order.search, clock.now(), order.bound
        share = PROGRAM_SHARE
        if order is self.input and self.problem.reorder and not self._is_done(self.any):
            share = AGREED_PROGRAM_SHARE if self._do_orders_agree() else SHARED_PROGRAM_SHARE
        limit = (self._end or self.deadline).within(max(LEAST_PROGRAM_SECONDS, share * self.deadline.remaining))
        schedule = search.raise_bound(limit, self._slack(order))
        order.programs += 1
        if order is self.any or self._do_orders_agree():
            self._raise(search.bound)
        order.bound = max(order.bound, search.bound)
        order.spent += (clock.now() - began) * (1.0 if order.bound > known else IDLE_FACTOR)
        if schedule is not None:
            self._take(schedule, order)
            if order is self.input and self.repair and not self._is_closed(order.time, order):
                self._repair()
        self.deadline.report(self.proposal())

    def _do_orders_agree(self) -> bool:
        """Return whether the last program for the input order is one for any order too."""
        given, free = self.given, self.free
        everything = (1 << len(self.problem.graph.index.tasks)) - 1
        return (
            bool(given.cuts)
            and free.precedence.chain(given.cuts) == given.cuts
            and all(
                free.precedence.before(cut) == given.precedence.before(cut)
                and free.precedence.after(cut) & everything == given.precedence.after(cut) & everything
                for cut in given.cuts
            )
        )

    def _slack(self, order: _Order) -> float:
        """Return by how much the point of the next program may exceed its bound: less with every program."""
        return SLACK_SHARE * self.problem.gap * self.problem.least_time * 0.5**order.programs

    def _repair(self) -> None:
        """Evict more tensors, greedily, until the last program's point for the input order fits."""
        greedy = GreedySearch(self.problem.graph, self.problem.budget_bytes)
        for cut, kept in zip(self.given.cuts, self.given.live, strict=True):
            greedy.evict_across(cut, kept)
        limit = self.deadline.within(REPAIR_SHARE * self.deadline.remaining)
        greedy.fit(limit)
        greedy.restore(limit)
        self._keep_if_better(greedy.schedule(), self.input)

    def _take(self, schedule: Schedule, order: _Order) -> None:
        """Keep the schedule of a point if it fits and is faster, or as one that does not fit."""
        if not self._keep_if_better(schedule, order):
            self.exceeding = [*self.exceeding, schedule][-MOST_EXCEEDING:]

    def _keep_if_better(self, schedule: Schedule, order: _Order) -> bool:
        """Keep a schedule if it fits and is faster; return whether it fits."""
        simulation = simulate(self.problem.graph, schedule)
        fits = simulation.peak_bytes <= self.problem.budget_bytes
        if fits and simulation.time < order.time:
            order.best, order.time = schedule, simulation.time
            self.free.known = min(self.free.known, simulation.time)
        return fits
