"""The elements of a graph: tensors with bytes, operations with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from scheduler.errors import InvalidGraphError
from scheduler.validation import (
    check_name,
    count_of,
    names_of,
    set_field,
    time_of,
)

Phase = Literal["forward", "backward"]
"""The phase of a training step that an operation belongs to."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: a name, a size, and the storage that it lies in.

    Parameters
    ----------
    name : str
        Unique within a graph.
    size_bytes : int
        Bytes of the storage that this tensor needs.
    storage : str, optional
        Tensors that name the same storage share its bytes (views and aliases); the storage
        is as large as its largest tensor. By default a tensor has a storage of its own,
        called by its own name.

    Raises
    ------
    InvalidGraphError
        If a name is empty or has control characters, or the size is not an int >= 0.
    """

    name: str
    size_bytes: int
    storage: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "tensor")
        set_field(self, "size_bytes", count_of(self.size_bytes, f'size_bytes of tensor "{self.name}"'))
        storage = self.name if self.storage is None else self.storage
        check_name(storage, f'storage of tensor "{self.name}"')
        set_field(self, "storage", storage)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: it reads tensors, makes tensors, and takes time.

    Parameters
    ----------
    name : str
        Unique within a graph.
    inputs, outputs : iterable of str
        Names of the tensors that it reads and makes. Repeated inputs count once.
    time : float
        Time of one run, in the graph's `time_unit`.
    workspace_bytes : int
        Bytes that exist only while it runs.
    phase : "forward" or "backward"
    repeatable : bool
        False for an operation that must run exactly once: an update of batch-norm
        statistics, a random draw that cannot be replayed, a collective.
    signature : str
        Which operator with which shapes, strides and dtypes; free text.

    Raises
    ------
    InvalidGraphError
        If a field has the wrong type or range.
    """

    name: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    time: float
    workspace_bytes: int = 0
    phase: Phase = "forward"
    repeatable: bool = True
    signature: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "operation")
        where = f'operation "{self.name}"'
        set_field(self, "inputs", names_of(self.inputs, f"inputs of {where}"))
        set_field(self, "outputs", names_of(self.outputs, f"outputs of {where}"))
        if len(set(self.outputs)) != len(self.outputs):
            raise InvalidGraphError(f"{where} makes the same tensor twice: {list(self.outputs)}")
        both = set(self.inputs) & set(self.outputs)
        if both:
            raise InvalidGraphError(
                f'{where} reads and makes "{min(both)}": an operation never changes its input in place;'
                " give the changed tensor a name of its own on the same storage"
            )
        set_field(self, "time", time_of(self.time, f"time of {where}"))
        set_field(self, "workspace_bytes", count_of(self.workspace_bytes, f"workspace_bytes of {where}"))
        if self.phase not in get_args(Phase):
            raise InvalidGraphError(f'phase of {where} is "forward" or "backward", not {self.phase!r}')
        if not isinstance(self.repeatable, bool):
            raise InvalidGraphError(f"repeatable of {where} is a bool, not {self.repeatable!r}")
        if not isinstance(self.signature, str):
            raise InvalidGraphError(f"signature of {where} is text, not {self.signature!r}")
        if not self.outputs and self.repeatable:
            raise InvalidGraphError(f"{where} makes nothing: only a non-repeatable operation may have no outputs")
