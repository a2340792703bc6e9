"""Solve long and thin networks, such as unrolled recurrent ones: keep what separates segments of time.

At one cut, the peak of the save-everything step, an integer program says how many tensors to
recompute, but not when: a program that drops a recurrent state everywhere leaves nothing to
rebuild it from but the beginning, all at once and right after the cut. So the program must keep
the few tensors that cross between segments of the forward, and prefers to recompute what the
backward reads late. Each segment is then rebuilt by itself, when memory is free again. What reads
from many segments, such as a stack of all outputs, would have all of them rebuilt at once: if its
result can be kept, the program must not recompute it; else the segments are dropped again once it
has run. Where memory stays high for longer, as between the two loops of a bidirectional network, a
second cut says what may be live then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, first_runs
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline, clock
from scheduler.solvers.ilp.decoding import decode
from scheduler.solvers.ilp.path_rows import tighten
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutAnswer, CutRelaxation
from scheduler.solvers.ilp.solver import MOST_OPERATIONS
from scheduler.solvers.ilp.views import fold_views

LEAST_OPERATIONS = 1_000
"""Fewest operations for which time is divided into segments."""
SEGMENTS, LEAST_SEGMENTS = (16, 24, 32), 4
"""Numbers of segments that are tried: of more, each takes less to rebuild, but more is kept. Then, the fewest: half as
many are tried wherever nothing fits with their tensors kept."""
MUCH_NEARER = 0.75
"""A further number is tried if the last one has lowered the excess over the budget to at most this part."""
NEAR, NEAR_SHARE, ALONE_SHARE = 0.4, 0.1, 0.4
"""Once a schedule exceeds the budget by at most the first share, without what is resident, further programs have only
the second share of the remaining time, or that of about one more: annealing makes such schedules fit sooner than they
do. Where it keeps what cannot all be kept, it hardly ever does; then programs have the third share."""
LEAST_COLLECTED = 3
"""Fewest segments from which an operation reads that is not recomputed: the sum of a residual connection reads from
two."""
MOST_PROGRAMS = 8
"""Most programs with kept tensors."""
MOST_CUTS = 2
"""Most cuts in one program: three take ten times as long as two, and bound the time hardly better."""
_LEAST_DISTANCE = 0.05
"""Least distance between two cuts, as a share of all tasks."""
_LEAST_STEP = 0.002
"""Least share of the budget by which the limit at the cut is lowered."""
_BOUND_SLACK, _SLACK = 0.005, 0.01
"""Gaps at which the program for the bound and those with kept tensors end, as shares of the time of the step."""
_PREFERENCE = 0.05
"""Discount on recomputing what is read last."""
_PROGRAM_SHARE = 0.6
"""Share of the remaining time for one program."""


class TimeSegments:
    """Integer programs over a few cuts: first the peak of the save-everything step, then where schedules exceed.

    Where a decoded schedule exceeds the budget far from all cuts, the next program gets a cut
    there; where it does so near a cut, a lower limit at that cut.

    Parameters
    ----------
    problem : Problem
        Its graph has one operation per task, and a backward phase.

    Attributes
    ----------
    bound : float
        Lower bound on the time of every schedule in the input order; inf if none fits.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bound = problem.least_time
        self._precedence = Precedence(problem.graph, reorder=False)
        self._collectors = collectors(problem.graph, SEGMENTS[0])
        self._limits = {_peak_task(problem): problem.budget_bytes}

    @staticmethod
    def suits(graph: Graph) -> bool:
        """Return whether a graph is long enough to be divided, and short enough for an integer program."""
        has_backward = any(operation.phase == "backward" for operation in graph.operations)
        return has_backward and LEAST_OPERATIONS <= len(graph.operations) <= MOST_OPERATIONS

    def run(self, deadline: Deadline, offer: Callable[[Schedule], int]) -> None:
        """Offer schedules, until one with kept tensors fits or time is up; then bound the time at all cuts."""
        budget, once = self.problem.budget_bytes, self._collectors
        if self._solve_for_bound(deadline, offer):
            return
        segments, schedule, least = SEGMENTS[0], None, math.inf
        for number in SEGMENTS:
            begun = clock.now()
            other = self._solve_divided(number, once, deadline)
            seconds = clock.now() - begun
            peak = math.inf if other is None else offer(other)
            if peak <= budget:
                return
            is_much = peak - budget < MUCH_NEARER * (least - budget)
            if peak < least:
                segments, schedule, least = number, other, peak
            if not is_much:
                break
        is_near = least - budget <= NEAR * (budget - self.problem.graph.resident_bytes)
        soon = deadline.within(max(NEAR_SHARE * deadline.remaining, 2 * seconds)) if is_near else deadline
        alone = deadline.within(ALONE_SHARE * deadline.remaining) if is_near else deadline
        for _ in range(MOST_PROGRAMS):
            limit = alone if schedule is None else soon
            if limit.remaining < seconds or segments < LEAST_SEGMENTS:
                break  # with more cuts, a program takes longer than those so far
            if schedule is None:
                once, segments = frozenset(), segments if once else segments // 2
            else:
                self._tighten(schedule)
            if min(self._limits.values()) < self.problem.graph.resident_bytes:
                break  # what exceeds the budget so far is no guide to a schedule that fits
            schedule = self._solve_divided(segments, once, limit)
            if schedule is not None and offer(schedule) <= budget:
                break
        if len(self._limits) > 1 and not deadline.passed:
            self._limits = dict.fromkeys(self._limits, budget)
            self._solve_for_bound(deadline, offer)

    def _solve_divided(self, segments: int, once: frozenset[int], deadline: Deadline) -> Schedule | None:
        """Return the schedule of a program that keeps what separates so many segments, if it has one."""
        program = self._program()
        self._divide(program, separators(self.problem.graph, segments), once)
        return self._decode(self._solve(program, deadline, _SLACK))

    def _solve_for_bound(self, deadline: Deadline, offer: Callable[[Schedule], int]) -> bool:
        """Raise the bound by a program without kept tensors, and return whether its schedule fits, or none does."""
        answer = self._solve(self._program(), deadline, _BOUND_SLACK)
        self.bound = max(self.bound, answer.bound)
        schedule = self._decode(answer)
        return answer.infeasible or (schedule is not None and offer(schedule) <= self.problem.budget_bytes)

    def _tighten(self, schedule: Schedule) -> None:
        """Add a cut where the schedule exceeds the budget most, or lower the limit of a cut that is near."""
        graph, budget = self.problem.graph, self.problem.budget_bytes
        memory, runs = simulate(graph, schedule).memory, first_runs(graph, schedule)
        worst = int(memory.argmax())
        task = _task_at(runs, worst)
        nearest = min(self._limits, key=lambda cut: abs(cut - task))
        if abs(nearest - task) >= _LEAST_DISTANCE * len(graph.index.tasks) and len(self._limits) < MOST_CUTS:
            self._limits[task] = budget
        else:
            self._limits[nearest] -= max(int(memory[worst]) - budget, int(_LEAST_STEP * budget))

    def _program(self) -> CutRelaxation:
        cuts = sorted(self._limits)
        return CutRelaxation(self.problem.graph, self._precedence, cuts, [self._limits[cut] for cut in cuts])

    def _solve(self, program: CutRelaxation, deadline: Deadline, slack: float) -> CutAnswer:
        share = deadline.within(_PROGRAM_SHARE * deadline.remaining)
        tighten(program, share)
        # On long graphs, presolve can take more time than it has, and the relaxation is nearly integral.
        return program.solve(share, max(slack, self.problem.gap) * self.problem.least_time, presolve=False)

    def _decode(self, answer: CutAnswer) -> Schedule | None:
        """Return the schedule of a point, if there is one: of two, the one with the smaller peak.

        The second one rebuilds for the collectors what it rebuilds once more when the backward reads it.
        """
        if answer.live is None:
            return None
        graph, cuts = self.problem.graph, sorted(self._limits)
        schedule = decode(graph, cuts, answer.live)
        if simulate(graph, schedule).peak_bytes <= self.problem.budget_bytes:
            return schedule
        other = decode(graph, cuts, answer.live, rebuilt_alone=self._collectors)
        return min(schedule, other, key=lambda each: simulate(graph, each).peak_bytes)

    def _divide(self, program: CutRelaxation, kept: frozenset[int], once: frozenset[int]) -> None:
        """Keep tensors at the cuts, run operations once, and recompute rather what is read late."""
        for saved in program.saved:
            for tensor in kept & saved.keys():
                program.program.at_least("kept", [(saved[tensor], 1.0)], 1)
        for recomputed in program.recomputed.values():
            for i in once & recomputed.keys():
                program.program.at_most("once", [(recomputed[i], 1.0)], 0)
        self._prefer_late(program, kept)

    def _prefer_late(self, program: CutRelaxation, kept: frozenset[int]) -> None:
        """Make recomputations cheaper the later the backward reads what they lead to."""
        graph = self.problem.graph
        for k, task in enumerate(program.cuts):
            cut = graph.index.tasks[task][0]
            reads = _first_reads(graph, program.reduction.inputs, cut, kept)
            length = len(graph.operations) - cut
            for i, variable in program.recomputed[k].items():
                program.program.costs[variable.number] *= 1.0 - _PREFERENCE * (reads[i] - cut) / length


def separators(graph: Graph, segments: int) -> frozenset[int]:
    """Return the tensors that cross from one segment of the forward to the next, and are read soon after.

    Of the places near each border, the one with the fewest such bytes is taken. A tensor that is
    not read for a segment counts as free from then on: what reads it later, such as another
    layer's loop over time, does not rebuild these segments. Tensors that are read again and
    again for longer than a segment do not count: they separate nothing.

    Parameters
    ----------
    graph : Graph
    segments : int
        Number of segments, of about equally many operations.
    """
    index, root = graph.index, fold_views(graph, free=True).root
    forward = [i for i in index.defaults if graph.operations[i].phase == "forward"]
    made = {t: place for place, i in enumerate(forward) for t in index.outputs[i] if root[t] == t}
    length = len(forward) // segments
    last = dict(made)
    for place, i in enumerate(forward):
        last.update((t, place) for t in {root[t] for t in index.inputs[i]} if t in made and place - last[t] <= length)
    short = [
        (made[t], end, t, index.storage_bytes[index.storage_of[t]])
        for t, end in last.items()
        if made[t] < end <= made[t] + length and index.storage_bytes[index.storage_of[t]]
    ]
    crossing = np.zeros(len(forward) + 1, np.int64)
    for begin, end, _, size in short:
        crossing[begin] += size
        crossing[end] -= size
    crossing = np.cumsum(crossing)
    found: set[int] = set()
    for border in range(length, len(forward) - length // 2, max(1, length)):
        near = range(max(0, border - length // 4), min(len(forward), border + length // 4 + 1))
        place = min(near, key=lambda p: (int(crossing[p]), abs(p - border)))
        found.update(t for begin, end, t, _ in short if begin <= place < end)
    return frozenset(found)


def collectors(graph: Graph, segments: int) -> frozenset[int]:
    """Return the operations of the forward that read from many of its segments, such as a stack of all outputs.

    Parameters
    ----------
    graph : Graph
    segments : int
        Number of segments, of equally many operations.
    """
    index, root = graph.index, fold_views(graph, free=True).root
    forward = [i for i in index.defaults if graph.operations[i].phase == "forward"]
    length = max(1, len(forward) // segments)
    segment_of = {t: place // length for place, i in enumerate(forward) for t in index.outputs[i]}
    read = {i: {segment_of[root[t]] for t in index.inputs[i] if root[t] in segment_of} for i in forward}
    return frozenset(i for i in forward if len(read[i]) >= LEAST_COLLECTED)


def _first_reads(graph: Graph, inputs: Sequence[Sequence[int]], cut: int, kept: frozenset[int]) -> list[int]:
    """Return, per operation before the cut, the first one from the cut on that needs it to run again."""
    operations = len(graph.operations)
    first = [operations] * len(graph.tensors)
    for i in range(operations - 1, cut - 1, -1):
        for t in inputs[i]:
            first[t] = i
    needed = [operations] * operations
    for i in range(cut - 1, -1, -1):
        needed[i] = min((first[t] for t in graph.index.outputs[i]), default=operations)
        for t in inputs[i]:
            if t not in kept:
                first[t] = min(first[t], needed[i])
    return needed


def _peak_task(problem: Problem) -> int:
    """Return the task that first runs where the save-everything step peaks, or the next one after it."""
    return _task_at(first_runs(problem.graph, problem.save_everything), int(problem.baseline.memory.argmax()))


def _task_at(firsts: dict[int, int], position: int) -> int:
    """Return the task that first runs at a position of a schedule, or the next one after it."""
    return min(firsts, key=lambda task: (firsts[task] < position, abs(firsts[task] - position)))
