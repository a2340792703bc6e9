"""The graph: operations over tensors, with bytes and times.

A graph describes what one training step computes; a schedule describes when. All data is
validated on construction and never changes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scheduler.errors import InvalidGraphError
from scheduler.graph.index import GraphIndex
from scheduler.graph.operations import Operation, Tensor
from scheduler.units import format_bytes, text_table
from scheduler.validation import (
    build,
    check_keys,
    check_unique,
    check_version,
    instances,
    mapping,
    names_of,
    sequence,
    set_field,
    sha256,
    text_of,
)

GRAPH_FORMAT = "scheduler-graph"
GRAPH_VERSION = 2
_MOST_BYTES = 2**60


@dataclass(frozen=True)
class Graph:
    """One training step: operations in a topological order, "the input order".

    Several operations may produce the same tensor (alternatives). Operations linked by
    shared outputs form one task; the first of a task in the input order is its default.

    Parameters
    ----------
    operations : iterable of Operation
        In a topological order: every input is resident or produced by an earlier operation.
    tensors : iterable of Tensor
    resident : iterable of str
        Tensors that are live throughout: parameters, buffers, the batch. No operation
        produces them.
    results : iterable of str
        Tensors that must be live at the end: loss, gradients.
    required : iterable of str
        Operations that must run even if nothing reads their outputs. Non-repeatable
        operations are always required.
    time_unit : str
        Unit of all times, for example "s" or "FLOP".
    name : str
    assumptions : iterable of str
        What sizes and times rest on where they are not those of the machine that traced the
        step, one sentence each; a plan of the graph repeats them.

    Raises
    ------
    InvalidGraphError
        If names repeat or are unknown, an operation reads a tensor that no earlier operation
        produces (also if there is a cycle), the default operations alone do not produce the
        results and the inputs of required operations, a forward default comes after a
        backward one, or a non-repeatable operation has an alternative.
    """

    operations: Sequence[Operation]
    tensors: Sequence[Tensor]
    resident: Sequence[str] = ()
    results: Sequence[str] = ()
    required: Sequence[str] = ()
    time_unit: str = "s"
    name: str = ""
    assumptions: Sequence[str] = ()

    def __post_init__(self) -> None:
        set_field(self, "operations", instances(self.operations, Operation, "operations"))
        set_field(self, "tensors", instances(self.tensors, Tensor, "tensors"))
        for field in ("resident", "results", "required"):
            names = names_of(getattr(self, field), f"{field} of the graph")
            set_field(self, field, tuple(dict.fromkeys(names)))
        for field in ("time_unit", "name"):
            text_of(getattr(self, field), f"{field} of the graph")
        set_field(self, "assumptions", names_of(self.assumptions, "assumptions of the graph"))
        for assumption in self.assumptions:
            text_of(assumption, "an assumption of the graph")
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
        """The same graph in integers, for the simulator and the solvers."""
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

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r}, {len(self.operations)} operations, {len(self.tensors)} tensors,"
            f" {format_bytes(self.resident_bytes)} resident)"
        )

    def summary(self) -> str:
        """Return the numbers of operations and tensors, bytes by role, and time, as text."""
        index = self.index
        phases = Counter(operation.phase for operation in self.operations)
        counts = f"{phases['forward']} forward, {phases['backward']} backward"
        alternatives = len(self.operations) - len(index.tasks)
        results = {index.storage_of[t] for t, is_result in enumerate(index.is_result) if is_result}
        result_bytes = sum(index.storage_bytes[storage] for storage in results)
        time = math.fsum(self.operations[i].time for i in index.defaults)
        rows = [
            ("graph", self.name or "without a name"),
            ("operations", f"{counts}, {alternatives} of them alternatives" if alternatives else counts),
            ("tensors", f"{len(self.tensors)} in {len(index.storage_bytes)} storages"),
            ("resident", self.resident_text()),
            ("results", f"{format_bytes(result_bytes)} in {len(results)} storages"),
            ("time", f"{time:.6g} {self.time_unit} if nothing is recomputed"),
            *(("assumes", assumption) for assumption in self.assumptions),
        ]
        return text_table(rows)

    def resident_bytes_by_role(self) -> Counter[str]:
        """Return the bytes of resident storages by role; a storage counts for its first resident tensor."""
        index = self.index
        sizes: Counter[str] = Counter()
        seen: set[int] = set()
        members: dict[int, int] = {}
        for tensor, storage in zip(self.tensors, index.storage_of, strict=True):
            members[storage] = max(members.get(storage, 0), tensor.size_bytes)
        for name in self.resident:
            t = index.tensor_ids[name]
            storage = index.storage_of[t]
            if storage not in seen:
                seen.add(storage)
                sizes[self.tensors[t].role] += members[storage]
        return sizes

    def resident_text(self) -> str:
        """Return the resident bytes as text, and how they are divided among the roles."""
        shown = ", ".join(f"{role} {format_bytes(size)}" for role, size in self.resident_bytes_by_role().items())
        return format_bytes(self.resident_bytes) + (f": {shown}" if shown else "")

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
            **({"assumptions": list(self.assumptions)} if self.assumptions else {}),
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
        check_version(
            fields, GRAPH_FORMAT, GRAPH_VERSION, lacks="the roles of tensors, and layers and kinds of operations"
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
        produced = {name for operation in self.operations for name in operation.outputs}
        for operation in self.operations:
            for name in (*operation.inputs, *operation.outputs):
                if name not in tensors:
                    raise InvalidGraphError(f'operation "{operation.name}" names an unknown tensor "{name}"')
        for field in ("resident", "results"):
            for name in getattr(self, field):
                if name not in tensors:
                    raise InvalidGraphError(f'{field} names an unknown tensor "{name}"')
        for name in self.resident:
            if name in produced:
                raise InvalidGraphError(f'resident tensor "{name}" is live throughout: no operation may produce it')
        orphans = tensors - produced - set(self.resident)
        if orphans:
            raise InvalidGraphError(f'tensor "{min(orphans)}" is neither resident nor produced by an operation')
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
                    f'forward operation "{operation.name}" comes after backward operation "{first_backward}":'
                    " the input order runs the forward phase first"
                )
            ran.add(index.task_of[i])
            for name in operation.inputs:
                if name not in available:
                    raise InvalidGraphError(
                        f'the default operations alone do not produce "{name}", which "{operation.name}" needs:'
                        " place the alternative that produces it first in its task"
                    )
            available.update(operation.outputs)
        for name in self.results:
            if name not in available:
                raise InvalidGraphError(f'the default operations alone do not produce the result "{name}"')


def _why_unavailable(operations: Sequence[Operation], reader: Operation, name: str) -> str:
    """Return the reason that a tensor is not there when it is read: a cycle, or the order."""
    producers = {output: operation for operation in operations for output in operation.outputs}
    path, seen = [reader.name], {reader.name}
    pending = [(producers[name], [*path])]
    while pending:
        operation, path = pending.pop()
        if operation.name == reader.name:
            cycle = " <- ".join([*path, reader.name])
            return f"the graph has a cycle: {cycle}; an operation cannot need its own result"
        if operation.name in seen:
            continue
        seen.add(operation.name)
        pending += [(producers[needed], [*path, operation.name]) for needed in operation.inputs if needed in producers]
    return (
        f'operation "{reader.name}" reads "{name}" before "{producers[name].name}" produces it:'
        " give the operations in a topological order"
    )


_OWN_FIELDS = ("resident", "results", "required", "time_unit", "name", "assumptions")
