"""Bound every schedule by an integer program that constrains memory at only a few moments, the cuts.

A cut is the first run of one task. At each cut, binaries decide which tensors are live (S) and
which operations are recomputed before the next cut (R). Where tasks may first run in any order,
further binaries say which tasks without precedence to the cut's have run before it (Y). Every
schedule maps to a feasible point of no greater cost, so the optimum is a lower bound. The solver
`ilp` turns the optimal point back into a schedule.

Rows are written so that the linear relaxation of a program with one cut is nearly integral: with
the sums S + R + (1 - Y) and R + (1 - Y) as variables, all rows but that of the bytes and those
of views compare two variables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import pulp

from scheduler.graph import Graph
from scheduler.problem import necessary_tasks
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.precedence import Precedence, bits
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


@dataclass(frozen=True, slots=True)
class _Sum:
    """A linear expression."""

    terms: tuple[tuple[pulp.LpVariable, float], ...] = ()
    constant: float = 0.0

    def plus(self, other: _Sum, factor: float = 1.0) -> _Sum:
        scaled = tuple((variable, factor * coefficient) for variable, coefficient in other.terms)
        return _Sum(self.terms + scaled, self.constant + factor * other.constant)


_ZERO, _ONE = _Sum(), _Sum(constant=1.0)


def _term(variable: pulp.LpVariable) -> _Sum:
    return _Sum(((variable, 1.0),))


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
        self.base = self._bases()
        times, sizes = time_units(graph, fractional_bits=_FRACTIONAL_TIME_BITS), byte_units(graph, max(budgets))
        self.times, self.time_scale = times.times, times.scale
        self.byte_scale, self.exact_bytes = sizes.size, sizes.exact
        self.program = IntegerProgram("ilp", deadline)
        self.constant = 0.0
        self.first_run: dict[int, pulp.LpVariable] = {}
        self.has_run: list[dict[int, pulp.LpVariable]] = [{} for _ in cuts]
        self.saved: list[dict[int, pulp.LpVariable]] = [{} for _ in cuts]
        self.recomputed: dict[tuple[int, int], dict[int, pulp.LpVariable]] = {(-1, 0): {}}
        """From one cut to a later one: -1 is the start, and the number of cuts the end."""
        # The least R is integral where S and Y are, unless an operation may stand for another or never run.
        self._continuous = all(len(task) == 1 for task in self.index.tasks) and (
            not precedence.reorder or len(self.necessary) == len(self.index.tasks)
        )
        with suppress(TimeIsUpError):
            self._build(budgets)

    def solve(self, deadline: Deadline, slack: float = 0.0, target: float = -math.inf) -> CutAnswer:
        """Minimize the time by the deadline.

        The search ends early once the point exceeds the bound by at most the slack, or takes no longer than `target`.
        """
        slack, goal = slack / self.time_scale, target / self.time_scale - self.constant
        result: MilpResult = self.program.minimize(deadline, absolute_gap=slack, target=goal)
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
            self._add_order(k)
            self._add_tensors(k)
        spans = sorted(combinations(range(len(budgets) + 1), 2), key=lambda span: span[1] - span[0])
        for k, end in spans:
            self._add_recomputed(k, end)
        for k, budget in enumerate(budgets):
            self._add_bytes(k, budget)
        self._add_flow(-1, 0, set())
        for k, end in spans:
            self._add_flow(k, end, self._add_reads(k, end))

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
                    self.recomputed[-1, 0][i] = self.program.binary("recomputed_0", self.times[i])
            terms = [(self.first_run[i], 1.0) for i in task]
            if number in self.necessary:
                # A necessary task has exactly one first run.
                self.program.at_least("first_runs", terms, 1)
            self.program.at_most("one_first_run", terms, 1)
        self.constant = math.fsum(constant)

    def _add_order(self, k: int) -> None:
        """Y[u,k]: a task without precedence to the cut's has run before it, and so have those that it reads from."""
        known = self.before[k] | self.after[k] | 1 << self.cuts[k]
        for number in bits(~known & (1 << len(self.index.tasks)) - 1):
            i = self.index.tasks[number][0]
            if i not in self.first_run and not self.folded[i]:
                self.has_run[k][number] = self.program.binary(f"has_run_{k}")
        for number, variable in self.has_run[k].items():
            if k > 0 and number in self.has_run[k - 1]:
                earlier = self.has_run[k - 1][number]
                self.program.at_least(f"still_{k}", [(variable, 1.0), (earlier, -1.0)], 0)
            for tensor in self.inputs[self.index.tasks[number][0]]:
                source = self.has_run[k].get(self._task_of(tensor))
                if source is not None:
                    self.program.at_least(f"order_{k}", [(source, 1.0), (variable, -1.0)], 0)

    def _add_tensors(self, k: int) -> None:
        """S[t,k]: a tensor is live at cut k."""
        for number in (*bits(self.before[k]), *self.has_run[k]):
            for i in self.index.tasks[number]:
                for tensor in () if self.folded[i] else self.index.outputs[i]:
                    if tensor not in self.saved[k]:
                        self.saved[k][tensor] = self.program.binary(f"saved_{k}")

    def _add_recomputed(self, k: int, end: int) -> None:
        """R[o,k,l]: operation o runs again between cuts k and l; only runs between neighboring cuts cost time.

        Without those across cuts, a relaxed program would recompute a half in each of two
        intervals from half of the inputs, and further cuts would weaken it.
        """
        steps = [self.recomputed.get((j, j + 1), {}) for j in range(k, end)]
        self.recomputed[k, end] = recomputed = {}
        tasks = [*bits(self.before[k]), *self.has_run[k]]
        if len(self.index.tasks[self.cuts[k]]) > 1:
            # A task with alternatives may run once more after its first run, for outputs that the first lacks.
            tasks.append(self.cuts[k])
        for i in (i for number in tasks for i in self.index.tasks[number]):
            if self.folded[i] or not self.graph.operations[i].repeatable:
                continue
            if end == k + 1:
                make = self.program.fraction if self._continuous else self.program.binary
                recomputed[i] = make(f"recomputed_{k}", self.times[i])
            else:
                recomputed[i] = self.program.fraction(f"recomputed_{k}_{end}")
                terms = [(step[i], 1.0) for step in steps if i in step]
                self.program.at_least(f"again_{k}_{end}", [*terms, (recomputed[i], -1.0)], 0)

    def _add_bytes(self, k: int, budget: int) -> None:
        """Live storages, the outputs of the cut's operation and its workspace fit the budget."""
        index, scale = self.index, self.byte_scale
        terms: list[tuple[pulp.LpVariable, float]] = []
        for storage, tensors in self._holders(k).items():
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
            for tensor in self._with_bases(self.inputs[i]):
                if tensor in self.saved[k]:
                    # The inputs of the cut's operation are live.
                    row = [(self.saved[k][tensor], 1.0)]
                    if i in self.first_run:
                        self.program.at_least(f"input_{k}", [*row, (self.first_run[i], -1.0)], 0)
                    else:
                        self.program.at_least(f"input_{k}", row, 1)
        # A sum of multiples of the scale is within a limit exactly if it is within the limit rounded down.
        self.program.at_most(f"bytes_{k}", terms, free // scale if self.exact_bytes else -(-free // scale))

    def _holders(self, k: int) -> dict[int, list[int]]:
        """Return the tensors that may hold each storage at a cut: not views whose base is live as well."""
        by_storage: dict[int, list[int]] = {}
        for tensor, saved in self.saved[k].items():
            storage, base = self.index.storage_of[tensor], self.base.get(tensor, -1)
            if base in self.saved[k]:
                # The base of a live view counts as live: it lies on the same storage.
                self.program.at_least(f"base_{k}", [(self.saved[k][base], 1.0), (saved, -1.0)], 0)
            elif self.index.storage_bytes[storage]:
                by_storage.setdefault(storage, []).append(tensor)
        return by_storage

    def _produced_bytes(self, i: int) -> int:
        return self.index.allocated_bytes[i] + self.graph.operations[i].workspace_bytes

    def _add_reads(self, k: int, end: int) -> set[int]:
        """What runs between two cuts finds its inputs: live, recomputed, or first computed in between.

        Returns the tensors that every schedule reads there.
        """
        reads = [
            (tensor, demand)
            for i, demand in self._demands(k, end)
            for tensor in self._with_bases(self.inputs[i])
            if tensor in self.saved[k]
        ]
        required = {tensor for tensor, demand in reads if demand == _ONE}
        if end == len(self.cuts):
            required |= self.results & self.saved[k].keys()
        for tensor in sorted(required):
            self._at_least(f"required_{k}", self._available(tensor, k, end), _ONE)
        for tensor, demand in reads:
            if tensor not in required:
                self._at_least(f"read_{k}", self._available(tensor, k, end), demand)
        return required

    def _demands(self, k: int, end: int) -> Iterator[tuple[int, _Sum]]:
        """Yield operations, and how often (0 or 1) each runs between two cuts."""
        for i, recomputed in self.recomputed[k, end].items():
            if self.index.task_of[i] not in self.has_run[k]:
                yield i, _term(recomputed)
        for number in self.has_run[k]:
            i = self.index.tasks[number][0]
            demand = self._first_run_between(number, k, end)
            if i in self.recomputed[k, end]:
                demand = demand.plus(_term(self.recomputed[k, end][i]))
            yield i, demand
        for number in bits(self.after[k]):
            then = self._state(end, number)
            if then is None or then == _ZERO:
                continue
            for i in self.index.tasks[number]:
                yield i, _term(self.first_run[i]) if i in self.first_run else then

    def _state(self, k: int, number: int) -> _Sum | None:
        """Return whether a task has run before cut k (the end, after the last), or None if the program does not say."""
        if k == len(self.cuts) or self.before[k] >> number & 1:
            return _ONE
        if self.after[k] >> number & 1 or number == self.cuts[k]:
            return _ZERO
        variable = self.has_run[k].get(number)
        return None if variable is None else _term(variable)

    def _first_run_between(self, number: int, k: int, end: int) -> _Sum:
        """Return whether a task without precedence to the cut's first runs between two cuts."""
        then = self._state(end, number)
        assert then is not None
        return then.plus(_term(self.has_run[k][number]), -1.0)

    def _available(self, tensor: int, k: int, end: int) -> _Sum:
        """Return the sum of: live at cut k, recomputed between the cuts, first computed between them."""
        recomputed = self.recomputed[k, end]
        row = _term(self.saved[k][tensor])
        for i in self.index.producers[tensor]:
            if i in recomputed:
                row = row.plus(_term(recomputed[i]))
        number = self._task_of(tensor)
        return row.plus(self._first_run_between(number, k, end)) if number in self.has_run[k] else row

    def _at_least(self, name: str, row: _Sum, demand: _Sum) -> None:
        difference = row.plus(demand, -1.0)
        self.program.at_least(name, difference.terms, -difference.constant)

    def _add_flow(self, k: int, end: int, required: set[int]) -> None:
        """A tensor that is live at a cut was live at an earlier one or has been computed since."""
        for tensor, saved in self.saved[end].items() if end < len(self.cuts) else ():
            producers = self.index.producers[tensor]
            if k >= 0 and tensor in self.saved[k]:
                if tensor not in required:
                    self._at_least(f"flow_{k}_{end}", self._available(tensor, k, end), _term(saved))
            elif any(i in self.first_run for i in producers):
                # A tensor that only some alternatives produce is live only if one of them has run.
                runs = [of[i] for of in (self.first_run, self.recomputed[k, end]) for i in producers if i in of]
                self.program.at_most(f"produced_{end}", [(saved, 1.0), *((variable, -1.0) for variable in runs)], 0)

    def _task_of(self, tensor: int) -> int:
        """Return the task that produces a tensor; -1 if it is resident."""
        producers = self.index.producers[tensor]
        return self.index.task_of[producers[0]] if producers else -1

    def _bases(self) -> dict[int, int]:
        """Return, for each view, a tensor on its storage that whatever produces it reads."""
        index, found = self.index, {}
        for tensor, producers in enumerate(index.producers):
            read = [{t for t in self.inputs[i] if index.storage_of[t] == index.storage_of[tensor]} for i in producers]
            common = set.intersection(*read) - {tensor} if read else set()
            if common:
                found[tensor] = min(common)
        return found

    def _with_bases(self, tensors: Sequence[int]) -> list[int]:
        """Return tensors, and what they are views of: wherever a view is live or recomputed, its base is too."""
        found: dict[int, None] = {}
        for tensor in tensors:
            while tensor >= 0 and tensor not in found:
                found[tensor] = None
                tensor = self.base.get(tensor, -1)
        return list(found)
