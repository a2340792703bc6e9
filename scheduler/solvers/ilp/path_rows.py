"""Find rows over several intervals between cuts that a point of the linear relaxation breaks.

What is needed at a cut or before it was live at an earlier cut, or has been computed since; and what
was recomputed in between found its inputs. Followed from a tensor back through the graph, this gives
for any two cuts and any path: some tensor of the path was live at the first cut, or the producer of
the last one ran between the two. Rows for neighboring cuts imply it of integral points. Of others
they do not: a relaxed program recomputes a half in each of two intervals, from halves of the inputs.
There are too many paths for all rows; a sweep in topological order finds for each tensor the path
whose row is broken most. The rows are to recomputation what the (l, S) inequalities of Barany, Van
Roy and Wolsey (1984) are to lot sizing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.precedence import bits
from scheduler.solvers.ilp.relaxation import CutRelaxation, PathRow

_Floats = npt.NDArray[np.float64]

LEAST_BROKEN = 0.05
"""Rows that a point breaks by less are left out."""
RELAXED_SHARE = 0.3
"""Share of the time for the relaxation of a program before it is solved."""
CLOSE_PART = 0.02
"""A relaxation gets no further rows once they raise it by at most this part of what all have."""
_TIE = 1e-6


def relax(
    program: CutRelaxation, deadline: Deadline, least_part: float = CLOSE_PART, least_broken: float = LEAST_BROKEN
) -> tuple[float, list[float]] | None:
    """Return what `program.relaxed` does, with rows over paths; those that hold the bound stay in the program.

    Rows that the point breaks by at least `least_broken` are added, again and again, until they raise the bound by at
    most `least_part` of what all have raised it by.
    """
    return program.relaxed(deadline, _rounds(program, least_broken) if len(program.cuts) > 1 else (), least_part)


def tighten(program: CutRelaxation, deadline: Deadline) -> float | None:
    """Give a program with several cuts its rows over paths, in a share of the time; return the bound of its relaxation.

    None for a program with one cut, or if its relaxation is not solved in time.
    """
    if len(program.cuts) == 1:
        return None
    relaxed = relax(program, deadline.within(RELAXED_SHARE * deadline.remaining))
    return None if relaxed is None else relaxed[0]


def _rounds(program: CutRelaxation, least: float) -> Iterator[list[PathRow]]:
    search = PathRows(program, least)
    while found := search.broken():
        yield found


class PathRows:
    """The search for broken rows of one program.

    Parameters
    ----------
    program : CutRelaxation
    least : float
        Rows that a point breaks by less are not found.
    """

    def __init__(self, program: CutRelaxation, least: float = LEAST_BROKEN) -> None:
        self.program, self.least = program, least
        index, count = program.index, len(program.cuts)
        # 0 and 1 stand for these constants, larger numbers for variables.
        self._live = np.zeros((count, len(index.producers)), np.intp)
        self._runs = np.zeros((count, len(index.task_of)), np.intp)
        self._state = np.zeros((count + 1, len(index.tasks)), np.intp)
        self._first = np.zeros(len(index.task_of), np.intp)
        for i, variable in program.first_run.items():
            self._first[i] = 2 + variable.number
        for k in range(count):
            for tensor, variable in program.saved[k].items():
                self._live[k, tensor] = 2 + variable.number
            lead, recomputed = program.merged[k].lead, program.recomputed[k]
            for i in range(len(index.task_of)):
                if (run := recomputed.get(lead.get(i, i))) is not None:
                    self._runs[k, i] = 2 + run.number
        for k in range(count + 1):
            for task in range(len(index.tasks)):
                state = program.state(k, task)
                if state is not None:
                    self._state[k, task] = 2 + state.terms[0][0].number if state.terms else state.constant
        self._task_of = np.array(index.task_of, np.intp)
        produced_by = [program.reduction.task_of(tensor) for tensor in range(len(index.producers))]
        self._produced_by = np.array(produced_by, np.intp)
        self._again = [list(self._reads_again(k)) for k in range(count)]
        self._needs = [np.array(list(self._first_reads(k)), np.intp).reshape(-1, 2).T for k in range(count)]

    def broken(self) -> list[PathRow]:
        """Return rows that the variables' values break: of those with the same last tensor, the one broken most."""
        values = np.array([0.0, 1.0, *(variable.value or 0.0 for variable in self.program.program.variables)])
        found = [pair for k in range(len(self.program.cuts) - 1) for pair in self._broken_from(k, values)]
        rows: dict[tuple[int, int, int], PathRow] = {}
        for _, row in sorted(found, key=lambda pair: -pair[0]):
            rows.setdefault((row.first, row.last, row.tensors[-1]), row)
        return list(rows.values())

    def _kept(self, k: int, tensors: Sequence[int]) -> list[int]:
        """Return the tensors, and their bases, that may be live at a cut."""
        return [t for t in self.program.reduction.with_bases(tensors) if t in self.program.saved[k]]

    def _reads_again(self, k: int) -> Iterator[tuple[int, list[int]]]:
        """Yield operations that may run again after a cut, in topological order, and what they read.

        Alternatives are left out: paths end there.
        """
        for i in sorted(self.program.recomputed[k]):
            if i not in self.program.first_run:
                yield i, self._kept(k, self.program.inputs(k, i))

    def _first_reads(self, k: int) -> Iterator[tuple[int, int]]:
        """Yield tensors that first runs after a cut read, and the operations."""
        program = self.program
        reads = [(i, program.inputs(k, i)) for i in (program.index.tasks[task][0] for task in program.has_run[k])]
        reads += [
            (i, program.reduction.inputs[i]) for task in bits(program.after[k]) for i in program.index.tasks[task]
        ]
        yield from ((tensor, i) for i, tensors in reads for tensor in self._kept(k, tensors))

    def _broken_from(self, k: int, values: _Floats) -> Iterator[tuple[float, PathRow]]:
        """Yield by how much rows from one cut to each but the next are broken, and the rows."""
        program, count = self.program, len(self.program.cuts)
        ends = range(k + 2, count + 1)
        # A task with variables has first run between the cuts.
        first = (values[self._state[ends]] - values[self._state[k]]).T
        available, through = self._sweep(k, values, first)
        kept = np.fromiter(program.saved[k], np.intp)
        results = [float(tensor in program.reduction.results) for tensor in program.saved[k]]
        live = np.vstack((values[self._live[k + 2 :, kept]], results)).T
        tensors, readers = self._needs[k]
        reads = first[self._task_of[readers]]
        only = self._first[readers] > 0
        reads[only] = values[self._first[readers[only]], np.newaxis] * (reads[only] >= 1.0)
        missing = np.concatenate((live - available[kept], reads - available[tensors]))
        tensors, readers = np.concatenate((kept, tensors)), np.concatenate((np.full(len(kept), -1), readers))
        most: dict[tuple[int, int], tuple[float, int]] = {}
        for entry, place in np.argwhere(missing > self.least).tolist():
            key, found = (int(tensors[entry]), place), (float(missing[entry, place]), int(readers[entry]))
            most[key] = max(most.get(key, found), found)
        for (tensor, place), (by, reader) in most.items():
            path = [tensor]
            while (follow := through[path[-1], place]) >= 0:
                path.append(int(follow))
            last = program.cuts[ends[place]] if ends[place] < count else -1
            yield by, PathRow(program.cuts[k], last, tuple(path), reader)

    def _sweep(self, k: int, values: _Floats, first: _Floats) -> tuple[_Floats, npt.NDArray[np.intp]]:
        """Return the least left side of a row for each tensor and end, and which tensor follows it on the path.

        That is -1 if the path ends with the tensor, since its producers' runs say less than what they read.
        """
        producers = self.program.index.producers
        # Live at the cut, or first computed since.
        available = values[self._live[k]][:, np.newaxis] + first[self._produced_by]
        through = np.full(available.shape, -1)
        runs = np.cumsum(values[self._runs[k:]], axis=0)[1:].T
        reads = dict(self._again[k])
        for i in sorted(self.program.recomputed[k]):
            again, follow = runs[i], np.full(len(runs[i]), -1)
            for tensor in reads.get(i, ()):
                most = available[tensor] - first[self._task_of[i]]
                limits = most < again - _TIE
                if limits.any():
                    again, follow = np.where(limits, np.maximum(most, 0.0), again), np.where(limits, tensor, follow)
            for tensor in self.program.index.outputs[i]:
                available[tensor] += again
                if len(producers[tensor]) == 1:
                    through[tensor] = follow
        return available, through
