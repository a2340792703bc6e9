"""The problem: a graph and a budget; the baseline and the floor that every answer is held against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from scheduler.errors import InvalidBudgetError, InvalidOptionError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.simulator import Simulation, simulate
from scheduler.units import parse_bytes, split_quantity


@dataclass(frozen=True, slots=True)
class Floor:
    """A proven lower bound on the peak of every schedule.

    Attributes
    ----------
    bytes : int
        No schedule has a smaller peak, resident tensors included.
    operation : str
        The operation that needs most: whose run alone needs this much.
    """

    bytes: int
    operation: str


@dataclass(frozen=True)
class Problem:
    """A graph, a budget, and the order in which tasks may first run.

    Parameters
    ----------
    graph : Graph
    budget_bytes : int
        Largest peak of the whole step, resident tensors included.
    reorder : bool
        Whether tasks may first run in any order, or in the input order only.
    chain : Chain, optional
        The chain that the graph is lowered from, for the solvers that work on chains.
    starts : tuple of Schedule
        Schedules of the graph that a search may start from, whether they fit or not.
    cuts : tuple of int
        Tasks that served `ilp` at other budgets, in the order in which they were found.

    Raises
    ------
    InvalidOptionError
        If `reorder` is not a bool.
    InvalidBudgetError
        If the budget is not an int >= 0.
    """

    graph: Graph
    budget_bytes: int
    reorder: bool = True
    chain: Chain | None = None
    starts: tuple[Schedule, ...] = ()
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget_bytes", parse_bytes(self.budget_bytes))
        if not isinstance(self.reorder, bool):
            raise InvalidOptionError(f"reorder must be a bool, got {self.reorder!r}")

    @cached_property
    def save_everything(self) -> Schedule:
        """The schedule that recomputes nothing; see `save_everything`."""
        return save_everything(self.graph)

    @cached_property
    def baseline(self) -> Simulation:
        """The simulated save-everything schedule: 100 % of time and peak."""
        return simulate(self.graph, self.save_everything)

    @cached_property
    def floor(self) -> Floor:
        """A proven lower bound on the peak; see `floor`."""
        return floor(self.graph)

    @cached_property
    def least_time(self) -> float:
        """A proven lower bound on the time of every schedule; see `least_time`."""
        return least_time(self.graph)


def save_everything(graph: Graph) -> Schedule:
    """Return the schedule that runs the needed defaults once, in the input order.

    Each tensor is freed after its last reader. Its time is the baseline, its peak 100 %.
    """
    return schedule_from_runs(graph, graph.index.defaults)


def parse_budget(budget: int | str, graph: Graph, *, baseline: Simulation | None = None) -> int:
    """Return a budget in bytes of the peak of the whole step.

    Parameters
    ----------
    budget : int or str
        Bytes, or text: "8GiB", "8GB", or "60%": the resident bytes plus 60 % of what the
        save-everything step adds to them.
    graph : Graph
    baseline : Simulation, optional
        The simulated save-everything schedule, if it is at hand.

    Raises
    ------
    InvalidBudgetError
        If the text cannot be understood, or the value is negative.

    Examples
    --------
    >>> from scheduler.graph import Operation, Tensor
    >>> step = [Operation("f", ["x"], ["y"], 1.0)]
    >>> graph = Graph(step, [Tensor("x", 100), Tensor("y", 50)], resident=["x"], results=["y"])
    >>> parse_budget("60%", graph)
    130
    """
    if isinstance(budget, str) and budget.strip().endswith("%"):
        number, unit = split_quantity(budget)
        if unit != "%":
            raise InvalidBudgetError(f'cannot read "{budget}": write for example "60%"')
        simulated = baseline or simulate(graph, save_everything(graph))
        extra = simulated.peak_bytes - graph.resident_bytes
        return graph.resident_bytes + math.floor(extra * number / 100)
    return parse_bytes(budget)


def necessary_tasks(graph: Graph) -> tuple[int, ...]:
    """Return the tasks that run in every schedule, ascending.

    A task is necessary if it makes a result, holds a required operation, or makes a tensor
    that every alternative of a necessary task reads; in a graph with forward results, the
    forward tasks that they need by default are necessary where a backward task is.
    """
    index = graph.index
    stack = [index.task_of[i] for i in index.required]
    stack += [
        index.task_of[index.producers[t][0]]
        for t, result in enumerate(index.is_result)
        if result and index.producers[t]
    ]
    found: set[int] = set()
    is_backward = False
    while stack:
        task = stack.pop()
        if task in found:
            continue
        found.add(task)
        common = set.intersection(*(set(index.inputs[i]) for i in index.tasks[task]))
        stack += [index.task_of[index.producers[t][0]] for t in common if index.producers[t]]
        if not is_backward and all(graph.operations[i].phase == "backward" for i in index.tasks[task]):
            is_backward = True
            stack += index.forward_tasks
    return tuple(sorted(found))


def least_time(graph: Graph) -> float:
    """Return the time of the necessary tasks, each run once by its fastest alternative."""
    tasks = graph.index.tasks
    return math.fsum(min(graph.operations[i].time for i in tasks[task]) for task in necessary_tasks(graph))


def working_set_bytes(graph: Graph, operation: int) -> int:
    """Return the least memory during a run of that operation, resident tensors included."""
    index = graph.index
    inputs = {index.storage_of[t] for t in index.inputs[operation]}
    return (
        index.resident_bytes
        + sum(index.storage_bytes[s] for s in inputs)
        + index.allocated_bytes[operation]
        + graph.operations[operation].workspace_bytes
    )


def floor(graph: Graph) -> Floor:
    """Return a lower bound on the peak of every schedule, and the operation behind it.

    The bound is the largest of the working sets of the necessary tasks (of the smallest
    alternative each), and of the results, which are live together at the end.
    """
    index = graph.index
    best = Floor(index.resident_bytes, graph.operations[0].name)
    for task in necessary_tasks(graph):
        need, i = min((working_set_bytes(graph, i), i) for i in index.tasks[task])
        if need > best.bytes:
            best = Floor(need, graph.operations[i].name)
    results = {index.storage_of[t] for t, result in enumerate(index.is_result) if result}
    together = index.resident_bytes + sum(index.storage_bytes[s] for s in results)
    if together > best.bytes:
        last = max(index.producers[t][0] for t, result in enumerate(index.is_result) if result and index.producers[t])
        best = Floor(together, graph.operations[last].name)
    return best
