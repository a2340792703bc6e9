"""The graph: operations over tensors, with bytes and times.

A graph says what one training step computes. It says nothing about when: that is the
schedule's part. All data is checked at birth and never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from scheduler.checks import (
    build,
    check_keys,
    check_name,
    check_text,
    check_unique,
    count_of,
    instances,
    mapping,
    names_of,
    sequence,
    set_field,
    sha256,
    time_of,
)
from scheduler.errors import InvalidGraphError

Phase = Literal["forward", "backward"]
"""The phase of a training step that an operation belongs to."""

GRAPH_FORMAT = "scheduler-graph"
GRAPH_VERSION = 1
_MOST_BYTES = 2**60


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


@dataclass(frozen=True)
class Graph:
    """One training step: operations in a topological order, "the given order".

    Several operations may make the same tensor (alternatives). Operations linked by shared
    outputs form one task; the first of a task in the given order is its default.

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
        return GraphIndex(self)

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

        Names, times and workspaces are left out: two captures of one program agree.
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
        operations: list[dict[str, object]] = []
        for operation in self.operations:
            entry: dict[str, object] = {
                "name": operation.name,
                "inputs": list(operation.inputs),
                "outputs": list(operation.outputs),
                "time": operation.time,
            }
            if operation.workspace_bytes:
                entry["workspace_bytes"] = operation.workspace_bytes
            if operation.phase != "forward":
                entry["phase"] = operation.phase
            if not operation.repeatable:
                entry["repeatable"] = False
            if operation.signature:
                entry["signature"] = operation.signature
            operations.append(entry)
        tensors: list[dict[str, object]] = []
        for tensor in self.tensors:
            entry = {"name": tensor.name, "size_bytes": tensor.size_bytes}
            if tensor.storage != tensor.name:
                entry["storage"] = tensor.storage
            tensors.append(entry)
        return {
            "format": GRAPH_FORMAT,
            "version": GRAPH_VERSION,
            "name": self.name,
            "time_unit": self.time_unit,
            "tensors": tensors,
            "operations": operations,
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
        if fields.get("format") != GRAPH_FORMAT or fields.get("version") != GRAPH_VERSION or fields["version"] is True:
            raise InvalidGraphError(
                f'not a graph of format "{GRAPH_FORMAT}" version {GRAPH_VERSION}:'
                f" format {fields.get('format')!r}, version {fields.get('version')!r}"
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
                    " the given order runs the forward phase first"
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


class GraphIndex:
    """A graph in integers: operations and tensors by position, tasks, storages.

    Attributes
    ----------
    operation_ids, tensor_ids : dict of str to int
    inputs, outputs : tuple of tuple of int
        Tensors that each operation reads and makes.
    producers, readers : tuple of tuple of int
        Operations that make and read each tensor.
    storage_of : tuple of int
        Storage of each tensor; storages are numbered by first appearance.
    storage_bytes : tuple of int
        Size of each storage; 0 for those that hold a resident tensor, which cost nothing
        beyond `resident_bytes`.
    resident_bytes : int
    is_resident, is_result : tuple of bool
        Per tensor.
    tasks : tuple of tuple of int
        Operations of each task in the given order; tasks stand in the order of their
        defaults.
    task_of : tuple of int
        Task of each operation.
    defaults : tuple of int
        The default operations that results and required operations need, in the given
        order: the save-everything schedule runs these.
    forward_tasks : tuple of int
        Forward tasks whose default the forward results need.
    required : frozenset of int
        Operations that must run.
    """

    def __init__(self, graph: Graph) -> None:
        operations = graph.operations
        self.operation_ids = {operation.name: i for i, operation in enumerate(operations)}
        self.tensor_ids = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
        ids = self.tensor_ids
        self.inputs = tuple(tuple(dict.fromkeys(ids[name] for name in op.inputs)) for op in operations)
        self.outputs = tuple(tuple(ids[name] for name in op.outputs) for op in operations)
        self.producers = _transpose(self.outputs, len(ids))
        self.readers = _transpose(self.inputs, len(ids))
        numbers: dict[str, int] = {}
        self.storage_of = tuple(numbers.setdefault(str(tensor.storage), len(numbers)) for tensor in graph.tensors)
        sizes = [0] * len(numbers)
        for tensor, storage in zip(graph.tensors, self.storage_of, strict=True):
            sizes[storage] = max(sizes[storage], tensor.size_bytes)
        resident = set(graph.resident)
        results = set(graph.results)
        self.is_resident = tuple(tensor.name in resident for tensor in graph.tensors)
        self.is_result = tuple(tensor.name in results for tensor in graph.tensors)
        held = {self.storage_of[ids[name]] for name in graph.resident}
        self.resident_bytes = sum(sizes[storage] for storage in held)
        self.storage_bytes = tuple(0 if s in held else size for s, size in enumerate(sizes))
        self.tasks = _tasks(self.outputs, self.producers)
        task_of = [0] * len(operations)
        for number, task in enumerate(self.tasks):
            for i in task:
                task_of[i] = number
        self.task_of = tuple(task_of)
        self.required = frozenset(
            {self.operation_ids[name] for name in graph.required}
            | {i for i, op in enumerate(operations) if not op.repeatable}
        )
        self.forward_tasks = tuple(
            task_of[i] for i in self._needed(self._task_defaults(graph, "forward")) if operations[i].phase == "forward"
        )
        must = [self.tasks[task_of[i]][0] for i in self.required]
        self.defaults = self._needed([*self.required, *must, *self._task_defaults(graph)])

    def _task_defaults(self, graph: Graph, phase: Phase | None = None) -> list[int]:
        """Return the defaults of the tasks that make the results, of one phase if named."""
        made = [self.producers[self.tensor_ids[name]] for name in graph.results if name not in graph.resident]
        defaults = [self.tasks[self.task_of[producers[0]]][0] for producers in made]
        return [i for i in defaults if phase is None or graph.operations[i].phase == phase]

    def _needed(self, roots: Iterable[int]) -> tuple[int, ...]:
        """Return roots and the task defaults that they need, transitively, in the given order."""
        found: set[int] = set()
        stack = list(roots)
        while stack:
            i = stack.pop()
            if i in found:
                continue
            found.add(i)
            makers = [self.producers[tensor][0] for tensor in self.inputs[i] if self.producers[tensor]]
            stack += [self.tasks[self.task_of[maker]][0] for maker in makers]
        return tuple(sorted(found))


def _tasks(outputs: tuple[tuple[int, ...], ...], producers: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    task = list(range(len(outputs)))

    def find(i: int) -> int:
        while task[i] != i:
            task[i] = task[task[i]]
            i = task[i]
        return i

    for makers in producers:
        for other in makers[1:]:
            first, second = sorted((find(makers[0]), find(other)))
            task[second] = first
    groups: dict[int, list[int]] = {}
    for i in range(len(outputs)):
        groups.setdefault(find(i), []).append(i)
    return tuple(tuple(group) for group in groups.values())


def _transpose(rows: tuple[tuple[int, ...], ...], width: int) -> tuple[tuple[int, ...], ...]:
    columns: list[list[int]] = [[] for _ in range(width)]
    for i, row in enumerate(rows):
        for entry in row:
            columns[entry].append(i)
    return tuple(tuple(column) for column in columns)


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
