"""A graph under construction: tensors, tokens and operations, with the instruction of each operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor as TorchTensor
from torch import fx
from torch.fx.node import Argument

from scheduler.errors import CaptureError
from scheduler.graph import Graph, Operation, Phase, Role, Tensor
from scheduler.pytorch.capture.instructions import Call, Instruction, Ref
from scheduler.pytorch.capture.lowering.storages import StorageSizes
from scheduler.pytorch.capture.operators import describe_call, storage_key


class GraphBuilder:
    """Collect tensors and operations until `build`.

    Parameters
    ----------
    sizes : StorageSizes

    Attributes
    ----------
    tensor_of : dict of Node to str
        The tensor that holds a node's value; of a changed placeholder, its snapshot.
    instructions : list of Instruction
        One per operation.
    """

    def __init__(self, sizes: StorageSizes) -> None:
        self._sizes = sizes
        self.tensor_of: dict[fx.Node, str] = {}
        self.instructions: list[Instruction] = []
        self._tensors: dict[str, Tensor] = {}
        self._storage_of: dict[int, str] = {}
        """Storage in the graph of each fake storage."""
        self._operations: list[Operation] = []
        self._required: list[str] = []
        self._from_backward: set[str] = set()
        """Tensors that operations of the backward produce."""

    def add_tensor(self, name: str, size_bytes: int, storage: str | None = None, *, role: Role = "activation") -> str:
        """Add a tensor and return its name."""
        self._tensors[name] = Tensor(name, size_bytes, storage, role=role)
        return name

    def add_value(self, name: str, value: TorchTensor, *, role: Role = "activation") -> str:
        """Add a tensor on the storage of a fake tensor and return its name."""
        storage = self._storage_of.setdefault(storage_key(value), name)
        return self.add_tensor(name, self._sizes.of(value), storage, role=role)

    def add_token(self, name: str, *, role: Role = "activation") -> str:
        """Add a tensor of zero bytes, which only orders operations, and return its name."""
        return self.add_tensor(name, 0, role=role)

    def put_on_storage_of(self, source: fx.Node, value: TorchTensor) -> None:
        """Let the storage of a fake tensor be that of the tensor which holds a node's value."""
        self._storage_of[storage_key(value)] = str(self.tensor(self.tensor_of[source]).storage)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor that was added."""
        return self._tensors[name]

    def add_operation(
        self,
        name: str,
        instruction: Instruction,
        inputs: Iterable[str],
        outputs: Iterable[str],
        *,
        phase: Phase = "forward",
        repeatable: bool = False,
        required: bool = False,
        layer: str = "",
        kind: str = "",
    ) -> None:
        """Add an operation and the instruction that it runs."""
        signature = describe_call(instruction.node) if isinstance(instruction, Call) else type(instruction).__name__
        operation = Operation(
            name=name,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            time=0.0,
            phase=phase,
            repeatable=repeatable,
            signature=signature,
            layer=layer,
            kind=kind,
        )
        self._operations.append(operation)
        self.instructions.append(instruction)
        if required:
            self._required.append(name)
        if phase == "backward":
            self._from_backward.update(operation.outputs)

    def depends_on_backward(self, inputs: Iterable[str]) -> bool:
        """Return whether an operation of the backward produces one of these tensors."""
        return not self._from_backward.isdisjoint(inputs)

    def with_refs(self, arguments: object) -> object:
        """Return nested arguments with a `Ref` in place of each node.

        Raises
        ------
        CaptureError
            If a node has no tensor yet and is neither a number nor a generator.
        """

        def replace(node: fx.Node) -> Argument:
            if node in self.tensor_of:
                return cast("Argument", Ref(self.tensor_of[node]))
            value = node.meta["val"]
            if isinstance(value, (bool, int, float, torch.Generator)):
                return cast("Argument", value)
            raise CaptureError(f'"{node.name}" is used before it is produced, or is not a tensor: {value!r}')

        return fx.map_arg(cast("Argument", arguments), replace)

    def build(self, name: str, resident: Iterable[str], results: Iterable[str]) -> Graph:
        """Return the graph."""
        return Graph(
            operations=tuple(self._operations),
            tensors=tuple(self._tensors.values()),
            resident=tuple(resident),
            results=tuple(results),
            required=tuple(self._required),
            name=name,
        )
