"""The graph: operations over tensors, with bytes and times.

A graph says what one training step computes. It says nothing about when: that is the
schedule's part. All data is checked at birth and never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scheduler.errors import InvalidGraphError
from scheduler.graph.index import GraphIndex
from scheduler.graph.operations import Operation, Tensor
from scheduler.validation import (
    build,
    check_keys,
    check_text,
    check_unique,
    instances,
    mapping,
    names_of,
    sequence,
    set_field,
    sha256,
)

GRAPH_FORMAT = "scheduler-graph"
GRAPH_VERSION = 2
_MOST_BYTES = 2**60


@dataclass(frozen=True)
class Graph:
    """One training step: operations in a topological order, "the input order".

    Several operations may make the same tensor (alternatives). Operations linked by shared
    outputs form one task; the first of a task in the input order is its default.

    Parameters
    ----------
    operations : iterable of Operation
        In a topological order: every input is resident or made by an earlier operation.
    tensors : iterable of Tensor
    resident : iterable of str
        Tensors that are live throughout: parameters, buffers, the batch. No operation makes
        them.
    results : iterable of str
        Tensors that must be live at the end: loss, gradients.
    required : iterable of str
        Operations that must run even if nobody reads what they make. Non-repeatable
        operations are always required.
    time_unit : str
        Unit of all times, for example "s" or "FLOP".
    name : str

    Raises
    ------
    InvalidGraphError
        If names repeat or are unknown, an operation reads what nothing earlier makes (a
        cycle shows here), the default operations alone do not produce results and required
        operations, a forward default stands after a backward one, or a non-repeatable
        operation has an alternative.
    """

    operations: Sequence[Operation]
    tensors: Sequence[Tensor]
    resident: Sequence[str] = ()
    results: Sequence[str] = ()
    required: Sequence[str] = ()
    time_unit: str = "s"
    name: str = ""

    def __post_init__(self) -> None:
        set_field(self, "operations", instances(self.operations, Operation, "operations"))
        set_field(self, "tensors", instances(self.tensors, Tensor, "tensors"))
        for field in ("resident", "results", "required"):
            names = names_of(getattr(self, field), f"{field} of the graph")
            set_field(self, field, tuple(dict.fromkeys(names)))
        for field in ("time_unit", "name"):
            check_text(getattr(self, field), f"{field} of the graph")
        if not self.operations:
            raise InvalidGraphError("a graph needs at least one operation")
        check_unique([operation.name for operation in self.operations], "operations")
        check_unique([tensor.name for tensor in self.tensors], "tensors")
        self._check_references()
        self._check_order()
        self._check_sizes()
        self._check_defaults()

    @cached_property
    def index(self) -> GraphIndex:
        """The same graph in integers, for judge and solvers."""
        return GraphIndex(self.operations, self.tensors, self.resident, self.results, self.required)

    def operation(self, name: str) -> Operation:
        """Return the operation of that name.

        Raises
        ------
        KeyError
            If there is none.
        """
        return self.operations[self.index.operation_ids[name]]

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of that name.

        Raises
        ------
        KeyError
            If there is none.
        """
        return self.tensors[self.index.tensor_ids[name]]

    @property
    def resident_bytes(self) -> int:
        """Bytes of the storages that hold a resident tensor."""
        return self.index.resident_bytes

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the graph."""
        return sha256(self.to_dict())

    @cached_property
    def structure_digest(self) -> str:
        """SHA-256 over signatures, edges, storages, bytes, phases and order.

        Names, roles, layers, kinds, times and workspaces are left out: two captures of one
        program agree.
        """
        index = self.index
        number: dict[int, int] = {}
        for ids in (*index.inputs, *index.outputs, range(len(self.tensors))):
            for tensor in ids:
                number.setdefault(tensor, len(number))
        storage_number: dict[int, int] = {}
        for tensor in number:
            storage_number.setdefault(index.storage_of[tensor], len(storage_number))
        return sha256(
            {
                "operations": [
                    [
                        operation.signature,
                        [number[tensor] for tensor in index.inputs[i]],
                        [number[tensor] for tensor in index.outputs[i]],
                        operation.phase,
                        operation.repeatable,
                    ]
                    for i, operation in enumerate(self.operations)
                ],
                "tensors": [
                    [self.tensors[tensor].size_bytes, storage_number[index.storage_of[tensor]]] for tensor in number
                ],
                "resident": sorted(number[index.tensor_ids[name]] for name in self.resident),
                "results": sorted(number[index.tensor_ids[name]] for name in self.results),
                "required": sorted(index.operation_ids[name] for name in self.required),
            }
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_dict(self) -> dict[str, object]:
        """Return the graph as plain JSON data; `from_dict` reads it back."""
        return {
            "format": GRAPH_FORMAT,
            "version": GRAPH_VERSION,
            "name": self.name,
            "time_unit": self.time_unit,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "operations": [operation.to_dict() for operation in self.operations],
            "resident": list(self.resident),
            "results": list(self.results),
            "required": list(self.required),
        }

    @classmethod
    def from_dict(cls, data: object) -> Graph:
        """Return the graph that `to_dict` wrote.

        Raises
        ------
        InvalidGraphError
            If the data is not of that form, names an unknown field or another version, or
            the graph in it contradicts itself.
        """
        fields = mapping(data, "a graph")
        kind, version = fields.get("format"), fields.get("version")
        if kind != GRAPH_FORMAT or isinstance(version, bool) or version not in (1, GRAPH_VERSION):
            raise InvalidGraphError(
                f'not a graph of format "{GRAPH_FORMAT}" version {GRAPH_VERSION}: format {kind!r}, version {version!r}'
            )
        if version == 1:
            raise InvalidGraphError(
                "graphs of version 1 are no longer read: they do not state the roles of tensors and the layers and"
                " kinds of operations. Write the graph again with this package, for example with `scheduler trace`"
                " or `write_graph`"
            )
        check_keys(fields, {"format", "version", *cls.__dataclass_fields__}, "the graph")
        operations = sequence(fields.get("operations"), '"operations" of the graph')
        tensors = sequence(fields.get("tensors"), '"tensors" of the graph')
        return cls(
            operations=tuple(build(Operation, entry, "an operation") for entry in operations),
            tensors=tuple(build(Tensor, entry, "a tensor") for entry in tensors),
            **{key: value for key, value in fields.items() if key in _OWN_FIELDS},
        )

    def _check_references(self) -> None:
        tensors = {tensor.name for tensor in self.tensors}
        made = {name for operation in self.operations for name in operation.outputs}
        for operation in self.operations:
            for name in (*operation.inputs, *operation.outputs):
                if name not in tensors:
                    raise InvalidGraphError(f'operation "{operation.name}" names an unknown tensor "{name}"')
        for field in ("resident", "results"):
            for name in getattr(self, field):
                if name not in tensors:
                    raise InvalidGraphError(f'{field} names an unknown tensor "{name}"')
        for name in self.resident:
            if name in made:
                raise InvalidGraphError(f'resident tensor "{name}" is live throughout: no operation may make it')
        orphans = tensors - made - set(self.resident)
        if orphans:
            raise InvalidGraphError(f'tensor "{min(orphans)}" is neither resident nor made by an operation')
        operations = {operation.name for operation in self.operations}
        for name in self.required:
            if name not in operations:
                raise InvalidGraphError(f'required names an unknown operation "{name}"')

    def _check_order(self) -> None:
        available = set(self.resident)
        for operation in self.operations:
            for name in operation.inputs:
                if name not in available:
                    raise InvalidGraphError(_why_unavailable(self.operations, operation, name))
            available.update(operation.outputs)

    def _check_sizes(self) -> None:
        index = self.index
        total = sum(index.storage_bytes[storage] for storage in index.storage_of) + index.resident_bytes
        total += sum(operation.workspace_bytes for operation in self.operations)
        if total > _MOST_BYTES:
            raise InvalidGraphError(f"the sizes in the graph add up to {total} bytes; at most 2^60 can be counted")

    def _check_defaults(self) -> None:
        index = self.index
        for task in index.tasks:
            for i in task:
                if len(task) > 1 and not self.operations[i].repeatable:
                    other = self.operations[task[0] if task[0] != i else task[1]].name
                    raise InvalidGraphError(
                        f'operation "{self.operations[i].name}" is not repeatable and shares an output with'
                        f' "{other}": a non-repeatable operation has no alternative'
                    )
        available = set(self.resident)
        first_backward = ""
        ran: set[int] = set()
        for i in index.defaults:
            operation = self.operations[i]
            if operation.phase == "backward":
                first_backward = first_backward or operation.name
            elif first_backward and index.task_of[i] not in ran:
                raise InvalidGraphError(
                    f'forward operation "{operation.name}" stands after backward operation "{first_backward}":'
                    " the input order runs the forward phase first"
                )
            ran.add(index.task_of[i])
            for name in operation.inputs:
                if name not in available:
                    raise InvalidGraphError(
                        f'the default operations alone do not make "{name}", which "{operation.name}" needs:'
                        " place the alternative that makes it first in its task"
                    )
            available.update(operation.outputs)
        for name in self.results:
            if name not in available:
                raise InvalidGraphError(f'the default operations alone do not make the result "{name}"')


def _why_unavailable(operations: Sequence[Operation], reader: Operation, name: str) -> str:
    makers = {output: operation for operation in operations for output in operation.outputs}
    path, seen = [reader.name], {reader.name}
    pending = [(maker, [*path]) for maker in [makers[name]]]
    while pending:
        operation, path = pending.pop()
        if operation.name == reader.name:
            cycle = " <- ".join([*path, reader.name])
            return f"the graph has a cycle: {cycle}; an operation cannot need its own result"
        if operation.name in seen:
            continue
        seen.add(operation.name)
        pending += [(makers[needed], [*path, operation.name]) for needed in operation.inputs if needed in makers]
    return (
        f'operation "{reader.name}" reads "{name}" before "{makers[name].name}" makes it:'
        " give the operations in a topological order"
    )


_OWN_FIELDS = ("resident", "results", "required", "time_unit", "name")
