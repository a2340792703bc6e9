"""Find ways to run a block: bytes kept between its forward and its backward, against time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.graph import Graph
from scheduler.problem import save_everything
from scheduler.schedule import Compute, Schedule, first_runs, runs_of
from scheduler.simulator import simulate
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.ilp.decoding import decode
from scheduler.solvers.ilp.frontier import CutFrontier
from scheduler.solvers.ilp.path_rows import tighten
from scheduler.solvers.ilp.precedence import Precedence
from scheduler.solvers.ilp.relaxation import CutRelaxation

_PEAK_RATIO = 0.8
"""Peak that the next mode's backward should reach, as a share of this mode's."""
_MOST_CUTS = 4
"""Cuts of the integer program that looks for a mode with a lower backward peak."""


@dataclass(frozen=True)
class BlockMode:
    """A simulated way to run a block.

    Attributes
    ----------
    runs : tuple of int
        Operations of the block's graph; the forward comes first, each operation once.
    time : float
        Sum over all runs.
    saved_bytes : int
        Kept between forward and backward.
    forward_bytes, backward_bytes : int
        Peaks of the forward and of the backward.
    """

    runs: tuple[int, ...]
    time: float
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int

    def dominates(self, other: BlockMode) -> bool:
        """Return whether this mode is at least as good in every respect."""
        return (
            self.time <= other.time
            and self.saved_bytes <= other.saved_bytes
            and self.forward_bytes <= other.forward_bytes
            and self.backward_bytes <= other.backward_bytes
        )


class BlockModes:
    """The modes of a block's graph found so far; the first one recomputes nothing.

    Parameters
    ----------
    graph : Graph
        From `block_graphs`.
    frontier : CutFrontier
        The frontier of that graph at its marker.
    """

    def __init__(self, graph: Graph, frontier: CutFrontier) -> None:
        self.graph, self.cut = graph, frontier
        self.forward = [i for i in graph.index.defaults if graph.operations[i].phase == "forward"]
        self.modes: list[BlockMode] = []
        self._schedules: dict[BlockMode, Schedule] = {}
        self._precedence = Precedence(graph, reorder=False)
        self._add(save_everything(graph))

    @property
    def forward_time(self) -> float:
        """Time of the forward alone."""
        return math.fsum(self.graph.operations[i].time for i in self.forward)

    @property
    def best(self) -> list[BlockMode]:
        """The modes that no other mode dominates, the fastest first."""
        chosen: list[BlockMode] = []
        for mode in sorted(self.modes, key=lambda m: (m.time, m.saved_bytes, m.backward_bytes, m.forward_bytes)):
            if not any(other.dominates(mode) for other in chosen):
                chosen.append(mode)
        return chosen

    def sample(self, limits: Iterable[int], deadline: Deadline) -> None:
        """Add the fastest mode for each limit on bytes kept, while time lasts, and all points known to the frontier."""
        for limit in limits:
            if deadline.passed:
                break
            self.cut.sample(limit, deadline)
        for live in self.cut.known():
            self._add(decode(self.graph, [self.cut.task], [live]))

    def lower(self, deadline: Deadline) -> None:
        """Add modes that keep no more than the present ones and have a lower backward peak."""
        for mode in self.best:
            self._lower(mode, deadline)

    def _add(self, schedule: Schedule) -> BlockMode:
        """Simulate a schedule of the block's graph, and add it as a mode."""
        memory = simulate(self.graph, schedule).memory
        runs = runs_of(self.graph, schedule)
        computes = [position for position, action in enumerate(schedule) if isinstance(action, Compute)]
        end = computes[len(self.forward)] if len(runs) > len(self.forward) else len(schedule)
        mode = BlockMode(
            runs=tuple(runs),
            time=math.fsum(self.graph.operations[i].time for i in runs),
            saved_bytes=int(memory[end - 1]),
            forward_bytes=int(memory[:end].max()),
            backward_bytes=int(memory[end:].max()) if end < len(memory) else 0,
        )
        self.modes.append(mode)
        self._schedules[mode] = schedule
        return mode

    def _lower(self, mode: BlockMode, deadline: Deadline) -> None:
        """Add modes that keep no more bytes than this one, with lower and lower backward peaks."""
        cuts, limit = {self.cut.task: mode.saved_bytes}, mode.backward_bytes
        while len(cuts) < _MOST_CUTS and not deadline.passed:
            peak = self._peak_task(mode)
            if peak in cuts:
                return
            limit = max(mode.saved_bytes, int(_PEAK_RATIO * limit))
            cuts = dict.fromkeys([*cuts, peak], limit) | {self.cut.task: cuts[self.cut.task]}
            program = self._program(cuts)
            tighten(program, deadline)
            answer = program.solve(deadline)
            if answer.live is None:
                return
            mode = self._add(decode(self.graph, sorted(cuts), answer.live))

    def _program(self, cuts: dict[int, int]) -> CutRelaxation:
        tasks = sorted(cuts)
        return CutRelaxation(self.graph, self._precedence, tasks, [cuts[task] for task in tasks])

    def _peak_task(self, mode: BlockMode) -> int:
        """Return the first task that first runs at the peak of the backward or after it."""
        schedule = self._schedules[mode]
        memory = simulate(self.graph, schedule).memory
        firsts = first_runs(self.graph, schedule)
        begin = firsts[self.cut.task]
        peak = begin + int(memory[begin:].argmax())
        later = [(position, task) for task, position in firsts.items() if position >= peak]
        return min(later)[1] if later else self.cut.task
