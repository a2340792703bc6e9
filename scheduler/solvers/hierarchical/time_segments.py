"""Solve long and thin networks, such as unrolled recurrent ones: keep what separates segments of time.

At one cut, the peak of the save-everything step, an integer program says how many tensors to
recompute, but not when: a program that drops a recurrent state everywhere leaves nothing to
rebuild it from but the beginning, all at once and right after the cut. So the program must keep
the few tensors that cross between segments of the forward, and prefers to recompute what the
backward reads late. Each segment is then rebuilt by itself, when memory is free again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, first_runs
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.decoding import decode
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutAnswer, CutRelaxation
from scheduler.solvers.ilp.solver import MOST_OPERATIONS
from scheduler.solvers.ilp.views import fold_views

LEAST_OPERATIONS = 1_000
"""Fewest operations for which time is divided into segments."""
SEGMENTS = (8, 16)
"""Number of segments in the first program, and in all further ones."""
MOST_PROGRAMS = 6
"""Most programs with kept tensors."""
_LEAST_STEP = 0.002
"""Least share of the budget by which the limit at the cut is lowered."""
_BOUND_SLACK, _SLACK = 0.005, 0.01
"""Gaps at which the program for the bound and those with kept tensors end, as shares of the time of the step."""
_PREFERENCE = 0.05
"""Discount on recomputing what is read last."""
_PROGRAM_SHARE = 0.4
"""Share of the remaining time for one program."""


class TimeSegments:
    """Integer programs at the peak of the save-everything step: one for a bound, then some with segments of time.

    Where the decoded schedule exceeds the budget, the next program gets a lower limit.

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
        self._cut = _peak_task(problem)
        self._limit = problem.budget_bytes

    @staticmethod
    def suits(graph: Graph) -> bool:
        """Return whether a graph is long enough to be divided, and short enough for an integer program."""
        has_backward = any(operation.phase == "backward" for operation in graph.operations)
        return has_backward and LEAST_OPERATIONS <= len(graph.operations) <= MOST_OPERATIONS

    def run(self, deadline: Deadline, offer: Callable[[Schedule], int]) -> None:
        """Offer schedules, until one with kept tensors fits or time is up."""
        problem = self.problem
        answer = self._solve(self._program(), deadline, _BOUND_SLACK)
        self.bound = max(self.bound, answer.bound)
        for number in range(MOST_PROGRAMS + 1):
            if answer.live is None:
                return
            peak = offer(decode(problem.graph, [self._cut], answer.live))
            if peak <= problem.budget_bytes or deadline.passed:
                return
            if number > 0:
                self._limit -= max(peak - problem.budget_bytes, int(_LEAST_STEP * problem.budget_bytes))
            program = self._program()
            self._keep(program, separators(problem.graph, SEGMENTS[min(number, len(SEGMENTS) - 1)]))
            answer = self._solve(program, deadline, _SLACK)

    def _program(self) -> CutRelaxation:
        return CutRelaxation(self.problem.graph, self._precedence, [self._cut], [self._limit])

    def _solve(self, program: CutRelaxation, deadline: Deadline, slack: float) -> CutAnswer:
        share = deadline.within(_PROGRAM_SHARE * deadline.remaining)
        return program.solve(share, max(slack, self.problem.gap) * self.problem.least_time)

    def _keep(self, program: CutRelaxation, kept: frozenset[int]) -> None:
        """Keep tensors at the cuts, and recompute rather what is read late."""
        for saved in program.saved:
            for tensor in kept & saved.keys():
                program.program.at_least("kept", [(saved[tensor], 1.0)], 1)
        self._prefer_late(program, kept)

    def _prefer_late(self, program: CutRelaxation, kept: frozenset[int]) -> None:
        """Make recomputations cheaper the later the backward reads what they lead to."""
        graph = self.problem.graph
        cut = graph.index.tasks[self._cut][0]
        reads = _first_reads(graph, program.inputs, cut, kept)
        length = len(graph.operations) - cut
        factor = {
            variable.name: 1.0 - _PREFERENCE * (reads[i] - cut) / length
            for recomputed in program.recomputed.values()
            for i, variable in recomputed.items()
        }
        costs = program.program.cost
        costs[:] = [(variable, cost * factor.get(variable.name, 1.0)) for variable, cost in costs]


def separators(graph: Graph, segments: int) -> frozenset[int]:
    """Return the tensors that cross from one segment of the forward to the next, and are read soon after.

    Of the places near each border, the one with the fewest such bytes is taken. Tensors that
    live for longer than a segment do not count: they separate nothing.

    Parameters
    ----------
    graph : Graph
    segments : int
        Number of segments, of about equally many operations.
    """
    index, root = graph.index, fold_views(graph, free=True).root
    forward = [i for i in index.defaults if graph.operations[i].phase == "forward"]
    made = {t: place for place, i in enumerate(forward) for t in index.outputs[i] if root[t] == t}
    last = {root[t]: place for place, i in enumerate(forward) for t in index.inputs[i] if root[t] in made}
    length = len(forward) // segments
    short = [
        (made[t], end, t, index.storage_bytes[index.storage_of[t]])
        for t, end in last.items()
        if end - made[t] <= length and index.storage_bytes[index.storage_of[t]]
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
    firsts = first_runs(problem.graph, problem.save_everything)
    peak = int(problem.baseline.memory.argmax())
    return min(firsts, key=lambda task: (firsts[task] < peak, abs(firsts[task] - peak)))
