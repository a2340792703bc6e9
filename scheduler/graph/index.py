"""A graph in integers, for the simulator and the solvers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from scheduler.graph.operations import Operation, Phase, Tensor


class GraphIndex:
    """A graph in integers: operations and tensors by position, tasks, storages.

    Attributes
    ----------
    operation_ids, tensor_ids : dict of str to int
    inputs, outputs : tuple of tuple of int
        Tensors that each operation reads and produces.
    producers, readers : tuple of tuple of int
        Operations that produce and read each tensor.
    storage_of : tuple of int
        Storage of each tensor; storages are numbered by first appearance.
    storage_bytes : tuple of int
        Size of each storage; 0 for those that hold a resident tensor, which cost nothing
        beyond `resident_bytes`.
    allocated_bytes : tuple of int
        Bytes that each operation newly allocates: its outputs' storages, without those that
        an input lies in (an output on such a storage is a view).
    resident_bytes : int
    is_resident, is_result : tuple of bool
        Per tensor.
    tasks : tuple of tuple of int
        Operations of each task in the input order; tasks are in the order of their defaults.
    task_of : tuple of int
        Task of each operation.
    defaults : tuple of int
        The default operations that results and required operations need, in the input
        order: the save-everything schedule runs these.
    forward_tasks : tuple of int
        Forward tasks whose default the forward results need.
    required : frozenset of int
        Operations that must run.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        tensors: Sequence[Tensor],
        resident: Sequence[str],
        results: Sequence[str],
        required: Sequence[str],
    ) -> None:
        self.operation_ids = {operation.name: i for i, operation in enumerate(operations)}
        self.tensor_ids = {tensor.name: i for i, tensor in enumerate(tensors)}
        ids = self.tensor_ids
        self.inputs = tuple(tuple(dict.fromkeys(ids[name] for name in op.inputs)) for op in operations)
        self.outputs = tuple(tuple(ids[name] for name in op.outputs) for op in operations)
        self.producers = _transpose(self.outputs, len(ids))
        self.readers = _transpose(self.inputs, len(ids))
        numbers: dict[str, int] = {}
        self.storage_of = tuple(numbers.setdefault(str(tensor.storage), len(numbers)) for tensor in tensors)
        sizes = [0] * len(numbers)
        for tensor, storage in zip(tensors, self.storage_of, strict=True):
            sizes[storage] = max(sizes[storage], tensor.size_bytes)
        self.is_resident = _membership(tensors, resident)
        self.is_result = _membership(tensors, results)
        held = {self.storage_of[ids[name]] for name in resident}
        self.resident_bytes = sum(sizes[storage] for storage in held)
        self.storage_bytes = tuple(0 if s in held else size for s, size in enumerate(sizes))
        self.allocated_bytes = tuple(
            sum(self.storage_bytes[s] for s in self._storages(outputs) - self._storages(inputs))
            for inputs, outputs in zip(self.inputs, self.outputs, strict=True)
        )
        self.tasks = _tasks(self.outputs, self.producers)
        task_of = [0] * len(operations)
        for number, task in enumerate(self.tasks):
            for i in task:
                task_of[i] = number
        self.task_of = tuple(task_of)
        self.required = frozenset(
            {self.operation_ids[name] for name in required}
            | {i for i, op in enumerate(operations) if not op.repeatable}
        )
        found = [self.producers[t] for t, result in enumerate(self.is_result) if result and not self.is_resident[t]]
        roots = [self.tasks[task_of[producers[0]]][0] for producers in found]
        forward: Phase = "forward"
        forward_roots = [i for i in roots if operations[i].phase == forward]
        self.forward_tasks = tuple(task_of[i] for i in self._needed(forward_roots) if operations[i].phase == forward)
        must = [self.tasks[task_of[i]][0] for i in self.required]
        self.defaults = self._needed([*self.required, *must, *roots])

    def _storages(self, tensors: Iterable[int]) -> set[int]:
        return {self.storage_of[tensor] for tensor in tensors}

    def _needed(self, roots: Iterable[int]) -> tuple[int, ...]:
        """Return roots and the task defaults that they need, transitively, in the input order."""
        found: set[int] = set()
        stack = list(roots)
        while stack:
            i = stack.pop()
            if i in found:
                continue
            found.add(i)
            producers = [self.producers[tensor][0] for tensor in self.inputs[i] if self.producers[tensor]]
            stack += [self.tasks[self.task_of[producer]][0] for producer in producers]
        return tuple(sorted(found))


def _membership(tensors: Sequence[Tensor], names: Sequence[str]) -> tuple[bool, ...]:
    members = set(names)
    return tuple(tensor.name in members for tensor in tensors)


def _tasks(outputs: tuple[tuple[int, ...], ...], producers: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return the operations that shared outputs link, by union-find; the smallest number leads."""
    task = list(range(len(outputs)))

    def find(i: int) -> int:
        while task[i] != i:
            task[i] = task[task[i]]
            i = task[i]
        return i

    for alternatives in producers:
        for other in alternatives[1:]:
            first, second = sorted((find(alternatives[0]), find(other)))
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
