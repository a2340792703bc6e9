"""Exact neighborhoods: free what concerns some operations, fix all else, and solve an integer program for the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.schedule import Schedule, runs_of, schedule_from_runs
from scheduler.simulator import simulate
from scheduler.solution import Proposal
from scheduler.solvers.anneal.contraction import Contraction
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.integer_program import TimeIsUpError
from scheduler.solvers.neighborhoods.sequence_program import SequenceProgram, Step, Storages

FIRST_SIZE, LEAST_SIZE = 12.0, 4.0
"""Number of free operations at first, and at least."""
GROWTH, SHRINKAGE = 1.1, 0.85
"""Factors of that number after a program that was solved to the end, and after one that was not."""
MOST_CHOICES = 300
"""A program has at most so many binaries; with more, few are solved within `MOST_NODES`."""
MOST_NODES = 20
"""Nodes of the branch and bound of one program."""
PROGRAM_SHARE = 0.05
"""Share of the remaining time that one program may take."""
SHAPES = 4
"""Number of ways to draw neighborhoods: see `NeighborhoodWalker._draw`."""
PART_SHARE = 0.25
"""Size of a ball around one recomputation, as a share of all free operations, where there are several."""
RECOMPUTED_SHARE = 0.5
"""Probability that a ball has a recomputed operation in its center, rather than any."""
PROGRAMS_PER_REPORT = 4
"""Programs that are solved between two reports."""
LEAST_OPERATIONS, MOST_OPERATIONS = 100, 2_000
"""Smaller graphs are left alone, since annealing has seen all of them and building programs would slow it down,
and so are larger ones: with a row of bytes per run, programs would take much memory."""


def suits(graph: Graph) -> bool:
    """Return whether a graph is neither too small for integer programs over neighborhoods nor too large."""
    return LEAST_OPERATIONS <= len(graph.operations) <= MOST_OPERATIONS


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return a problem's first start that fits, improved until the deadline by exact neighborhoods.

    Each integer program fixes all runs but those of a few operations, in the order of the runs
    (`NeighborhoodWalker`): a large neighborhood search.

    Guarantee: none, and no bound. Search space: input order, or any order if the problem allows
    it; the order of first runs stays that of the start. When: an answer that other searches no
    longer improve, on `LEAST_OPERATIONS` to `MOST_OPERATIONS` operations; other graphs get no
    schedule. Cost: anytime. Memory: at most 64 MiB.
    """
    space = "any order" if problem.reorder else "input order"
    fitting = (start for start in problem.starts if simulate(problem.graph, start).peak_bytes <= problem.budget_bytes)
    best = next(fitting, None)
    if best is None or not suits(problem.graph):
        return Proposal(None, space)
    walker = NeighborhoodWalker(Contraction(problem.graph, problem.budget_bytes), seed)
    while not deadline.passed:
        found = walker.improve(runs_of(problem.graph, best), PROGRAMS_PER_REPORT, deadline)
        if found is not None:
            best = found
            deadline.report(Proposal(best, space))
    return Proposal(best, space)


class NeighborhoodWalker:
    """Improve a sequence of runs by integer programs, each over the recomputations of a few operations.

    A program may drop every recomputation of a free operation, and recompute it before each run
    that reads it. All other runs stay as they are, in their order. Memory is constrained at every
    run, so that a point of the program is a schedule that fits. How many operations are free
    follows from how many programs are solved within `MOST_NODES`: counts, so that the answer
    depends on the seed only where the deadline is far.

    Parameters
    ----------
    contraction : Contraction
    seed : int
    """

    def __init__(self, contraction: Contraction, seed: int) -> None:
        self.contraction = contraction
        self.random = np.random.default_rng(seed)
        self.storages = Storages(contraction)
        self.sizes = [FIRST_SIZE] * SHAPES

    def improve(self, runs: Sequence[int], programs: int, deadline: Deadline) -> Schedule | None:
        """Solve so many programs, each from the best runs so far; return their schedule if it is faster.

        Parameters
        ----------
        runs : sequence of int
            Runs of the graph that fit the budget.
        programs : int
        deadline : Deadline
        """
        graph = self.contraction.graph
        best, time = None, math.fsum(graph.operations[i].time for i in runs)
        for _ in range(programs):
            if deadline.passed:
                break
            found = self._solve_one(runs, deadline)
            if found is None:
                continue
            schedule = schedule_from_runs(graph, found)
            simulation = simulate(graph, schedule)
            if simulation.time < time and simulation.peak_bytes <= self.contraction.budget_bytes:
                best, time, runs = schedule, simulation.time, found
        return best

    def _solve_one(self, runs: Sequence[int], deadline: Deadline) -> list[int] | None:
        """Return the runs that one program proposes, or None; adapt the size of the next neighborhood of its shape."""
        sequence, fixed, _ = self.contraction.contract(runs)
        shape = int(self.random.integers(SHAPES))
        size = self.sizes[shape]
        free = self._draw(shape, int(size), sequence, fixed)
        steps = self._steps(sequence, fixed, free)
        found, is_solved = None, False
        limit = deadline.within(PROGRAM_SHARE * deadline.remaining)
        if steps is not None:
            with suppress(TimeIsUpError):
                found, is_solved = SequenceProgram(self.storages, steps, limit).improve(limit, MOST_NODES)
        most = float(len(self.contraction.graph.operations))
        self.sizes[shape] = max(LEAST_SIZE, min(most, size * (GROWTH if is_solved else SHRINKAGE)))
        return None if found is None else self.contraction.expand(found)

    def _draw(self, shape: int, size: int, sequence: Sequence[int], fixed: Sequence[bool]) -> set[int]:
        """Return the free operations: one stretch of the order, two, one ball in the graph, or several."""
        repeatable = self.storages.repeatable
        order = [i for i, first in zip(sequence, fixed, strict=True) if first and repeatable[i]]
        if not order:
            return set()
        again = [i for i, first in zip(sequence, fixed, strict=True) if not first and repeatable[i]]
        if shape < 2:
            return {i for _ in range(shape + 1) for i in self._stretch(order, size // (shape + 1))}
        free: set[int] = set()
        part = size if shape == 2 else max(3, int(PART_SHARE * size))
        for _ in range(size):
            centers = again if again and self.random.random() < RECOMPUTED_SHARE else order
            free.update(self._ball(centers[int(self.random.integers(len(centers)))], part))
            if shape == 2 or len(free) >= size:
                break
        return free

    def _stretch(self, order: Sequence[int], size: int) -> Sequence[int]:
        middle = int(self.random.integers(len(order)))
        return order[max(0, middle - size // 2) : middle + (size + 1) // 2]

    def _ball(self, center: int, size: int) -> set[int]:
        """Return operations that are close to one in the graph: those that it reads from and its readers first."""
        found, seen, queue = {center}, {center}, [center]
        for i in queue:
            around = [j for j in self.storages.around(i) if j not in seen]
            for j in self.random.permutation(np.array(around, dtype=np.int64)).tolist():
                if len(found) >= size:
                    return found
                seen.add(j)
                if self.storages.repeatable[j]:
                    found.add(j)
                    queue.append(j)
        return found

    def _steps(self, sequence: Sequence[int], fixed: Sequence[bool], free: set[int]) -> list[Step] | None:
        """Return all runs, with those that the program chooses; None if these are too many."""
        first: dict[int, int] = {}
        places: dict[int, list[int]] = {}
        for position, i in enumerate(sequence):
            first.setdefault(i, position)
            places.setdefault(i, []).append(position)
        choices: dict[int, set[int]] = {}
        count = 0
        pending = [
            (position, i)
            for i in sorted(free & first.keys())
            for reader in self.storages.readers(i)
            for position in places.get(reader, ())
        ]
        while pending:
            position, i = pending.pop()
            chosen = choices.setdefault(position, set())
            # A recomputation right after the first run would change nothing.
            if position <= first[i] + 1 or i in chosen:
                continue
            chosen.add(i)
            count += 1
            if count > MOST_CHOICES:
                return None
            pending += [(position, source) for source in self.storages.sources(i) if source in free and source in first]
        steps: list[Step] = []
        for position, (i, is_fixed) in enumerate(zip(sequence, fixed, strict=True)):
            again = sorted(choices.get(position, ()), key=first.__getitem__)
            steps += [Step(other, is_free=True, runs_now=False) for other in again]
            steps.append(Step(i, is_free=i in free and not is_fixed, runs_now=True))
        return steps
