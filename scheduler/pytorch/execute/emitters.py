"""The lines of code that run each kind of instruction.

A random operation draws from its generator in its first run; a recomputation sets the
generator to the state saved before that run, and restores it afterwards. Batch norm updates its
running statistics in its first run only.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from scheduler.graph import Graph
from scheduler.pytorch.capture.instructions import (
    Accumulate,
    Call,
    Instruction,
    Ref,
    Return,
    SaveState,
    Snapshot,
    Tangents,
    Update,
)
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.torch_private.operators import OpOverload, call_of


class Scope:
    """The names in the generated code: a variable for each tensor, and constants.

    Parameters
    ----------
    graph : Graph
    elided_snapshots : mapping of str to str
        Snapshots that are not copied, with the resident tensor that replaces each.

    Attributes
    ----------
    constants : dict of str to object
        What each constant's name refers to.
    live : dict of str to None
        Tensors that a variable holds now, in the order in which they were assigned. Tokens and
        elided snapshots never are.
    """

    def __init__(self, graph: Graph, elided_snapshots: Mapping[str, str]) -> None:
        self.elided_snapshots = elided_snapshots
        self.constants: dict[str, object] = {}
        self.live: dict[str, None] = {}
        self._constant_names: dict[object, str] = {}
        self._variables = {tensor.name: f"t{i}" for i, tensor in enumerate(graph.tensors)}

    def variable(self, tensor: str) -> str:
        """Return the variable of a tensor."""
        return self._variables[tensor]

    def variables(self, tensors: Sequence[str]) -> list[str]:
        """Return the variables of tensors."""
        return [self._variables[tensor] for tensor in tensors]

    def constant(self, value: object) -> str:
        """Return the name of a constant."""
        key = (type(value), value)
        if key not in self._constant_names:
            name = f"c{len(self.constants)}"
            self.constants[name] = call_of(value) if isinstance(value, OpOverload) else value
            self._constant_names[key] = name
        return self._constant_names[key]


class PartWriter:
    """Names the tensors and values in one part of the code, and records which tensors it needs.

    Attributes
    ----------
    scope : Scope
    produced : set of str
        Tensors assigned so far in this part.
    reads : dict of str to None
        Tensors that this part reads and that an earlier part assigned, or that are resident.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.produced: set[str] = set()
        self.reads: dict[str, None] = {}

    def assign(self, tensor: str) -> str:
        """Return the variable to which a tensor is about to be assigned."""
        self.scope.live[tensor] = None
        self.produced.add(tensor)
        return self.scope.variable(tensor)

    def read(self, tensor: str) -> str:
        """Return the variable from which a tensor is read."""
        tensor = self.scope.elided_snapshots.get(tensor, tensor)
        if tensor not in self.produced:
            self.reads[tensor] = None
        return self.scope.variable(tensor)

    def value(self, value: object) -> str:
        """Return the text of an argument."""
        if isinstance(value, Ref):
            return self.read(value.tensor)
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(self.value(entry) for entry in value) + "]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        if isinstance(value, float) and value - value == 0.0:  # finite, so that its text reads back
            return repr(value)
        return self.scope.constant(value)

    def arguments(self, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Return the text of the arguments of a call."""
        parts = [self.value(argument) for argument in args]
        parts += [
            f"**{{{key!r}: {self.value(value)}}}" if keyword.iskeyword(key) else f"{key}={self.value(value)}"
            for key, value in kwargs.items()
        ]
        return ", ".join(parts)


def emit(writer: PartWriter, instruction: Instruction, *, is_recomputation: bool) -> list[str]:
    """Return the lines that run an operation's instruction.

    Parameters
    ----------
    writer : PartWriter
    instruction : Instruction
    is_recomputation : bool
        Whether the operation has run before in this step.
    """
    match instruction:
        case Call():
            return _emit_call(writer, instruction, is_recomputation=is_recomputation)
        case SaveState():
            return _emit_save_state(writer, instruction)
        case Snapshot():
            return _emit_snapshot(writer, instruction)
        case Update():
            return _emit_update(writer, instruction)
        case Return():
            return _emit_return(writer, instruction)
        case Tangents():
            return _emit_tangents(writer, instruction)
        case Accumulate():
            return []  # autograd adds the gradients that the segment returns


def _emit_call(writer: PartWriter, call: Call, *, is_recomputation: bool) -> list[str]:
    scope, target = writer.scope, call.target
    if call.batch_norm is not None and is_recomputation:
        target = call.batch_norm.replay
        arguments = _batch_norm_replay_arguments(writer, call)
    else:
        arguments = writer.arguments(call.args, call.kwargs)
    expression = f"{scope.constant(target)}({arguments})"
    if call.has_several:
        missing = [(k, name) for k, name in enumerate(call.outputs) if name is not None and name not in scope.live]
        lines = [
            f"several = {expression}",
            *(f"{writer.assign(name)} = several[{k}]" for k, name in missing),
            "several = None",
        ]
    else:
        lines = [f"{writer.assign(name)} = {expression}" for name in call.outputs if name is not None] or [expression]
    if call.state is not None and is_recomputation:
        generator = scope.constant(call.generator)
        state = writer.read(call.state)
        lines = [
            f"before = {generator}.get_state()",
            f"{generator}.set_state({state})",
            *lines,
            f"{generator}.set_state(before)",
            "before = None",
        ]
    return lines


def _batch_norm_replay_arguments(writer: PartWriter, call: Call) -> str:
    """Return the arguments of a batch norm that does not update its running statistics."""
    norm = call.batch_norm
    assert norm is not None
    if norm.momentum is None:
        return ", ".join(writer.value(value) for i, value in enumerate(call.args) if i not in norm.statistics)
    return ", ".join("0.0" if i == norm.momentum else writer.value(value) for i, value in enumerate(call.args))


def _emit_save_state(writer: PartWriter, save: SaveState) -> list[str]:
    generator = writer.scope.constant(save.generator)
    # An alias, so that dispatch modes see the memory of the state.
    alias = writer.scope.constant(aten.alias.default)
    return [f"{writer.assign(save.tensor)} = {alias}({generator}.get_state())"]


def _emit_snapshot(writer: PartWriter, snapshot: Snapshot) -> list[str]:
    if snapshot.tensor in writer.scope.elided_snapshots:
        return []
    clone = writer.scope.constant(aten.clone.default)
    value = writer.read(snapshot.source)
    return [f"{writer.assign(snapshot.tensor)} = {clone}({value})"]


def _emit_update(writer: PartWriter, update: Update) -> list[str]:
    copy = writer.scope.constant(aten.copy_.default)
    return [f"{copy}({writer.read(update.target)}, {writer.read(update.value)})"]


def _emit_return(writer: PartWriter, returned: Return) -> list[str]:
    pairs = zip(returned.results, returned.values, strict=True)
    return [f"{writer.assign(result)} = {writer.read(value)}" for result, value in pairs]


def _emit_tangents(writer: PartWriter, tangents: Tangents) -> list[str]:
    dense = writer.scope.constant(with_strides)
    return [
        f"{writer.assign(name)} = {dense}(incoming, {position}, {strides})"
        for position, (name, strides) in enumerate(zip(tangents.tensors, tangents.strides, strict=True))
    ]


def with_strides(incoming: list[Tensor | None], position: int, strides: tuple[int, ...]) -> Tensor:
    """Take an incoming gradient out of the list, copied if its strides are not the planned ones."""
    tensor, incoming[position] = incoming[position], None
    assert tensor is not None
    if tensor.stride() != strides and tensor.numel() > 1:
        dense = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        return dense.copy_(tensor)
    return tensor
