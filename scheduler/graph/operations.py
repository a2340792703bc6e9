"""The elements of a graph: tensors with bytes, operations with times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from scheduler.errors import InvalidGraphError
from scheduler.validation import (
    check_name,
    count_of,
    names_of,
    set_field,
    text_of,
    time_of,
)

Phase = Literal["forward", "backward"]
"""The phase of a training step that an operation belongs to."""

Role = Literal[
    "activation",
    "parameter",
    "buffer",
    "input",
    "constant",
    "optimizer state",
    "reserve",
    "gradient",
    "output",
    "random state",
]
"""The role of a tensor in a training step. "reserve" is memory that is set aside and holds no data."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor: a name, a size, the storage that it lies in, and its role.

    Parameters
    ----------
    name : str
        Unique within a graph. Names identify and carry no meaning.
    size_bytes : int
        Bytes of the storage that this tensor needs.
    storage : str, optional
        Tensors that name the same storage share its bytes (views and aliases); the storage
        is as large as its largest tensor. By default a tensor has a storage of its own,
        called by its own name.
    role : Role
        What the tensor is in the training step. Pipelines and memory summaries read it.

    Raises
    ------
    InvalidGraphError
        If a name is empty or has control characters, the size is not an int >= 0, or the
        role is unknown.
    """

    name: str
    size_bytes: int
    storage: str | None = None
    _: KW_ONLY
    role: Role = "activation"

    def __post_init__(self) -> None:
        check_name(self.name, "a tensor")
        set_field(self, "size_bytes", count_of(self.size_bytes, f'size_bytes of tensor "{self.name}"'))
        storage = self.name if self.storage is None else self.storage
        check_name(storage, f'the storage of tensor "{self.name}"')
        set_field(self, "storage", storage)
        if self.role not in get_args(Role):
            known = ", ".join(f'"{role}"' for role in get_args(Role))
            raise InvalidGraphError(f'role of tensor "{self.name}" must be one of {known}, got {self.role!r}')

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain JSON data, without those that have their default."""
        entry: dict[str, object] = {"name": self.name, "size_bytes": self.size_bytes}
        if self.storage != self.name:
            entry["storage"] = self.storage
        if self.role != "activation":
            entry["role"] = self.role
        return entry


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: it reads tensors, produces tensors, and takes time.

    Parameters
    ----------
    name : str
        Unique within a graph. Names identify and carry no meaning.
    inputs, outputs : iterable of str
        Names of the tensors that it reads and produces. Repeated inputs count once.
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
    layer : str
        Qualified name of the module or layer that runs it; "" if there is none. Reports
        group operations by it.
    kind : str
        Its purpose, where something needs to tell it apart, such as "forward without
        saving" or "update"; "" otherwise.

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
    _: KW_ONLY
    layer: str = ""
    kind: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "an operation")
        where = f'operation "{self.name}"'
        set_field(self, "inputs", names_of(self.inputs, f"inputs of {where}"))
        set_field(self, "outputs", names_of(self.outputs, f"outputs of {where}"))
        if len(set(self.outputs)) != len(self.outputs):
            raise InvalidGraphError(f"{where} produces the same tensor twice: {list(self.outputs)}")
        both = set(self.inputs) & set(self.outputs)
        if both:
            raise InvalidGraphError(
                f'{where} reads and produces "{min(both)}": an operation never changes its input in place;'
                " give the changed tensor a name of its own on the same storage"
            )
        set_field(self, "time", time_of(self.time, f"time of {where}"))
        set_field(self, "workspace_bytes", count_of(self.workspace_bytes, f"workspace_bytes of {where}"))
        if self.phase not in get_args(Phase):
            raise InvalidGraphError(f'phase of {where} must be "forward" or "backward", got {self.phase!r}')
        if not isinstance(self.repeatable, bool):
            raise InvalidGraphError(f"repeatable of {where} must be a bool, got {self.repeatable!r}")
        if not isinstance(self.signature, str):
            raise InvalidGraphError(f"signature of {where} must be text, got {self.signature!r}")
        text_of(self.layer, f"layer of {where}")
        text_of(self.kind, f"kind of {where}")
        if not self.outputs and self.repeatable:
            raise InvalidGraphError(f"{where} produces nothing: only a non-repeatable operation may have no outputs")

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain JSON data, without those that have their default."""
        entry: dict[str, object] = {
            "name": self.name,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "time": self.time,
        }
        if self.workspace_bytes:
            entry["workspace_bytes"] = self.workspace_bytes
        if self.phase != "forward":
            entry["phase"] = self.phase
        if not self.repeatable:
            entry["repeatable"] = False
        for field in ("signature", "layer", "kind"):
            if getattr(self, field):
                entry[field] = getattr(self, field)
        return entry
