"""The timeline of a schedule: start of each run, time over which each tensor is live, and their layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from scheduler.graph import Graph, Operation
from scheduler.schedule import Compute, Schedule
from scheduler.simulator import Simulation, simulate

Kind = Literal["forward", "recomputation", "backward"]
"""A first run in the forward phase, a later run of any task, or a first run in the backward phase."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of an operation.

    Attributes
    ----------
    operation : Operation
    start : float
        In the graph's `time_unit`, from the beginning of the step.
    memory_bytes : int
        Memory during the run, resident tensors included.
    is_recomputation : bool
        Whether the same task has run before.
    """

    operation: Operation
    start: float
    memory_bytes: int
    is_recomputation: bool

    @property
    def layer(self) -> str:
        """Layer of the operation; an operation that has none is a layer of its own."""
        return self.operation.layer or self.operation.name

    @property
    def end(self) -> float:
        """Time at which the run ends."""
        return self.start + self.operation.time

    @property
    def kind(self) -> Kind:
        """The phase of a first run; "recomputation" for a later run of the task."""
        return "recomputation" if self.is_recomputation else self.operation.phase


@dataclass(frozen=True, slots=True)
class Holding:
    """A span of time over which a tensor is live.

    Attributes
    ----------
    tensor : str
    producer, layer : str
        The operation whose run began the span, and its layer, as `Run.layer`.
    start, end : float
        From the beginning of that run to the free, or to the end of the step.
    is_freed : bool
        False if the tensor is live at the end of the step.
    is_saved : bool
        Whether it is live at the end of the forward phase: part of the checkpoint set.
    """

    tensor: str
    producer: str
    layer: str
    start: float
    end: float
    is_freed: bool
    is_saved: bool


@dataclass(frozen=True)
class Timeline:
    """A schedule laid out in time, with memory as the simulator counts it.

    Attributes
    ----------
    runs : tuple of Run
        In order.
    holdings : tuple of Holding
        By start, without resident tensors.
    boundary : float
        Time at which the forward phase ends.
    simulation : Simulation
        Simulation of the schedule.
    """

    runs: tuple[Run, ...]
    holdings: tuple[Holding, ...]
    boundary: float
    simulation: Simulation

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule) -> Timeline:
        """Return the timeline of a schedule.

        Raises
        ------
        InvalidScheduleError
            If the schedule breaks a rule.
        """
        simulation = simulate(graph, schedule)
        index = graph.index
        runs: list[Run] = []
        holdings: list[Holding] = []
        live: dict[str, Run] = {}
        has_run: set[int] = set()
        saved: dict[str, Run] = {}
        clock, boundary = 0.0, None

        def end_holding(tensor: str, *, is_freed: bool) -> None:
            run = live[tensor]
            is_saved = boundary is not None and saved.get(tensor) is run
            holdings.append(Holding(tensor, run.operation.name, run.layer, run.start, clock, is_freed, is_saved))

        for action, memory in zip(schedule, simulation.memory.tolist(), strict=True):
            if not isinstance(action, Compute):
                end_holding(action.tensor, is_freed=True)
                del live[action.tensor]
                continue
            i = index.operation_ids[action.operation]
            run = Run(graph.operations[i], clock, memory, index.task_of[i] in has_run)
            if boundary is None and run.operation.phase == "backward":
                boundary, saved = clock, dict(live)
            has_run.add(index.task_of[i])
            runs.append(run)
            clock = run.end
            for tensor in run.operation.outputs:
                live.setdefault(tensor, run)
        if boundary is None:
            boundary, saved = clock, dict(live)
        for tensor in live:
            end_holding(tensor, is_freed=False)
        holdings.sort(key=lambda holding: holding.start)
        return cls(tuple(runs), tuple(holdings), boundary, simulation)

    @property
    def end(self) -> float:
        """Time at which the last run ends."""
        return self.runs[-1].end if self.runs else 0.0
