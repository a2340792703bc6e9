"""Schedules: which operations to compute and which tensors to free, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from scheduler.errors import InvalidScheduleError
from scheduler.graph import Graph
from scheduler.units import text_table


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute the operation with this name."""

    operation: str


@dataclass(frozen=True, slots=True)
class Free:
    """Free the tensor with this name."""

    tensor: str


Action = Compute | Free


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(Sequence[Action]):
    """A sequence of actions, compared by value and hashable.

    The text form has one action per line: `+name` computes an operation, `-name` frees a tensor.

    Parameters
    ----------
    actions : iterable of Compute or Free

    Raises
    ------
    InvalidScheduleError
        If an entry is neither, or its name is empty.

    Examples
    --------
    >>> schedule = Schedule([Compute("conv"), Free("x")])
    >>> print(schedule)
    +conv
    -x
    >>> Schedule.from_text(str(schedule)) == schedule
    True
    """

    actions: tuple[Action, ...]

    def __init__(self, actions: Iterable[Action] = ()) -> None:
        entries = tuple(actions)
        for i, action in enumerate(entries):
            name = (
                action.operation if isinstance(action, Compute) else action.tensor if isinstance(action, Free) else None
            )
            if not isinstance(name, str) or not name:
                raise InvalidScheduleError(i, f"an action must be Compute(name) or Free(name), got {action!r}")
        object.__setattr__(self, "actions", entries)

    def __len__(self) -> int:
        return len(self.actions)

    def __iter__(self) -> Iterator[Action]:
        return iter(self.actions)

    @overload
    def __getitem__(self, index: int) -> Action: ...
    @overload
    def __getitem__(self, index: slice) -> Schedule: ...
    def __getitem__(self, index: int | slice) -> Action | Schedule:
        if isinstance(index, slice):
            return Schedule(self.actions[index])
        return self.actions[index]

    def __str__(self) -> str:
        return "\n".join(self.to_lines())

    def __repr__(self) -> str:
        return f"Schedule({len(self)} actions)"

    def summary(self) -> str:
        """Return the numbers of runs and frees as text, one per line."""
        runs = Counter(action.operation for action in self if isinstance(action, Compute))
        counts = {
            "actions": len(self),
            "runs": runs.total(),
            "frees": len(self) - runs.total(),
            "operations": len(runs),
            "repeated operations": sum(count > 1 for count in runs.values()),
        }
        return text_table([(name, str(count)) for name, count in counts.items()])

    def to_lines(self) -> list[str]:
        """Return the text form as a list of lines."""
        return [
            f"+{action.operation}" if isinstance(action, Compute) else f"-{action.tensor}" for action in self.actions
        ]

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Schedule:
        """Return the schedule with these lines, as written by `to_lines`.

        Raises
        ------
        InvalidScheduleError
            If a line is not `+name` or `-name`.
        """
        actions: list[Action] = []
        for i, line in enumerate(lines):
            sign = line[:1] if isinstance(line, str) else ""
            if sign not in ("+", "-") or len(line) == 1:
                raise InvalidScheduleError(i, f'an action must be "+operation" or "-tensor", got {line!r}')
            actions.append(Compute(line[1:]) if sign == "+" else Free(line[1:]))
        return cls(actions)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Return the schedule with this text form, as written by `str`.

        Raises
        ------
        InvalidScheduleError
            If a line is not `+name` or `-name`.
        """
        return cls.from_lines(text.splitlines())


def schedule_from_runs(graph: Graph, runs: Sequence[int]) -> Schedule:
    """Return the schedule that runs these operations and frees each tensor right after its last use.

    A tensor is held from the run that produces it to its last reader before the next run
    that produces it; the last copy of a result is held to the end. Solvers can therefore
    search over sequences of operations and leave the frees to this function.

    Parameters
    ----------
    graph : Graph
    runs : sequence of int
        Positions in `graph.operations`, repeats included.

    Returns
    -------
    Schedule
        Every input is live when it is read, provided that an earlier run produces it or it
        is resident.
    """
    index = graph.index
    last_use: dict[int, int] = {}
    produced_later: set[int] = set()
    frees: list[list[int]] = [[] for _ in runs]
    for position in range(len(runs) - 1, -1, -1):
        operation = runs[position]
        for tensor in index.outputs[operation]:
            end = last_use.pop(tensor, position)
            if tensor in produced_later or not index.is_result[tensor]:
                frees[end].append(tensor)
            produced_later.add(tensor)
        for tensor in index.inputs[operation]:
            if not index.is_resident[tensor]:
                last_use.setdefault(tensor, position)
    compute = [Compute(operation.name) for operation in graph.operations]
    free = [Free(tensor.name) for tensor in graph.tensors]
    actions: list[Action] = []
    for operation, freed in zip(runs, frees, strict=True):
        actions.append(compute[operation])
        actions.extend(free[tensor] for tensor in freed)
    return Schedule(actions)


def follows_input_order(graph: Graph, schedule: Schedule) -> bool:
    """Return whether the first runs of all tasks are in the input order."""
    index = graph.index
    latest, seen = -1, set()
    for action in schedule:
        if isinstance(action, Compute):
            task = index.task_of[index.operation_ids[action.operation]]
            if task not in seen:
                if task < latest:
                    return False
                seen.add(task)
                latest = task
    return True


def runs_of(graph: Graph, schedule: Schedule) -> Sequence[int]:
    """Return the operations that a schedule runs, as positions in `graph.operations`, in order."""
    ids = graph.index.operation_ids
    return [ids[action.operation] for action in schedule if isinstance(action, Compute)]


def first_runs(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """Return the position of the action in which each task first runs."""
    index = graph.index
    firsts: dict[int, int] = {}
    runs = iter(runs_of(graph, schedule))
    for position, action in enumerate(schedule):
        if isinstance(action, Compute):
            firsts.setdefault(index.task_of[next(runs)], position)
    return firsts
