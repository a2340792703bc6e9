"""Bound every schedule by an integer program that constrains memory at only a few moments, the cuts.

A cut is a moment of `Precedence`: the first run of a task, or of whichever of several comes first.
At each cut, binaries decide which tensors are live (S) and which operations are recomputed before
the next cut (R). Where tasks may first run in any order, further binaries say which tasks without
precedence to the cut's have run before it (Y). Every schedule maps to a feasible point of no
greater cost, so the optimum is a lower bound. The solver `ilp` turns the optimal point back into a
schedule. `Reduction` says which operations and tensors need no variables of their own.

A program with so many binaries may take too long. One that decides how often some operations run
again in all (`counted`), and what is live at few cuts, still bounds better than its relaxation.

Rows are written so that the linear relaxation of a program with one cut is nearly integral: with
the sums S + R + (1 - Y) and R + (1 - Y) as variables, all rows but that of the bytes and those
of views compare two variables. Those of programs with more cuts need further rows: `path_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.precedence import Precedence, bits
from scheduler.solvers.ilp.reduction import Reduction
from scheduler.solvers.ilp.sums import ONE, ZERO, Sum, at_least, term
from scheduler.solvers.integer_program import IntegerProgram, MilpResult, Row, TimeIsUpError, Variable, is_set
from scheduler.solvers.scaling import byte_units, time_units

SMALL_SHARE, KEPT_PART = 0.03, 0.05
"""Tensors of less than this share of the budget may be kept in part, if that is asked for; a point counts those as
live of which it keeps more than the second share."""
LEAST_PART = 0.05
"""A number of runs that differs by no more than this from an integer counts as one."""
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
    has_run : tuple of frozenset of int
        Tasks without precedence to each cut's that have run before it.
    claimed_time : float
        Objective of the point; only simulation gives the time of its schedule.
    exact : bool
        Whether the program was solved to optimality, or to within the slack that was asked for.
    """

    bound: float
    live: tuple[frozenset[int], ...] | None
    claimed_time: float
    exact: bool
    has_run: tuple[frozenset[int], ...] = ()

    @property
    def infeasible(self) -> bool:
        """Whether it is proven that no schedule in the program's order fits."""
        return self.bound == math.inf


@dataclass(frozen=True, slots=True)
class PathRow:
    """A row of a program: sum of S over the path + runs of its last tensor's producers >= need.

    Attributes
    ----------
    first, last : int
        The two cuts; -1 for the end of the step.
    tensors : tuple of int
        The path: the producer of each reads the next.
    reader : int
        The operation whose first run between the cuts reads the first of the tensors; -1 if this is live at the last
        cut.
    """

    first: int
    last: int
    tensors: tuple[int, ...]
    reader: int


class CutRelaxation:
    """The integer program over a chain of cuts.

    Parameters
    ----------
    graph : Graph
    precedence : Precedence
    cuts : sequence of int
        Moments of the precedence, each before the next.
    budgets : sequence of int
        Bytes at each cut, resident tensors included. The optimum is a lower bound only if
        every entry is at least the true budget; smaller entries help to find schedules.
    deadline : Deadline, optional
        A program that is not built by then is not solved: its answer has no bound and no point.
    reduction : Reduction, optional
        Of the graph; by default one that absorbs nothing, so that every tensor may be kept by itself.
    most_whole : int, optional
        At each cut, small tensors beyond so many larger ones may be kept in part: the program is
        then solved sooner, and bounds hardly less. By default every tensor is kept or not.
    paths : iterable of PathRow, optional
        Rows of other programs; those between cuts of this one are added.
    whole_cuts : container of int, optional
        At other cuts, all tensors may be kept in part, and tasks may have run in part. By default at none.
    counted : collection of int, optional
        Operations of which it is an integer how often they run again in all. If there are any, what runs again between
        a cut and the next may be a part.

    Attributes
    ----------
    paths : dict of PathRow to None
        The rows over paths that the program has.
    counted : tuple of int
        What was given.

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
        reduction: Reduction | None = None,
        most_whole: int | None = None,
        paths: Iterable[PathRow] = (),
        whole_cuts: Container[int] | None = None,
        counted: Collection[int] = (),
    ) -> None:
        self.graph, self.index, self.cuts = graph, graph.index, list(cuts)
        self.precedence = precedence
        self.after = [precedence.after(cut) for cut in cuts]
        self.reduction = reduction or Reduction(graph, absorbs=False)
        self.merged = [self.reduction.merged(precedence, cut) for cut in cuts]
        self.before = [merged.before for merged in self.merged]
        times, sizes = time_units(graph, fractional_bits=_FRACTIONAL_TIME_BITS), byte_units(graph, max(budgets))
        self.times, self.time_scale = times.times, times.scale
        self.byte_scale, self.exact_bytes = sizes.size, sizes.exact
        self.program = IntegerProgram("ilp", deadline)
        self.constant = 0.0
        self.first_run: dict[int, Variable] = {}
        self.has_run: list[dict[int, Variable]] = [{} for _ in cuts]
        self.first_of: list[dict[int, Variable]] = [{} for _ in cuts]
        """Of the tasks of a cut that has several: the one that runs at it."""
        self.saved: list[dict[int, Variable]] = [{} for _ in cuts]
        self.recomputed: dict[int, dict[int, Variable]] = {k: {} for k in range(-1, len(cuts))}
        """Between a cut and the next: -1 is the start."""
        # The least R is integral where S and Y are, unless an operation may stand for another or never run.
        self._continuous = all(len(task) == 1 for task in self.index.tasks) and (
            not precedence.reorder or len(self.reduction.necessary) == len(self.index.tasks)
        )
        self._most_whole, self.counted = most_whole, tuple(counted)
        self._is_whole = [whole_cuts is None or cut in whole_cuts for cut in cuts]
        self._least = 0.0
        self.paths: dict[PathRow, None] = {}
        with suppress(TimeIsUpError):
            self._build(budgets, paths)

    def solve(
        self, deadline: Deadline, slack: float = 0.0, target: float = -math.inf, *, presolve: bool = True
    ) -> CutAnswer:
        """Minimize the time by the deadline.

        The search ends early once the point exceeds the bound by at most the slack, or takes no longer than `target`.
        """
        slack, goal = slack / self.time_scale, target / self.time_scale - self.constant
        only_bound = bool(self.counted)
        result: MilpResult = self.program.minimize(
            deadline, absolute_gap=slack, target=goal, only_bound=only_bound, presolve=presolve
        )
        if result.infeasible:
            return CutAnswer(math.inf, None, math.inf, exact=True)
        least = max(self._least, self.constant + max(0.0, result.bound))
        if all(time.is_integer() for time in self.times):
            # Every schedule takes an integer number of units: rounding up undoes the loss to tolerances.
            least = math.ceil(least - 1e-4)
        if not result.found:
            return CutAnswer(least * self.time_scale, None, math.inf, exact=False)
        claimed = self.constant + result.objective
        exact = result.objective - result.bound <= slack + 1e-7 * max(1.0, claimed)
        return CutAnswer(
            least * self.time_scale, self.live(KEPT_PART), claimed * self.time_scale, exact, self.have_run()
        )

    def live(self, part: float) -> tuple[frozenset[int], ...]:
        """Return the tensors of which the variables' values keep more than a part at each cut."""
        return tuple(
            self.reduction.with_twins(t for t, variable in saved.items() if (variable.value or 0.0) > part)
            for saved in self.saved
        )

    def counted_in_part(self) -> list[int]:
        """Return the operations whose number of runs after the first cut, by the variables' values, is no integer.

        Those come first for which the difference takes most time.
        """
        counts = {i: math.fsum(step.value or 0.0 for step in self._steps(i)) for i in range(len(self.times))}
        parts = {i: abs(count - round(count)) for i, count in counts.items()}
        return sorted((i for i in parts if parts[i] > LEAST_PART), key=lambda i: -parts[i] * self.times[i])

    def tasks(self) -> list[int]:
        """Return the task that first runs at each cut, by the variables' values."""
        return [
            max(self.precedence.members(cut), key=lambda task: (first[task].value or 0.0) if task in first else 0.0)
            for cut, first in zip(self.cuts, self.first_of, strict=True)
        ]

    def chosen(self) -> dict[int, int]:
        """Return the alternatives that run first, by task and by the variables' values."""
        return {self.index.task_of[i]: i for i, variable in self.first_run.items() if is_set(variable)}

    def have_run(self) -> tuple[frozenset[int], ...]:
        """Return the tasks without precedence to each cut's that have run before it, by the variables' values."""
        return tuple(frozenset(self._have_run(k)) for k in range(len(self.cuts)))

    def relaxed(
        self, deadline: Deadline, broken: Iterable[Iterable[PathRow]] = (), least_part: float = 0.0
    ) -> tuple[float, list[float]] | None:
        """Return a lower bound on the time, and the largest saving per additional byte at each cut.

        With one cut, the two define a line that is a lower bound for every budget. None if no line was found.
        `broken` yields rows over paths that the variables' values break; they are added until they raise the bound by
        at most `least_part` of what all have raised it by. Those that then hold with equality stay in the program.
        """
        rows = ({path: self._row(path) for path in paths} for paths in broken)
        found = self.program.relax(deadline, "bytes_", rows, least_part=least_part)
        if found is None:
            return None
        self.paths.update(dict.fromkeys(found.binding))
        unit = self.time_scale / self.byte_scale
        # Subtract what the solver's tolerances may have added.
        self._least = max(self._least, self.constant + found.objective * (1 - 1e-9))
        return self._least * self.time_scale, [price * unit for price in found.prices]

    def _have_run(self, k: int) -> Iterator[int]:
        """Yield the tasks without precedence to a cut's that have run before it."""
        for number in bits(self.before[k] & ~self.precedence.before(self.cuts[k])):
            yield number
        for number, variable in self.has_run[k].items():
            if is_set(variable):
                yield number
                for member in self.merged[k].members.get(self.index.tasks[number][0], ()):
                    yield self.index.task_of[member]

    def _build(self, budgets: Sequence[int], paths: Iterable[PathRow]) -> None:
        self._add_first_runs()
        for k in range(len(budgets)):
            self._add_order(k)
            self._add_tensors(k, budgets[k])
        for k in range(len(budgets)):
            self._add_recomputed(k)
        for k, budget in enumerate(budgets):
            self._add_bytes(k, budget)
        self._add_flow(-1, set())
        for k in range(len(budgets)):
            self._add_flow(k, self._add_reads(k))
        for i in self.counted:
            self._add_count(i)
        for path in paths:
            self._add_path(path)

    def _add_first_runs(self) -> None:
        """A[o]: operation o is its task's first run; needed where a task has alternatives or is not necessary."""
        constant = []
        for number, task in enumerate(self.index.tasks):
            if len(task) == 1 and number in self.reduction.necessary:
                constant.append(self.times[task[0]])
                continue
            for i in task:
                self.first_run[i] = self.program.binary("first", self.times[i])
                if self.before[0] >> number & 1 and self.graph.operations[i].repeatable:
                    # Recomputations before the first cut matter only for such tasks.
                    self.recomputed[-1][i] = self.program.binary("recomputed_0", self.times[i])
            terms = [(self.first_run[i], 1.0) for i in task]
            if number in self.reduction.necessary:
                # A necessary task has exactly one first run.
                self.program.at_least("first_runs", terms, 1)
            self.program.at_most("one_first_run", terms, 1)
        self.constant = math.fsum(constant)

    def _add_order(self, k: int) -> None:
        """Y[u,k]: a task without precedence to the cut's has run before it, and so have those that it reads from."""
        merged, known = self.merged[k], self.before[k] | self.after[k] | 1 << self.cuts[k]
        for number in bits(~known & (1 << len(self.index.tasks)) - 1):
            i = self.index.tasks[number][0]
            if i not in self.first_run and not self.reduction.folded[i] and i not in merged.lead:
                make = self.program.binary if self._is_whole[k] else self.program.fraction
                self.has_run[k][number] = make(f"has_run_{k}")
        for number, variable in self.has_run[k].items():
            i, mine = self.index.tasks[number][0], term(variable)
            for member in (i, *merged.members.get(i, ())) if k > 0 else ():
                earlier = self.state(k - 1, self.index.task_of[member])
                if earlier is not None and earlier.terms:
                    self._at_least(f"still_{k}", mine, earlier)
            for source in {self.state(k, self.reduction.task_of(tensor)) for tensor in self.inputs(k, i)}:
                if source is not None and source.terms:
                    self._at_least(f"order_{k}", source, mine)

    def inputs(self, k: int, i: int) -> list[int]:
        """Return what an operation reads that runs after cut k together with those that it has absorbed."""
        return self.merged[k].inputs.get(i, self.reduction.inputs[i])

    def _add_tensors(self, k: int, budget: int) -> None:
        """S[t,k]: a tensor is live at cut k."""
        index, found = self.index, {}
        for number in (*bits(self.before[k]), *self.has_run[k]):
            for i in index.tasks[number]:
                absorbed = self.reduction.folded[i] or i in self.merged[k].lead
                for tensor in () if absorbed else index.outputs[i]:
                    if tensor not in self.reduction.twin_of:
                        found[tensor] = index.storage_bytes[index.storage_of[tensor]]
        small = SMALL_SHARE * (budget - index.resident_bytes)
        largest = sorted(found.values(), reverse=True)
        whole = min(small, largest[self._most_whole]) if self._most_whole and self._most_whole < len(found) else 0
        for tensor, size in found.items():
            make = self.program.binary if self._is_whole[k] and size >= whole else self.program.fraction
            self.saved[k][tensor] = make(f"saved_{k}")

    def _add_recomputed(self, k: int) -> None:
        """R[o,k]: operation o runs again between cut k and the next."""
        merged = self.merged[k]
        tasks = [*bits(self.before[k]), *self.has_run[k]]
        # A task with alternatives may run once more after its first run, for outputs that the first lacks.
        tasks += [task for task in self.precedence.members(self.cuts[k]) if len(self.index.tasks[task]) > 1]
        for i in (i for number in tasks for i in self.index.tasks[number]):
            together = [i, *merged.members.get(i, ())]
            may_repeat = all(self.graph.operations[member].repeatable for member in together)
            if may_repeat and not (self.reduction.folded[i] or i in merged.lead):
                make = self.program.fraction if self._continuous or self.counted else self.program.binary
                self.recomputed[k][i] = make(f"recomputed_{k}", sum(self.times[member] for member in together))

    def _add_count(self, i: int) -> None:
        """How often an operation runs again after the first cut is an integer."""
        terms = [(step, 1.0) for step in self._steps(i)]
        self.program.count("count", terms, len(terms))

    def _steps(self, i: int) -> Iterator[Variable]:
        """Yield R of an operation, or of the one that it runs right before, after each cut where it may run again."""
        for k, merged in enumerate(self.merged):
            if (step := self.recomputed[k].get(merged.lead.get(i, i))) is not None:
                yield step

    def _add_bytes(self, k: int, budget: int) -> None:
        """Live storages, the outputs of the cut's operation and its workspace fit the budget."""
        index, scale = self.index, self.byte_scale
        terms: list[tuple[Variable, float]] = []
        for storage, tensors in self._holders(k).items():
            twins = (index.storage_of[twin] for twin in self.reduction.twins.get(tensors[0], ()))
            size = float(sum(index.storage_bytes[s] for s in (storage, *twins)) // scale)
            if not size:
                continue
            if len(tensors) == 1:
                terms.append((self.saved[k][tensors[0]], size))
                continue
            held = self.program.fraction(f"held_{k}")
            terms.append((held, size))
            for tensor in tensors:
                # A storage is held while any of its tensors is live.
                self.program.at_least(f"held_{k}", [(held, 1.0), (self.saved[k][tensor], -1.0)], 0)
        free = budget - index.resident_bytes
        runs = self._runs_at(k)
        for i, run in runs.items():
            own = self._produced_bytes(i)
            free -= int(run.constant) * own
            terms += [(variable, coefficient * float(own // scale)) for variable, coefficient in run.terms]
            for tensor in self.reduction.with_bases(self.reduction.inputs[i]):
                if tensor in self.saved[k]:
                    # The inputs of the cut's operation are live.
                    self._at_least(f"input_{k}", term(self.saved[k][tensor]), run)
        # A sum of multiples of the scale is within a limit exactly if it is within the limit rounded down.
        self.program.at_most(f"bytes_{k}", terms, free // scale if self.exact_bytes else -(-free // scale))

    def _runs_at(self, k: int) -> dict[int, Sum]:
        """Return the operations of which one runs at a cut, each with whether it does."""
        members = self.precedence.members(self.cuts[k])
        if len(members) == 1:
            return {i: term(self.first_run[i]) if i in self.first_run else ONE for i in self.index.tasks[members[0]]}
        make, first = self.program.binary if self._is_whole[k] else self.program.fraction, self.first_of[k]
        for task in members:
            first[task] = make(f"first_{k}")
            inputs = self.reduction.inputs[self.index.tasks[task][0]]
            for source in {self.state(k, self.reduction.task_of(tensor)) for tensor in inputs}:
                if source is not None and source.terms:
                    # What it reads has been computed before.
                    self._at_least(f"order_{k}", source, term(first[task]))
        self.program.at_least(f"first_of_{k}", [(variable, 1.0) for variable in first.values()], 1)
        return {self.index.tasks[task][0]: term(variable) for task, variable in first.items()}

    def _holders(self, k: int) -> dict[int, list[int]]:
        """Return the tensors that may hold each storage at a cut: not views whose base is live as well."""
        by_storage: dict[int, list[int]] = {}
        for tensor, saved in self.saved[k].items():
            storage, base = self.index.storage_of[tensor], self.reduction.base.get(tensor, -1)
            while base >= 0 and base not in self.saved[k]:
                base = self.reduction.base.get(base, -1)
            if base in self.saved[k]:
                # The base of a live view counts as live: it lies on the same storage.
                self.program.at_least(f"base_{k}", [(self.saved[k][base], 1.0), (saved, -1.0)], 0)
            else:
                by_storage.setdefault(storage, []).append(tensor)
        return by_storage

    def _produced_bytes(self, i: int) -> int:
        return self.index.allocated_bytes[i] + self.graph.operations[i].workspace_bytes

    def _add_reads(self, k: int) -> set[int]:
        """What runs between a cut and the next finds its inputs: live, recomputed, or first computed in between.

        Returns the tensors that every schedule reads there.
        """
        reads = [
            (tensor, demand)
            for inputs, demand in self._demands(k)
            for tensor in self.reduction.with_bases(inputs)
            if tensor in self.saved[k]
        ]
        required = {tensor for tensor, demand in reads if demand == ONE}
        if k + 1 == len(self.cuts):
            required |= self.reduction.results & self.saved[k].keys()
        for tensor in sorted(required):
            self._at_least(f"required_{k}", self._available(tensor, k), ONE)
        for tensor, demand in reads:
            if tensor not in required:
                self._at_least(f"read_{k}", self._available(tensor, k), demand)
        return required

    def _demands(self, k: int) -> Iterator[tuple[list[int], Sum]]:
        """Yield what operations read, and how often (0 or 1) each operation runs between a cut and the next."""
        for i, recomputed in self.recomputed[k].items():
            if self.index.task_of[i] not in self.has_run[k]:
                yield self.inputs(k, i), term(recomputed)
        for number in self.has_run[k]:
            i = self.index.tasks[number][0]
            demand = self._first_run_between(number, k, k + 1)
            if i in self.recomputed[k]:
                demand = demand.plus(term(self.recomputed[k][i]))
            yield self.inputs(k, i), demand
        for number in bits(self.after[k]):
            for i in self.index.tasks[number]:
                demand = self._first_read(i, k, k + 1)
                if demand != ZERO:
                    yield self.reduction.inputs[i], demand

    def _first_read(self, i: int, k: int, end: int) -> Sum:
        """Return whether an operation reads its inputs for its task's first run, and this is between two cuts."""
        number = self.index.task_of[i]
        if number in self.has_run[k]:
            return self._first_run_between(number, k, end)
        then = self.state(end, number)
        if then is None or then == ZERO:
            return ZERO
        return term(self.first_run[i]) if i in self.first_run else then

    def state(self, k: int, number: int) -> Sum | None:
        """Return whether a task has run before cut k (the end, after the last), or None if the program does not say."""
        if k == len(self.cuts) or self.before[k] >> number & 1:
            return ONE
        if self.after[k] >> number & 1 or number == self.cuts[k]:
            return ZERO
        lead = self.merged[k].lead.get(self.index.tasks[number][0])
        variable = self.has_run[k].get(number if lead is None else self.index.task_of[lead])
        return None if variable is None else term(variable)

    def _first_run_between(self, number: int, k: int, end: int) -> Sum:
        """Return whether a task without precedence to the cut's first runs between two cuts."""
        then = self.state(end, number)
        assert then is not None
        return then.plus(term(self.has_run[k][number]), -1.0)

    def _available(self, tensor: int, k: int) -> Sum:
        """Return the sum of: live at cut k, recomputed before the next, first computed before the next."""
        return term(self.saved[k][tensor]).plus(self._runs(tensor, k, k + 1))

    def _runs(self, tensor: int, k: int, end: int) -> Sum:
        """Return how often what produces a tensor runs between two cuts."""
        producers = self.index.producers[tensor]
        steps = (self.recomputed[j].get(self.merged[j].lead.get(i, i)) for j in range(k, end) for i in producers)
        row = Sum(tuple((step, 1.0) for step in steps if step is not None))
        number = self.reduction.task_of(tensor)
        return row.plus(self._first_run_between(number, k, end)) if number in self.has_run[k] else row

    def _add_path(self, path: PathRow) -> None:
        """Add the row of a path if the program has its cuts, and others between them."""
        if path.first in self.cuts and (path.last < 0 or path.last in self.cuts):
            k, end = self._ends(path)
            if end > k + 1:
                self.program.at_least("path", *self._row(path))
                self.paths[path] = None

    def _ends(self, path: PathRow) -> tuple[int, int]:
        return self.cuts.index(path.first), self.cuts.index(path.last) if path.last >= 0 else len(self.cuts)

    def _row(self, path: PathRow) -> Row:
        """Return the terms and the least value of their sum for a path between two of the program's cuts."""
        k, end = self._ends(path)
        row = self._runs(path.tensors[-1], k, end)
        row = row.plus(Sum(tuple((self.saved[k][tensor], 1.0) for tensor in path.tensors)))
        if path.reader >= 0:
            need = self._first_read(path.reader, k, end)
        else:
            need = ONE if end == len(self.cuts) else term(self.saved[end][path.tensors[0]])
        return at_least(row, need)

    def _at_least(self, name: str, row: Sum, demand: Sum) -> None:
        self.program.at_least(name, *at_least(row, demand))

    def _add_flow(self, k: int, required: set[int]) -> None:
        """A tensor that is live at a cut was live at the one before, or has been computed since."""
        for tensor, saved in self.saved[k + 1].items() if k + 1 < len(self.cuts) else ():
            producers = self.index.producers[tensor]
            if k >= 0 and tensor in self.saved[k]:
                if tensor not in required:
                    self._at_least(f"flow_{k}", self._available(tensor, k), term(saved))
            elif any(i in self.first_run for i in producers):
                # A tensor that only some alternatives produce is live only if one of them has run.
                runs = [of[i] for of in (self.first_run, self.recomputed[k]) for i in producers if i in of]
                self.program.at_most(f"produced_{k + 1}", [(saved, 1.0), *((variable, -1.0) for variable in runs)], 0)
