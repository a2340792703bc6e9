"""Problems: a graph and a budget, with the baseline and the lower bounds of every answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from scheduler.errors import InvalidBudgetError, InvalidOptionError
from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.schedule import Schedule, schedule_from_runs
from scheduler.simulator import Simulation, simulate
from scheduler.units import parse_bytes, split_quantity

SMALLEST, FREE_MEMORY = "min", "auto"


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget that has been read but not yet turned into bytes.

    Attributes
    ----------
    form : "bytes", "percent", "min" or "auto"
        "percent": the resident bytes plus a share of what the save-everything step adds to
        them. "min": the smallest known peak plus a share of the way from there to the peak of
        the save-everything step. "auto": the free memory of a device.
    bytes : int
        Only of the form "bytes".
    share : Fraction
        Only of the forms "percent" and "min"; 1 is 100 %.
    """

    form: Literal["bytes", "percent", "min", "auto"]
    bytes: int = 0
    share: Fraction = Fraction(0)

    @property
    def is_relative(self) -> bool:
        """Whether the bytes depend on what a step needs."""
        return self.form in ("percent", "min")

    def resolve(self, resident_bytes: int, baseline_peak_bytes: int, smallest_peak: Callable[[], int]) -> int:
        """Return the budget in bytes of the peak of the whole step.

        Parameters
        ----------
        resident_bytes, baseline_peak_bytes : int
            Resident bytes, and the peak of the save-everything step.
        smallest_peak : callable
            Returns the smallest known peak in bytes; called only for the form "min".

        Raises
        ------
        InvalidBudgetError
            If the form is "auto".
        """
        if self.form == "auto":
            raise InvalidBudgetError(
                'the budget "auto" is the free memory of the device of a PyTorch model, and a graph has no device: give'
                ' bytes, such as "8GiB", a percentage, such as "60%", or "min"'
            )
        if self.form == "bytes":
            return self.bytes
        start = resident_bytes if self.form == "percent" else smallest_peak()
        return start + math.floor((baseline_peak_bytes - start) * self.share)


def read_budget(budget: int | str) -> Budget:
    """Return a budget from bytes or text: "8GiB", "60%", "min", "min+10%" or "auto".

    Raises
    ------
    InvalidBudgetError
        If the text cannot be understood, or the value is negative.

    Examples
    --------
    >>> read_budget("8GiB").bytes
    8589934592
    >>> budget = read_budget("min+10%")
    >>> budget.form, budget.share
    ('min', Fraction(1, 10))
    """
    text = budget.strip().lower() if isinstance(budget, str) else ""
    if text == FREE_MEMORY:
        return Budget("auto")
    if text == SMALLEST:
        return Budget("min")
    if text.startswith(SMALLEST):
        added = text.removeprefix(SMALLEST).lstrip()
        if not (added.startswith("+") and added.endswith("%")):
            raise InvalidBudgetError(f'cannot read "{budget}": write "min", or for example "min+10%"')
        return Budget("min", share=_share(added.removeprefix("+"), budget))
    if text.endswith("%"):
        return Budget("percent", share=_share(text, budget))
    return Budget("bytes", parse_bytes(budget))


def _share(text: str, budget: int | str) -> Fraction:
    number, unit = split_quantity(text)
    if unit != "%":
        raise InvalidBudgetError(f'cannot read "{budget}": write for example "60%"')
    return number / 100


@dataclass(frozen=True, slots=True)
class Floor:
    """A proven lower bound on the peak of every schedule.

    Attributes
    ----------
    bytes : int
        No schedule has a smaller peak, resident tensors included.
    operation : str
        The operation during whose first run this much memory is needed; if ways through the step were compared
        (`solvers/live_sets.py`), the one that needs it on the way that needs least.
    alone : bool
        Whether the run by itself needs that much. Otherwise it does together with what must be
        in memory at that moment because later operations need it, or because it is a result.
    """

    bytes: int
    operation: str
    alone: bool = True

    def explained(self, size: str) -> str:
        """Return what needs the memory, in words, given its size as text."""
        if self.alone:
            return f'"{self.operation}" alone needs {size}'
        return f'"{self.operation}" and what must stay in memory while it runs need {size}'


@dataclass(frozen=True)
class Problem:
    """A graph, a budget, and the order in which tasks may first run.

    Parameters
    ----------
    graph : Graph
    budget_bytes : int
        Largest peak of the whole step, resident tensors included.
    reorder : bool
        Whether tasks may first run in any order instead of the input order.
    chain : Chain, optional
        The chain that the graph is lowered from, for the solvers that work on chains.
    starts : tuple of Schedule
        Schedules of the graph that a search may start from, even if they exceed the budget.
    gap : float
        A search may stop as soon as (time - bound) / time is at most this.

    Raises
    ------
    InvalidOptionError
        If `reorder` is not a bool, or `gap` is not a number in [0, 1).
    InvalidBudgetError
        If the budget is not an int >= 0.
    """

    graph: Graph
    budget_bytes: int
    reorder: bool = True
    chain: Chain | None = None
    starts: tuple[Schedule, ...] = ()
    gap: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget_bytes", parse_bytes(self.budget_bytes))
        if not isinstance(self.reorder, bool):
            raise InvalidOptionError(f"reorder must be a bool, got {self.reorder!r}")
        check_gap(self.gap)

    def changed(self, **fields: Any) -> Problem:
        """Return the problem with other fields; unless the graph is among them, what has been computed is kept."""
        other = replace(self, **fields)
        if other.graph is self.graph:
            vars(other).update({name: value for name, value in vars(self).items() if name not in vars(other)})
        return other

    @cached_property
    def save_everything(self) -> Schedule:
        """The save-everything schedule of the graph; see the function `save_everything`."""
        return save_everything(self.graph)

    @cached_property
    def baseline(self) -> Simulation:
        """The simulation of the save-everything schedule: 100 % of time and peak."""
        return simulate(self.graph, self.save_everything)

    @cached_property
    def floor(self) -> Floor:
        """A proven lower bound on the peak; see the function `floor`."""
        return floor(self.graph)

    @cached_property
    def least_time(self) -> float:
        """A proven lower bound on the time; see the function `least_time`."""
        return least_time(self.graph)


def check_gap(gap: float) -> None:
    """Raise an error unless a gap is a number in [0, 1)."""
    if isinstance(gap, bool) or not isinstance(gap, (int, float)) or not 0 <= gap < 1:
        raise InvalidOptionError(f"gap must be a number >= 0 and < 1, such as 0.005 for half a percent, got {gap!r}")


def save_everything(graph: Graph) -> Schedule:
    """Return the save-everything schedule, which recomputes nothing.

    It runs the defaults of all needed tasks once, in the input order, and frees each tensor
    after its last reader. Its time is the baseline, and its peak is 100 %.
    """
    return schedule_from_runs(graph, graph.index.defaults)


def parse_budget(
    budget: int | str,
    graph: Graph,
    *,
    baseline: Simulation | None = None,
    smallest_peak: Callable[[], int] | None = None,
) -> int:
    """Return a budget in bytes of the peak of the whole step.

    Parameters
    ----------
    budget : int or str
        Bytes, or text: "8GiB", "8GB", or "60%": the resident bytes plus 60 % of what the
        save-everything step adds to them. "min" is the smallest known peak, and "min+10%" is
        10 % of the way from there to the peak of the save-everything step.
    graph : Graph
    baseline : Simulation, optional
        The simulation of the save-everything schedule, if the caller has it.
    smallest_peak : callable, optional
        Returns the smallest known peak in bytes; "min" needs it.

    Raises
    ------
    InvalidBudgetError
        If the text cannot be understood or has no meaning for a graph, or the value is negative.

    Examples
    --------
    >>> from scheduler.graph import Operation, Tensor
    >>> step = [Operation("f", ["x"], ["y"], 1.0)]
    >>> graph = Graph(step, [Tensor("x", 100), Tensor("y", 50)], resident=["x"], results=["y"])
    >>> parse_budget("60%", graph)
    130
    """
    read = read_budget(budget)
    if not read.is_relative:
        return read.resolve(0, 0, lambda: 0)

    def unknown() -> int:
        raise InvalidBudgetError(f'the budget "{budget}" needs a search for the smallest peak: call minimum_budget')

    baseline = baseline or simulate(graph, save_everything(graph))
    return read.resolve(graph.resident_bytes, baseline.peak_bytes, smallest_peak or unknown)


def necessary_tasks(graph: Graph) -> tuple[int, ...]:
    """Return the tasks that run in every schedule, in ascending order.

    A task is necessary if it produces a result, contains a required operation, or produces a
    tensor that every alternative of a necessary task reads. If a backward task is necessary,
    so are the forward tasks that the forward results need by default.
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
    """Return the total time of the necessary tasks, each run once by its fastest alternative."""
    return math.fsum(
        min(graph.operations[i].time for i in possible_first_runs(graph, task)) for task in necessary_tasks(graph)
    )


def possible_first_runs(graph: Graph, task: int) -> list[int]:
    """Return the operations of a task that read nothing that only the task itself produces: any first run is one."""
    index = graph.index
    return [
        i
        for i in index.tasks[task]
        if not any(index.producers[t] and index.task_of[index.producers[t][0]] == task for t in index.inputs[i])
    ]


def working_set_bytes(graph: Graph, operation: int) -> int:
    """Return the least possible memory during a run of an operation, resident tensors included."""
    index = graph.index
    inputs = {index.storage_of[t] for t in index.inputs[operation]}
    return (
        index.resident_bytes
        + sum(index.storage_bytes[s] for s in inputs)
        + index.allocated_bytes[operation]
        + graph.operations[operation].workspace_bytes
    )


def floor(graph: Graph) -> Floor:
    """Return a lower bound on the peak of every schedule, and the operation that needs it.

    The bound is the largest working set of a necessary task (by the alternative that needs
    least), or the total size of the results, which are all live at the end, if that is larger.
    """
    index = graph.index
    best = Floor(index.resident_bytes, graph.operations[0].name)
    for task in necessary_tasks(graph):
        need, i = min((working_set_bytes(graph, i), i) for i in possible_first_runs(graph, task))
        if need > best.bytes:
            best = Floor(need, graph.operations[i].name)
    results = {index.storage_of[t] for t, result in enumerate(index.is_result) if result}
    together = index.resident_bytes + sum(index.storage_bytes[s] for s in results)
    if together > best.bytes:
        last = max(index.producers[t][0] for t, result in enumerate(index.is_result) if result and index.producers[t])
        best = Floor(together, graph.operations[last].name, alone=False)
    return best
