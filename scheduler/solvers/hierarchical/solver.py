"""Deep networks: equal blocks are solved once, put together exactly, and polished."""

from __future__ import annotations

import math

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import TOLERANCE, Proposal, relative_gap
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.dp.pruned_search import PrunedSearch
from scheduler.solvers.hierarchical.bound import OneCut
from scheduler.solvers.hierarchical.chain import BlockChain
from scheduler.solvers.hierarchical.graphs import block_graphs
from scheduler.solvers.hierarchical.modes import BlockModes
from scheduler.solvers.hierarchical.partition import partition
from scheduler.solvers.ilp.frontier import CutFrontier

LEAST_BLOCKS = 4
LIMITS = 24
"""Numbers of bytes to keep in a block, from none to all, for which a mode is sought."""
_SHARE_OF_CUT, _SHARE_OF_MODES = 0.6, 0.5
_SHARE_OF_ANY_ORDER = 0.5
"""For the bound over all orders: of the time that the input order took."""
_TRIES = 16
_PRECISION = 1e-5


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return a schedule in the input order, with bounds for that order and for any.

    The network is cut where little passes from one operation to the next. First the step is
    looked at when its memory peaks after the forward: there the program of `ilp` falls
    apart into one for each distinct block, whose exact answers a knapsack puts together. If
    what that says does not fit elsewhere, each distinct block gets modes (what to keep, how
    high its backward may peak), and `dp` finds the best sequence of modes and of forward
    runs that keep nothing; the judge says by how much memory on the chain is off, and the
    chain's budget is moved until the network's is met.

    Guarantee: the bounds hold for every schedule; the schedule is optimal in the input order
    where they meet, as they mostly do down to half of the memory. When: deep networks whose
    forward falls apart, up to 10^5 operations. Cost: a hundred small programs per distinct
    block, and a chain program in the number of blocks. Memory: at most 512 MiB and 8 KiB an
    operation. Reference: after the hierarchical approach of Zhao et al. 2023 (Rockmate), arXiv
    2307.01236.

    Raises
    ------
    UnsuitableProblemError
        If the graph does not fall apart into blocks, or has alternatives.
    """
    if problem.floor.bytes > problem.budget_bytes:
        return Proposal(None, "input order", math.inf, math.inf, infeasible=True)
    if problem.baseline.peak_bytes <= problem.budget_bytes:
        return Proposal(problem.save_everything, "input order", problem.least_time, problem.least_time)
    search = _Search(problem, deadline)
    search.run()
    messages = (f"blocks: {len(search.parts)}, {len({id(part.graph) for part in search.parts})} distinct",)
    return Proposal(
        search.best,
        "input order",
        max(search.bound, search.global_bound),
        search.global_bound,
        infeasible=math.isinf(search.global_bound) or (math.isinf(search.bound) and not problem.reorder),
        messages=messages,
    )


class _Search:
    """The steps of `propose`, and what they found."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self.problem, self.deadline = problem, deadline
        if any(len(task) > 1 for task in problem.graph.index.tasks):
            raise UnsuitableProblemError(
                '"hierarchical" takes no alternatives to operations: use "auto", "ilp" or "dp"'
            )
        blocks = partition(problem.graph)
        if len(blocks) < LEAST_BLOCKS or not blocks[-1].backward:
            raise UnsuitableProblemError(
                f'"hierarchical" is for graphs that fall apart into {LEAST_BLOCKS} blocks or more, and this one has'
                f' {len(blocks)}: use "auto", "ilp" or "anneal"'
            )
        self.parts = block_graphs(problem.graph, blocks)
        self.frontiers: dict[int, CutFrontier] = {}
        self.best: Schedule | None = None
        self.best_time = math.inf
        self.bound = self.global_bound = problem.least_time

    @property
    def closed(self) -> bool:
        """Whether the best schedule is proven optimal in the input order."""
        return relative_gap(self.best_time, self.bound) <= TOLERANCE

    def run(self) -> None:
        """Bound, decode, and if that does not fit, go by way of the chain."""
        begun = clock.now()
        cut = OneCut(self.problem, self.parts, self.frontiers, at_peak=True)
        cut.run(self.deadline.within(_SHARE_OF_CUT * self.deadline.remaining))
        self.bound = cut.bound
        self._offer(cut.schedule())
        if not self.closed and not math.isinf(self.bound):
            self._by_chain()
        if self.problem.reorder and not self.deadline.passed:
            free = OneCut(self.problem, self.parts, self.frontiers, at_peak=False)
            free.run(self.deadline.within(_SHARE_OF_ANY_ORDER * (clock.now() - begun)), self.best_time)
            self.global_bound = free.bound

    def _offer(self, schedule: Schedule | None) -> int:
        """Judge a schedule, keep it if it fits and is faster, and return its peak."""
        if schedule is None:
            return 0
        simulated = simulate(self.problem.graph, schedule)
        if simulated.peak_bytes <= self.problem.budget_bytes and simulated.time < self.best_time:
            self.best, self.best_time = schedule, simulated.time
        return simulated.peak_bytes

    def _by_chain(self) -> None:
        chain = BlockChain(self.problem.graph, self.parts, self._modes())
        budget = self.problem.budget_bytes
        room = budget - self.problem.graph.resident_bytes - chain.passing_bytes
        fitting, failing, step = -math.inf, math.inf, 0
        for _ in range(_TRIES):
            if self.deadline.passed or failing - fitting <= _PRECISION * budget:
                break
            search = PrunedSearch(chain.chain, room, self.deadline)
            schedule = search.run()
            if schedule is None:
                if search.least_bytes <= room:
                    break  # out of time
                room = search.least_bytes
                continue
            off = budget - self._offer(chain.expand(schedule))
            step = max(2 * step, abs(off))
            if off >= 0:
                fitting = room
                room = int((room + failing) / 2) if failing < math.inf else room + step
            elif room == search.least_bytes:
                break
            else:
                failing = room
                room = int((room + fitting) / 2) if fitting > -math.inf else max(search.least_bytes, room - step)

    def _modes(self) -> dict[int, BlockModes]:
        graphs = {id(part.graph): part for part in self.parts}
        modes: dict[int, BlockModes] = {}
        deadline = self.deadline.within(_SHARE_OF_MODES * self.deadline.remaining)
        for left, (key, part) in zip(range(len(graphs), 0, -1), graphs.items(), strict=True):
            share = deadline.within(deadline.remaining / left)
            cut = self.frontiers.setdefault(key, CutFrontier(part.graph, part.graph.index.task_of[part.marker]))
            modes[key] = BlockModes(part.graph, cut)
            modes[key].sample((cut.most_bytes * k // LIMITS for k in range(LIMITS + 1)), share)
            modes[key].lower(share)
        return modes
