"""Compute the least time for every number of bytes kept at one cut: lower bounds, and choices that attain them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.graph import Graph
from scheduler.problem import least_time
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutAnswer, CutRelaxation

MOST_LINES = 60
"""Largest number of lower-bound lines."""
PRECISION = 1e-6
"""The lines approximate the relaxed frontier to within this share of the graph's time."""


@dataclass(frozen=True, slots=True)
class Point:
    """A choice of tensors to keep.

    Attributes
    ----------
    bytes : int
    time : float
        Time lost to recomputing the others; no choice of at most so many bytes loses less.
    live : frozenset of int
        Tensors to keep.
    """

    bytes: int
    time: float
    live: frozenset[int]


class CutFrontier:
    """The time that a graph loses, as a function of the bytes kept when one task first runs.

    Relaxed integer programs give lines below the frontier; exact ones give its points.

    Parameters
    ----------
    graph : Graph
    task : int
        The cut is its first run in the input order: everything before it has run.
    most_bytes : int, optional
        Largest number of bytes to keep; by default the bytes of everything that is read later.

    Attributes
    ----------
    produced_before_bytes : int
        Outputs of all operations before the task.
    produced_bytes : int
        Outputs and workspace of the task itself, which count at the cut in addition to what is kept.
    """

    def __init__(self, graph: Graph, task: int, most_bytes: int | None = None) -> None:
        self.graph, self.task = graph, task
        index = graph.index
        i = index.tasks[task][0]
        self.produced_bytes = index.allocated_bytes[i] + graph.operations[i].workspace_bytes
        before = {index.storage_of[t] for k in range(i) for t in index.outputs[k]}
        after = {index.storage_of[t] for k in range(i, len(graph.operations)) for t in index.inputs[k]}
        after |= {index.storage_of[t] for t, result in enumerate(index.is_result) if result}
        self.produced_before_bytes = sum(index.storage_bytes[s] for s in before)
        everything = sum(index.storage_bytes[s] for s in before & after)
        self.most_bytes = everything if most_bytes is None else most_bytes
        self._precedence = Precedence(graph, reorder=False)
        self._base = least_time(graph)
        self._unit = 1
        self._answers: dict[int, CutAnswer] = {}
        self._lines: dict[int, tuple[float, float]] = {}
        """By limit: the least time lost at that limit, and the largest saving per additional byte."""

    def sample(self, limit: int, deadline: Deadline) -> CutAnswer:
        """Return the answer for at most so many bytes kept, and store it if it is exact."""
        if limit not in self._answers:
            answer = self._program(limit).solve(deadline)
            if not (answer.exact or answer.infeasible):
                return answer
            self._answers[limit] = answer
        return self._answers[limit]

    def relax(self, deadline: Deadline) -> None:
        """Find lines whose maximum approximates the frontier of the relaxed program, as closely as time allows."""
        pending = [(0, self.most_bytes)]
        for limit in (0, self.most_bytes):
            self._relax(limit, deadline)
        while pending and not deadline.passed and len(self._lines) < MOST_LINES:
            low, high = pending.pop(0)
            if high not in self._lines:
                continue
            if low not in self._lines:
                # No schedule keeps so little: search for the smallest feasible limit.
                middle = (low + high) // 2
                if high - low > max(1, self.most_bytes // MOST_LINES):
                    self._relax(middle, deadline)
                    pending += [(low, middle), (middle, high)] if middle in self._lines else [(middle, high)]
                continue
            (time, price), (least, slope) = self._lines[low], self._lines[high]
            if price <= slope:
                continue
            meeting = int((time + price * low - least - slope * high) / (price - slope))
            if low < meeting < high:
                chord = time + (least - time) * (meeting - low) / (high - low)
                if chord - self.least_time(meeting) > PRECISION * self._base:
                    self._relax(meeting, deadline)
                    pending += [(low, meeting), (meeting, high)]

    def _relax(self, limit: int, deadline: Deadline) -> None:
        if limit in self._lines:
            return
        program = self._program(limit)
        self._unit = program.byte_scale if program.exact_bytes else 1
        line = program.relaxed(deadline)
        if line is not None:
            # The program counts in units: its line goes through the last full unit within the limit.
            rounded = limit - limit % self._unit
            (price,) = line[1]
            self._lines[limit] = line[0] - self._base - price * (limit - rounded), price

    @property
    def prices(self) -> list[float]:
        """The slopes of the lines: time saved per byte."""
        return [price for _, price in self._lines.values()]

    def least_time(self, kept: float) -> float:
        """Return the lower bound that the lines prove for so many bytes kept."""
        return max((time - price * (kept - limit) for limit, (time, price) in self._lines.items()), default=0.0)

    def least_cost(self, price: float) -> tuple[float, float]:
        """Return a lower bound on time + price x bytes, and the bytes near which the lines attain it.

        A convex combination of two lines, one steeper than the price and one not, whose slope
        equals the price, is a bound for all bytes. So is the value at 0 bytes of a line that is
        not steeper than the price.
        """
        slope, at_zero = np.array([(0.0, 0.0), *((p, t + p * limit) for limit, (t, p) in self._lines.items())]).T
        flat = slope <= price
        best, gentle = float(at_zero[flat].max()), int(np.flatnonzero(flat)[at_zero[flat].argmax()])
        if flat.all():
            return best, 0.0
        rise = slope[~flat, None] - slope[None, flat]
        share = (price - slope[None, flat]) / rise
        values = share * at_zero[~flat, None] + (1 - share) * at_zero[None, flat]
        if values.max() >= best:
            best, gentle = float(values.max()), int(np.flatnonzero(flat)[values.max(axis=0).argmax()])
        kept = float(((at_zero[~flat] - at_zero[gentle]) / (slope[~flat] - slope[gentle])).max())
        return best, min(max(kept, 0.0), float(self.most_bytes))

    def points(self, price: float, most: float, deadline: Deadline) -> list[Point] | None:
        """Return all points whose time + price x bytes is at most `most`; None if time ran out."""
        least, around = self.least_cost(price)
        if least > most:
            return []
        found: list[Point] = []
        low, limit, inside = 0, self.most_bytes, int(around)
        if self.least_time(inside) + price * inside <= most:
            low = self._last_within(price, most, inside, 0)
            limit = self._last_within(price, most, inside, self.most_bytes)
        while limit >= low:
            if deadline.passed:
                return None
            answer = self.sample(limit, deadline)
            if answer.infeasible:
                break
            if answer.live is None or not answer.exact:
                return None
            # Where bytes are rounded, a point may exceed its limit; the proof holds up to the limit only.
            kept, time = min(limit, self.kept_bytes(answer.live[0])), max(0.0, answer.bound - self._base)
            if time + price * kept <= most:
                found.append(Point(kept, time, answer.live[0]))
            limit = kept - self._unit
        return found

    def known(self) -> list[frozenset[int]]:
        """Return the tensors kept by each point found so far."""
        return list({answer.live[0]: None for answer in self._answers.values() if answer.live is not None})

    def kept_bytes(self, live: frozenset[int]) -> int:
        """Return the bytes of the storages of these tensors."""
        index = self.graph.index
        return sum(index.storage_bytes[s] for s in {index.storage_of[t] for t in live})

    def _last_within(self, price: float, most: float, inside: int, outside: int) -> int:
        """Return the bytes farthest towards `outside` for which the lines allow a cost of at most `most`."""
        if self.least_time(outside) + price * outside <= most:
            return outside
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            if self.least_time(middle) + price * middle <= most:
                inside = middle
            else:
                outside = middle
        return inside if inside < outside else outside

    def _program(self, limit: int) -> CutRelaxation:
        return CutRelaxation(self.graph, self._precedence, [self.task], [limit + self.produced_bytes])
