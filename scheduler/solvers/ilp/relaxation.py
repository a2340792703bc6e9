"""Bound every schedule by an integer program that constrains memory at only a few moments, the cuts.

A cut is the first run of one task. At each cut, binaries decide which tensors are live (S) and
which operations are recomputed before the next cut (R). Every schedule maps to a feasible
point of no greater cost, so the optimum is a lower bound. The solver `ilp` turns the optimal
point back into a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import pulp

from scheduler.graph import Graph
from scheduler.problem import necessary_tasks
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.views import fold_views
from scheduler.solvers.integer_program import IntegerProgram, MilpResult, TimeIsUpError, is_set
from scheduler.solvers.scaling import byte_units, time_units

_FRACTIONAL_TIME_BITS = 20
"""If times need more bits than a coefficient holds, their sum has this many bits before the binary point."""


@dataclass(frozen=True)
class CutAnswer:
    """The solution of a `CutRelaxation`.

    Attributes
    ----------
    bound : float
        Lower bound on the time of every schedule in the program's order; inf if it is proven
        that no schedule fits.
    live : tuple of frozenset of int, or None
        Tensors live at each cut, if a point was found.
    claimed_time : float
        Objective of the point; only simulation gives the time of its schedule.
    exact : bool
        Whether the program was solved to optimality, or to within the slack that was asked for.
    """

    bound: float
    live: tuple[frozenset[int], ...] | None
    claimed_time: float
    exact: bool

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that no schedule in the program's order fits."""
        return self.bound == math.inf


class Precedence:
    """The pairs of tasks of which one must first run before the other.

    Parameters
    ----------
    graph : Graph
    reorder : bool
        If false, tasks first run in the input order. Otherwise a task comes after the producers
        of the inputs that all its alternatives share, and every backward task comes after the
        forward tasks that the forward results need.
    """

    def __init__(self, graph: Graph, *, reorder: bool) -> None:
        self.reorder = reorder
        self.tasks = len(graph.index.tasks)
        self._ancestors = _ancestors(graph) if reorder else []
        self._descendants: dict[int, int] = {}

    def before(self, task: int) -> int:
        """Return the tasks that must precede a task, as bits."""
        return self._ancestors[task] if self.reorder else (1 << task) - 1

    def after(self, task: int) -> int:
        """Return the tasks that must follow a task, as bits."""
        if not self.reorder:
            return ((1 << self.tasks) - 1) ^ ((1 << (task + 1)) - 1)
        if task not in self._descendants:
            bits = "".join("1" if before >> task & 1 else "0" for before in reversed(self._ancestors))
            self._descendants[task] = int(bits, 2)
        return self._descendants[task]

    def chain(self, tasks: Sequence[int]) -> list[int]:
        """Return a totally ordered subset of the tasks, in that order; earlier entries of `tasks` take precedence."""
        chosen: list[int] = []
        for task in tasks:
            comparable = self.before(task) | self.after(task)
            if all(comparable >> other & 1 for other in chosen):
                chosen.append(task)
        return sorted(chosen, key=lambda task: self.before(task).bit_count())


class CutRelaxation:
    """The integer program over a chain of cuts.

    Parameters
    ----------
    graph : Graph
    precedence : Precedence
    cuts : sequence of int
        Tasks, each before the next; a cut is the moment at which its task first runs.
    budgets : sequence of int
        Bytes at each cut, resident tensors included. The optimum is a lower bound only if
        every entry is at least the true budget; smaller entries help to find schedules.
    deadline : Deadline, optional
        A program that is not built by then is not solved: its answer has no bound and no point.

    Bytes are rounded in the schedule's favor, so the bound is valid; simulation decides whether
    a schedule fits.
    """

    def __init__(
        self,
        graph: Graph,
        precedence: Precedence,
        cuts: Sequence[int],
        budgets: Sequence[int],
        deadline: Deadline | None = None,
    ) -> None:
        self.graph, self.index, self.cuts = graph, graph.index, list(cuts)
        self.precedence = precedence
        self.before = [precedence.before(cut) for cut in cuts]
        self.after = [precedence.after(cut) for cut in cuts]
        self.necessary = set(necessary_tasks(graph))
        # A reader of a free view reads its base: folding views makes the program smaller and its relaxation tighter.
        views = fold_views(graph, free=True)
        self.folded = views.folded
        self.inputs = [sorted({views.root[t] for t in ids} - {-1}) for ids in self.index.inputs]
        self.results = {views.root[t] for t, result in enumerate(self.index.is_result) if result}
        times, sizes = time_units(graph, fractional_bits=_FRACTIONAL_TIME_BITS), byte_units(graph, max(budgets))
        self.times, self.time_scale = times.times, times.scale
        self.byte_scale, self.exact_bytes = sizes.size, sizes.exact
        self.program = IntegerProgram("ilp", deadline)
        self.constant = 0.0
        self.first_run: dict[int, pulp.LpVariable] = {}
        self.saved: list[dict[int, pulp.LpVariable]] = [{} for _ in cuts]
        self.recomputed: list[dict[int, pulp.LpVariable]] = [{} for _ in range(len(cuts) + 1)]
        self._continuous = not precedence.reorder and all(len(task) == 1 for task in self.index.tasks)
        with suppress(TimeIsUpError):
            self._build(budgets)

    def solve(self, deadline: Deadline, slack: float = 0.0) -> CutAnswer:
        """Minimize the time by the deadline, until the point exceeds the bound by at most the slack."""
        slack /= self.time_scale
        result: MilpResult = self.program.minimize(deadline, absolute_gap=slack)
        if result.infeasible:
            return CutAnswer(math.inf, None, math.inf, exact=True)
        least = self.constant + max(0.0, result.bound)
        if all(time.is_integer() for time in self.times):
            # Every schedule takes an integer number of units: rounding up undoes the loss to tolerances.
            least = math.ceil(least - 1e-4)
        if not result.found:
            return CutAnswer(least * self.time_scale, None, math.inf, exact=False)
        claimed = self.constant + result.objective
        exact = result.objective - result.bound <= slack + 1e-7 * max(1.0, claimed)
        live = tuple(frozenset(t for t, variable in saved.items() if is_set(variable)) for saved in self.saved)
        return CutAnswer(least * self.time_scale, live, claimed * self.time_scale, exact)

    def relaxed(self, deadline: Deadline) -> tuple[float, float] | None:
        """Return a lower bound on the time for the first cut's budget, and the largest saving per additional byte.

        The two define a line that is a lower bound for every budget. None if no line was found.
        """
        found = self.program.relax(deadline, "bytes_0_")
        if found is None:
            return None
        value, price = found
        # Subtract what the solver's tolerances may have added.
        return (self.constant + value * (1 - 1e-9)) * self.time_scale, price * self.time_scale / self.byte_scale

    def _build(self, budgets: Sequence[int]) -> None:
        self._add_first_runs()
        for k in range(len(budgets)):
            self._add_variables(k)
        for k, budget in enumerate(budgets):
            self._add_bytes(k, budget)
            self._add_readers(k)
            self._add_recomputation(k)
            self._add_flow(k)
        self._add_results()

    def _add_first_runs(self) -> None:
        """A[o]: operation o is its task's first run; needed where a task has alternatives or is not necessary."""
        constant = []
        for number, task in enumerate(self.index.tasks):
            if len(task) == 1 and number in self.necessary:
                constant.append(self.times[task[0]])
                continue
            for i in task:
                self.first_run[i] = self.program.binary("first", self.times[i])
                if self.before[0] >> number & 1 and self.graph.operations[i].repeatable:
                    # Recomputations before the first cut matter only for such tasks.
                    self.recomputed[0][i] = self.program.binary("recomputed_0", self.times[i])
            terms = [(self.first_run[i], 1.0) for i in task]
            if number in self.necessary:
                # A necessary task has exactly one first run.
                self.program.at_least("first_runs", terms, 1)
            self.program.at_most("one_first_run", terms, 1)
        self.constant = math.fsum(constant)

    def _add_variables(self, k: int) -> None:
        for number in _bits(self.before[k]):
            for i in self.index.tasks[number]:
                if self.folded[i]:
                    continue
                self._add_recomputed(k + 1, i)
                for tensor in self.index.outputs[i]:
                    if tensor not in self.saved[k]:
                        self.saved[k][tensor] = self.program.binary(f"saved_{k}")
        if len(self.index.tasks[self.cuts[k]]) > 1:
            # A task with alternatives may run once more after its first run, for outputs that the first lacks.
            for i in self.index.tasks[self.cuts[k]]:
                self._add_recomputed(k + 1, i)

    def _add_recomputed(self, interval: int, i: int) -> None:
        if self.graph.operations[i].repeatable:
            make = self.program.fraction if self._continuous else self.program.binary
            self.recomputed[interval][i] = make(f"recomputed_{interval}", self.times[i])

    def _add_bytes(self, k: int, budget: int) -> None:
        """Live storages, the outputs of the cut's operation and its workspace fit the budget."""
        index, scale = self.index, self.byte_scale
        by_storage: dict[int, list[int]] = {}
        for tensor in self.saved[k]:
            if index.storage_bytes[index.storage_of[tensor]]:
                by_storage.setdefault(index.storage_of[tensor], []).append(tensor)
        terms: list[tuple[pulp.LpVariable, float]] = []
        for storage, tensors in by_storage.items():
            size = float(index.storage_bytes[storage] // scale)
            if len(tensors) == 1:
                terms.append((self.saved[k][tensors[0]], size))
                continue
            held = self.program.fraction(f"held_{k}")
            terms.append((held, size))
            for tensor in tensors:
                # A storage is held while any of its tensors is live.
                self.program.at_least(f"held_{k}", [(held, 1.0), (self.saved[k][tensor], -1.0)], 0)
        free = budget - index.resident_bytes
        task = index.tasks[self.cuts[k]]
        for i in task:
            own = self._produced_bytes(i)
            if i in self.first_run:
                terms.append((self.first_run[i], float(own // scale)))
            else:
                free -= own
            for tensor in self.inputs[i]:
                if tensor in self.saved[k]:
                    # The inputs of the cut's operation are live.
                    row = [(self.saved[k][tensor], 1.0)]
                    if i in self.first_run:
                        self.program.at_least(f"input_{k}", [*row, (self.first_run[i], -1.0)], 0)
                    else:
                        self.program.at_least(f"input_{k}", row, 1)
        # A sum of multiples of the scale is within a limit exactly if it is within the limit rounded down.
        self.program.at_most(f"bytes_{k}", terms, free // scale if self.exact_bytes else -(-free // scale))

    def _produced_bytes(self, i: int) -> int:
        return self.index.allocated_bytes[i] + self.graph.operations[i].workspace_bytes

    def _add_readers(self, k: int) -> None:
        """An input of a later task is live at the cut or recomputed before that task."""
        last = len(self.cuts) - 1
        window = self.before[k + 1] | 1 << self.cuts[k + 1] if k < last else -1
        given = not self.precedence.reorder
        for number in _bits(self.after[k] & (window if given else -1)):
            if k < last and number == self.cuts[k + 1]:
                continue  # its inputs are live at that cut, and the flow rows connect them to this one
            intervals = [k] if k == last or self.before[k + 1] >> number & 1 else range(k, last + 1)
            for i in self.index.tasks[number]:
                first = self.first_run.get(i)
                for tensor in self.inputs[i]:
                    if tensor not in self.saved[k]:
                        continue
                    row = [(self.saved[k][tensor], 1.0)]
                    row += [term for j in intervals for term in self._recomputed_since(tensor, j)]
                    if first is None:
                        self.program.at_least(f"reader_{k}", row, 1)
                    else:
                        self.program.at_least(f"reader_{k}", [*row, (first, -1.0)], 0)

    def _add_recomputation(self, k: int) -> None:
        """The inputs of a recomputed operation are live at the cut or recomputed as well."""
        for i, recomputed in self.recomputed[k + 1].items():
            for tensor in self.inputs[i]:
                if tensor in self.saved[k]:
                    row = [(recomputed, 1.0), (self.saved[k][tensor], -1.0)]
                    row += [(variable, -1.0) for variable, _ in self._recomputed_since(tensor, k)]
                    self.program.at_most(f"needs_{k}", row, 0)

    def _add_flow(self, k: int) -> None:
        """A tensor that is live at a cut was live at the previous cut or has been computed since."""
        for tensor, saved in self.saved[k].items():
            producers = self.index.producers[tensor]
            if k > 0 and tensor in self.saved[k - 1]:
                row = [(saved, 1.0), (self.saved[k - 1][tensor], -1.0)]
                row += [(variable, -1.0) for variable, _ in self._recomputed_since(tensor, k - 1)]
                self.program.at_most(f"flow_{k}", row, 0)
            elif any(i in self.first_run for i in producers):
                runs = [self.first_run[i] for i in producers if i in self.first_run]
                runs += [self.recomputed[j][i] for j in range(k + 1) for i in producers if i in self.recomputed[j]]
                # A tensor that only some alternatives produce is live only if one of them has run.
                self.program.at_most(f"produced_{k}", [(saved, 1.0), *((variable, -1.0) for variable in runs)], 0)

    def _add_results(self) -> None:
        """A result computed before the last cut is live at it or recomputed."""
        last = len(self.cuts) - 1
        for tensor, saved in self.saved[last].items():
            if tensor in self.results:
                self.program.at_least("result", [(saved, 1.0), *self._recomputed_since(tensor, last)], 1)

    def _recomputed_since(self, tensor: int, k: int) -> list[tuple[pulp.LpVariable, float]]:
        """Return the terms for recomputations of a tensor between cut k and the next one."""
        recomputed = self.recomputed[k + 1]
        return [(recomputed[i], 1.0) for i in self.index.producers[tensor] if i in recomputed]


def _ancestors(graph: Graph) -> list[int]:
    """Return, per task, the tasks that first run before it in every schedule that runs both."""
    index = graph.index
    ancestors = [0] * len(index.tasks)
    phases = [{graph.operations[i].phase for i in task} for task in index.tasks]
    forward = sum(1 << number for number, phase in enumerate(phases) if phase == {"forward"})
    for number, task in enumerate(index.tasks):
        common = -1
        for i in task:
            needs = 0
            for tensor in index.inputs[i]:
                for producer in index.producers[tensor][:1]:
                    other = index.task_of[producer]
                    # An alternative may read outputs of later tasks, whose ancestors are still missing. They drop
                    # out in the intersection with the default, which reads only outputs of earlier tasks.
                    needs |= 1 << other | ancestors[other]
            common &= needs
        ancestors[number] = common & ~(1 << number)
        if phases[number] == {"backward"}:
            ancestors[number] |= forward
    return ancestors


def _bits(mask: int) -> list[int]:
    """Return the positions of the set bits, ascending."""
    text = bin(mask)[:1:-1]
    found, position = [], text.find("1")
    while position >= 0:
        found.append(position)
        position = text.find("1", position + 1)
    return found
