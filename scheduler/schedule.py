"""The schedule: what to compute and what to free, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from scheduler.errors import InvalidScheduleError
from scheduler.graph import Graph


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the operation of that name."""

    operation: str


@dataclass(frozen=True, slots=True)
class Free:
    """Let go of the tensor of that name."""

    tensor: str


Action = Compute | Free


@dataclass(frozen=True, slots=True)
class Schedule(Sequence[Action]):
    """A sequence of actions; equal by value, hashable, iterable any number of times.

    Its text form has one action a line: `+name` computes an operation, `-name` frees a tensor.

    Parameters
    ----------
    actions : iterable of Compute or Free

    Raises
    ------
    InvalidScheduleError
        If an entry is neither.

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
                raise InvalidScheduleError(i, f"an action is Compute(name) or Free(name), not {action!r}")
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

    def to_lines(self) -> list[str]:
        """Return the text form as a list of lines."""
        return [
            f"+{action.operation}" if isinstance(action, Compute) else f"-{action.tensor}" for action in self.actions
        ]

    @classmethod
    def from_lines(cls, lines: Iterable[str]) -> Schedule:
        """Return the schedule that `to_lines` wrote.

        Raises
        ------
        InvalidScheduleError
            If a line is not `+name` or `-name`.
        """
        actions: list[Action] = []
        for i, line in enumerate(lines):
            sign = line[:1] if isinstance(line, str) else ""
            if sign not in ("+", "-") or len(line) == 1:
                raise InvalidScheduleError(i, f'an action reads "+operation" or "-tensor", not {line!r}')
            actions.append(Compute(line[1:]) if sign == "+" else Free(line[1:]))
        return cls(actions)

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Return the schedule that `str` wrote.

        Raises
        ------
        InvalidScheduleError
            If a line is not `+name` or `-name`.
        """
        return cls.from_lines(text.splitlines())


def schedule_from_runs(graph: Graph, runs: Sequence[int]) -> Schedule:
    """Return the schedule that runs these operations and frees each tensor at once after its last use.

    A tensor is held from the run that makes it to its last reader before the next run that
    makes it again; a result made for the last time is held to the end. So the search space
    of the solvers is sequences of operations.

    Parameters
    ----------
    graph : Graph
    runs : sequence of int
        Positions in `graph.operations`, repeats included.

    Returns
    -------
    Schedule
        It breaks no rule if every run's inputs were made by an earlier run.
    """
    index = graph.index
    last_use: dict[int, int] = {}
    made_later: set[int] = set()
    frees: list[list[int]] = [[] for _ in runs]
    for position in range(len(runs) - 1, -1, -1):
        operation = runs[position]
        for tensor in index.outputs[operation]:
            end = last_use.pop(tensor, position)
            if tensor in made_later or not index.is_result[tensor]:
                frees[end].append(tensor)
            made_later.add(tensor)
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
    """Return whether tasks first run in the input order."""
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
    """Return the positions in `graph.operations` that a schedule runs, in order."""
    ids = graph.index.operation_ids
    return [ids[action.operation] for action in schedule if isinstance(action, Compute)]


def first_runs(graph: Graph, schedule: Schedule) -> dict[int, int]:
    """Return the position of the action at which each task first runs."""
    index = graph.index
    firsts: dict[int, int] = {}
    runs = iter(runs_of(graph, schedule))
    for position, action in enumerate(schedule):
        if isinstance(action, Compute):
            firsts.setdefault(index.task_of[next(runs)], position)
    return firsts
