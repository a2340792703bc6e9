"""Bound a deep network at one cut: one integer program per distinct block, combined by a knapsack."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.problem import Problem, necessary_tasks
from scheduler.schedule import Compute, Schedule
from scheduler.solution import TOLERANCE
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.hierarchical.graphs import BlockGraph
from scheduler.solvers.hierarchical.knapsack import TooManyLabelsError, choose
from scheduler.solvers.ilp.decoding import decode
from scheduler.solvers.ilp.frontier import CutFrontier, Point
from scheduler.solvers.ilp.views import fold_views

_GROWTH = 1.5


@dataclass(frozen=True)
class _Side:
    """A way to treat a block's output: keep it, which takes `bytes`, or recompute it."""

    frontier: CutFrontier
    bytes: int
    recompute: bool


class OneCut:
    """The step at one moment of the last block's backward, and what every block keeps there.

    All earlier blocks have run forward and not yet backward. Each keeps some of its tensors,
    and keeps or recomputes its output; the bytes of all blocks together must fit. A price per
    byte makes the blocks independent of one another and gives a bound. A knapsack over the
    points of each block near that price finds the best choice within a slack of the bound; if
    there is none, the bound grows by the slack.

    Parameters
    ----------
    problem : Problem
    parts : sequence of BlockGraph
    frontiers : dict of int to CutFrontier
        By id of the block's graph, at the marker; missing ones are added.
    at_peak : bool
        If true, the moment is the save-everything step's peak in the last block's backward,
        and the bound is for the input order; otherwise it is the end of the forward, and the
        bound is for any order.

    Attributes
    ----------
    bound : float
        Lower bound on the time of every schedule; inf if none fits.
    live : frozenset of int or None
        Tensors to keep at the cut, once an optimum is known.
    """

    def __init__(
        self,
        problem: Problem,
        parts: Sequence[BlockGraph],
        frontiers: dict[int, CutFrontier],
        *,
        at_peak: bool,
    ) -> None:
        self.problem, self.parts = problem, parts
        last = parts[-1]
        self._operation = _peak_operation(problem, last) if at_peak else last.marker
        self._last = CutFrontier(last.graph, last.graph.index.task_of[self._operation])
        self.bound = problem.least_time
        self.live: frozenset[int] | None = None
        self._limit = problem.budget_bytes - problem.graph.resident_bytes - self._last.produced_bytes
        self._root = fold_views(problem.graph, free=True).root
        read = {self._root[t] for t in self._read_later()}
        self._output_bytes = {id(part): self._least_output_bytes(part, read) for part in parts[:-1]}
        self._sides = self._all_sides(frontiers)
        self._counts = Counter(self._key(part) for part in parts)

    def run(self, deadline: Deadline, best_time: float = math.inf) -> None:
        """Raise the bound until the optimum is found, the bound reaches `best_time`, or time is up."""
        least = self.problem.least_time
        lines = {id(side.frontier): side.frontier for sides in self._sides.values() for side in sides}
        for frontier in lines.values():
            frontier.relax(deadline)
        price, value = self._best_price()
        self.bound = max(self.bound, least + value)
        slack = TOLERANCE * least
        while not deadline.passed and self.bound < best_time * (1 - TOLERANCE):
            options = self._options(price, slack, deadline)
            if options is None:
                return
            arrays = {
                key: np.array([(p.bytes + side.bytes, cost) for side, p, cost in row]).reshape(-1, 2)
                for key, row in options.items()
            }
            try:
                chosen = choose([arrays[self._key(part)] for part in self.parts], self._limit, price, slack)
            except TooManyLabelsError:
                return
            if chosen is not None:
                self.bound = max(self.bound, least + value + chosen[0])
                self.live = self._live([options[self._key(p)][k] for p, k in zip(self.parts, chosen[1], strict=True)])
                return
            if slack > least:
                # No choice loses more than the time of the whole step, and none within that fits.
                self.bound = math.inf
                return
            self.bound = max(self.bound, least + value + slack)
            slack *= _GROWTH

    def schedule(self) -> Schedule | None:
        """Return the schedule that keeps `live` at the cut; None if that is not known."""
        if self.live is None:
            return None
        index, operations = self.problem.graph.index, self.parts[-1].operations
        cut = next(i for i in operations[self._operation :] if i >= 0)
        return decode(self.problem.graph, [index.task_of[cut]], [self.live])

    def _key(self, part: BlockGraph) -> tuple[int, int]:
        """Return a key that is equal for blocks with equal options."""
        return (-1, 0) if part is self.parts[-1] else (id(part.graph), self._output_bytes[id(part)])

    def _all_sides(self, frontiers: dict[int, CutFrontier]) -> dict[tuple[int, int], list[_Side]]:
        sides = {self._key(self.parts[-1]): [_Side(self._last, 0, recompute=False)]}
        for part in self.parts[:-1]:
            if self._key(part) in sides:
                continue
            marker = part.graph.index.task_of[part.marker]
            kept = frontiers.setdefault(id(part.graph), CutFrontier(part.graph, marker))
            row = [_Side(kept, self._output_bytes[id(part)], recompute=False)]
            other = part.recomputed_output_graph
            if other is not None:
                recomputed = frontiers.setdefault(id(other), CutFrontier(other, marker, kept.produced_before_bytes))
                row.append(_Side(recomputed, 0, recompute=True))
            sides[self._key(part)] = row
        return sides

    def _read_later(self) -> set[int]:
        """Return the tensors that, in every schedule, some backward operation reads at the cut or later."""
        graph, last = self.problem.graph, self.parts[-1]
        earlier = set(last.operations[last.marker : self._operation])
        tasks = [graph.index.tasks[task] for task in necessary_tasks(graph)]
        later = [i for i, *others in tasks if not others and graph.operations[i].phase == "backward"]
        return {t for i in later if i not in earlier for t in graph.index.inputs[i]}

    def _least_output_bytes(self, part: BlockGraph, read: set[int]) -> int:
        """Return the least bytes for any part of a block's output; 0 if not all of it is read later."""
        index, root = self.problem.graph.index, self._root
        tensors = {root[part.tensors[t]] for t in part.output & part.exported}
        if tensors - read:
            return 0
        return min((index.storage_bytes[index.storage_of[t]] for t in tensors if t >= 0), default=0)

    def _cost(self, key: tuple[int, int], price: float) -> float:
        return min(side.frontier.least_cost(price)[0] + price * side.bytes for side in self._sides[key])

    def _best_price(self) -> tuple[float, float]:
        """Return the price per byte that gives the best bound, and that bound on the time lost."""
        prices = {0.0, *(p for sides in self._sides.values() for side in sides for p in side.frontier.prices)}

        def value(price: float) -> float:
            return sum(n * self._cost(key, price) for key, n in self._counts.items()) - price * self._limit

        best = max(prices, key=value)
        return best, value(best)

    def _options(
        self, price: float, slack: float, deadline: Deadline
    ) -> dict[tuple[int, int], list[tuple[_Side, Point, float]]] | None:
        """Return each block's choices within the slack, each with its cost above the least; None if time ran out."""
        options: dict[tuple[int, int], list[tuple[_Side, Point, float]]] = {}
        for key, sides in self._sides.items():
            least = self._cost(key, price)
            options[key] = []
            for side in sides:
                points = side.frontier.points(price, least + slack - price * side.bytes, deadline)
                if points is None:
                    return None
                options[key] += [(side, p, p.time + price * (p.bytes + side.bytes) - least) for p in points]
        return options

    def _live(self, picked: Sequence[tuple[_Side, Point, float]]) -> frozenset[int]:
        live: set[int] = set()
        for part, (side, point, _) in zip(self.parts, picked, strict=True):
            kept = point.live | part.exported
            live |= {part.tensors[t] for t in (kept - part.output if side.recompute else kept)}
        return frozenset(live)


def _peak_operation(problem: Problem, part: BlockGraph) -> int:
    """Return the backward operation of a block, by position in its graph, where the save-everything step peaks."""
    place = {i: local for local, i in enumerate(part.operations)}
    highest, best = -1, part.marker
    ids = problem.graph.index.operation_ids
    for action, memory in zip(problem.save_everything, problem.baseline.memory, strict=True):
        if isinstance(action, Compute):
            local = place.get(ids[action.operation], -1)
            if local > part.marker and memory > highest:
                highest, best = int(memory), local
    return best
