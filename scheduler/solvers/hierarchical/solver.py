"""Solve deep networks: each distinct block once, then combine the blocks exactly."""

from __future__ import annotations

import math

from scheduler.errors import UnsuitableProblemError
from scheduler.problem import Problem
from scheduler.schedule import Schedule
from scheduler.simulator import simulate
from scheduler.solution import Proposal, is_close_enough
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.dp.pruned_search import PrunedSearch
from scheduler.solvers.hierarchical.bound import OneCut
from scheduler.solvers.hierarchical.chain import BlockChain
from scheduler.solvers.hierarchical.graphs import block_graphs
from scheduler.solvers.hierarchical.modes import BlockModes
from scheduler.solvers.hierarchical.partition import partition
from scheduler.solvers.hierarchical.time_segments import TimeSegments
from scheduler.solvers.ilp.frontier import CutFrontier

LEAST_BLOCKS = 4
"""Fewest blocks for which this solver is used."""
MOST_KINDS = 16
"""Most distinct blocks that are solved one by one."""
MODE_LIMITS = 24
"""Number of steps from keeping nothing to keeping everything in a block; each step looks for one mode."""
MOST_EXCEEDING = 2
"""Number of schedules that do not fit and from which other solvers may go on."""
LONG_BLOCK = 500
"""From so many operations on, a block is long: hundreds of integer programs for it take more time than there is."""
_SEGMENTS_SHARE = 0.5
"""Share of the remaining time for segments of time."""
_CUT_SHARE = 0.6
"""Share of the remaining time for the cut at the peak."""
_MODES_SHARE = 0.5
"""Share of the remaining time for the modes of all blocks."""
_ANY_ORDER_SHARE = 0.5
"""Time for the bound over all orders, as a share of the time that the input order took."""
_MOST_CHAIN_SOLUTIONS = 16
_CHAIN_BUDGET_PRECISION = 1e-5
"""The chain's budget is found to within this share of the network's budget."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return a schedule in the input order, with bounds for that order and for any.

    The network is cut into blocks where few tensors cross from one operation to the next.
    First, at the moment after the forward when memory peaks, the integer program of `ilp`
    separates into one program per distinct block, and a knapsack combines their exact answers.
    If that schedule does not fit at other moments, each distinct block gets modes (what to
    keep, and how high its backward may peak), and `dp` finds the best sequence of modes and of
    forward runs that keep nothing. Simulation shows how far memory on the chain is from that
    of the network, and the chain's budget is adjusted until the network's budget is met.
    A long network without blocks, or with too many distinct or long ones, such as an unrolled
    recurrent one, is divided into segments of time instead (`TimeSegments`); and so is one whose
    blocks leave a gap.

    Guarantee: the bounds hold for every schedule; the schedule is optimal in the input order
    if its time equals the bound, as it usually does down to half of the memory. When: deep
    networks that separate into blocks, up to 10^5 operations, and long ones. Cost: a hundred
    small integer programs per distinct block, and a dynamic program over the blocks; one to
    ten integer programs over a long network. Memory: at most 512 MiB
    and 8 KiB an operation. Reference: after the hierarchical approach of Zhao et al. 2023
    (Rockmate), arXiv 2307.01236.

    Raises
    ------
    UnsuitableProblemError
        If the graph does not separate into blocks, or has alternatives.
    """
    if problem.floor.bytes > problem.budget_bytes:
        return Proposal(None, "input order", math.inf, math.inf, infeasible=True)
    if problem.baseline.peak_bytes <= problem.budget_bytes:
        return Proposal(problem.save_everything, "input order", problem.least_time, problem.least_time)
    search = _Search(problem, deadline)
    search.run()
    return search.proposal()


class _Search:
    """The steps of `propose`, and their best answer."""

    def __init__(self, problem: Problem, deadline: Deadline) -> None:
        self.problem, self.deadline = problem, deadline
        if any(len(task) > 1 for task in problem.graph.index.tasks):
            raise UnsuitableProblemError(
                '"hierarchical" does not support graphs with alternatives: use "auto", "ilp" or "dp"'
            )
        blocks = partition(problem.graph)
        separates = len(blocks) >= LEAST_BLOCKS and bool(blocks[-1].backward)
        if not separates and not TimeSegments.suits(problem.graph):
            raise UnsuitableProblemError(
                f'"hierarchical" needs a graph that separates into {LEAST_BLOCKS} blocks or more,'
                f' got {len(blocks)}: use "auto", "ilp" or "anneal"'
            )
        self.parts = block_graphs(problem.graph, blocks) if separates else ()
        longest = max((len(part.graph.operations) for part in self.parts), default=0)
        has_useful_blocks = separates and self.kinds <= MOST_KINDS and longest < LONG_BLOCK
        self.is_long = TimeSegments.suits(problem.graph) and not has_useful_blocks
        self.frontiers: dict[int, CutFrontier] = {}
        self.best: Schedule | None = None
        self.best_time = math.inf
        self.exceeding: dict[int, Schedule] = {}
        """Of the schedules that do not fit, those with the smallest peaks, by these."""
        self.bound = self.global_bound = problem.least_time

    def proposal(self) -> Proposal:
        """Return the best schedule with its bounds, or those that nearly fit."""
        bound = max(self.bound, self.global_bound)
        return Proposal(
            self.best,
            "input order",
            bound,
            self.global_bound,
            infeasible=math.isinf(self.global_bound) or (math.isinf(bound) and not self.problem.reorder),
            messages=("segments of time" if self.is_long else f"blocks: {len(self.parts)}, {self.kinds} distinct",),
            exceeding=() if self.best else tuple(self.exceeding.values()),
        )

    @property
    def kinds(self) -> int:
        """Number of distinct blocks."""
        return len({id(part.graph) for part in self.parts})

    @property
    def closed(self) -> bool:
        """Whether the best schedule is proven optimal in the input order, or within the problem's gap."""
        return is_close_enough(self.problem, self.best_time, self.bound)

    def run(self) -> None:
        """Solve the distinct blocks, unless too many are distinct or long, and segments where that leaves a gap."""
        if not self.is_long:
            self._solve_blocks()
        self._solve_segments()

    def _solve_segments(self) -> None:
        """Solve segments of time, if the graph is long and the answer not proven."""
        if TimeSegments.suits(self.problem.graph) and not self.closed and not math.isinf(self.bound):
            segments = TimeSegments(self.problem)
            segments.run(self.deadline.within(_SEGMENTS_SHARE * self.deadline.remaining), self._offer_segments)
            self.bound = max(self.bound, segments.bound)

    def _offer_segments(self, schedule: Schedule) -> int:
        """Offer a schedule, and report once several do not fit: other searches may go on from these."""
        peak = self._offer(schedule)
        if self.best is None and len(self.exceeding) == MOST_EXCEEDING:
            self.deadline.report(self.proposal())
        return peak

    def _solve_blocks(self) -> None:
        """Solve the cut and decode its answer; if that is not optimal, search over the chain of blocks."""
        deadline, begun = self.deadline, clock.now()
        cut = OneCut(self.problem, self.parts, self.frontiers, at_peak=True)
        cut.run(deadline.within(_CUT_SHARE * deadline.remaining))
        self.bound = max(self.bound, cut.bound)
        self._offer(cut.schedule())
        deadline.report(Proposal(self.best, "input order", self.bound))
        if not self.closed and not math.isinf(self.bound):
            self._search_chain(deadline)
        enough = self.problem.gap > 0 and self.closed
        if self.problem.reorder and not enough and not deadline.passed:
            free = OneCut(self.problem, self.parts, self.frontiers, at_peak=False)
            free.run(deadline.within(_ANY_ORDER_SHARE * (clock.now() - begun)), self.best_time)
            self.global_bound = free.bound

    def _offer(self, schedule: Schedule | None) -> int:
        """Simulate a schedule, keep it if it fits and is faster, and return its peak."""
        if schedule is None:
            return 0
        simulation = simulate(self.problem.graph, schedule)
        if simulation.peak_bytes > self.problem.budget_bytes:
            self.exceeding[simulation.peak_bytes] = schedule
            self.exceeding = {peak: self.exceeding[peak] for peak in sorted(self.exceeding)[:MOST_EXCEEDING]}
        elif simulation.time < self.best_time:
            self.best, self.best_time = schedule, simulation.time
        return simulation.peak_bytes

    def _search_chain(self, deadline: Deadline) -> None:
        """Bisect the chain's budget for the best schedule that fits the network's budget."""
        chain = BlockChain(self.problem.graph, self.parts, self._modes(deadline))
        budget = self.problem.budget_bytes
        chain_budget = budget - self.problem.graph.resident_bytes - chain.passing_bytes
        fitting, failing, step = -math.inf, math.inf, 0
        for _ in range(_MOST_CHAIN_SOLUTIONS):
            if self.closed or deadline.passed or failing - fitting <= _CHAIN_BUDGET_PRECISION * budget:
                break
            search = PrunedSearch(chain.chain, chain_budget, deadline)
            schedule = search.run()
            if schedule is None:
                if search.least_bytes <= chain_budget:
                    break  # out of time
                chain_budget = search.least_bytes
                continue
            spare = budget - self._offer(chain.expand(schedule))
            step = max(2 * step, abs(spare))
            if spare >= 0:
                fitting = chain_budget
                chain_budget = int((fitting + failing) / 2) if failing < math.inf else fitting + step
            elif chain_budget == search.least_bytes:
                break
            else:
                failing = chain_budget
                lower = max(search.least_bytes, chain_budget - step)
                chain_budget = int((failing + fitting) / 2) if fitting > -math.inf else lower

    def _modes(self, deadline: Deadline) -> dict[int, BlockModes]:
        """Return the modes of each distinct block, by id of its graph."""
        graphs = {id(part.graph): part for part in self.parts}
        modes: dict[int, BlockModes] = {}
        limit = deadline.within(_MODES_SHARE * deadline.remaining)
        for left, (key, part) in zip(range(len(graphs), 0, -1), graphs.items(), strict=True):
            share = limit.within(limit.remaining / left)
            cut = self.frontiers.setdefault(key, CutFrontier(part.graph, part.graph.index.task_of[part.marker]))
            modes[key] = BlockModes(part.graph, cut)
            modes[key].sample((cut.most_bytes * k // MODE_LIMITS for k in range(MODE_LIMITS + 1)), share)
            modes[key].lower(share)
        return modes
