"""From the joint graph to operations over tensors, and what each operation runs.

One operation per call, in trace order; one that writes over its input (see `reuse`) runs once.
Six kinds of operation exist only here:

- `rng state N` keeps the generator's state for random call N, so that it can run again;
- `snapshot:NAME` keeps the old value of a tensor that the step changes in place;
- `update:NAME` writes the new value;
- `return` hands the outputs to the caller, who holds them to the end;
- `tangents` receives the incoming gradients and begins the backward;
- `accumulate N` adds a group of gradients to existing ones, if there are any: it reads both
  and makes nothing, so the new gradients are no results and go.

Order that data does not show (random draws one after another, collectives as all processes
meet in them, the snapshot before the update, the tangents before the backward) is carried by
tokens: tensors of zero bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor as TorchTensor
from torch import fx
from torch.fx.node import Argument

from scheduler.errors import CaptureError
from scheduler.graph import Graph, Operation, Role, Tensor
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.capture.gradient_groups import group_gradients
from scheduler.pytorch.capture.inplace import find_reuses
from scheduler.pytorch.capture.instructions import (
    Accumulate,
    Call,
    Instruction,
    Lowered,
    Ref,
    Return,
    SaveState,
    Snapshot,
    Tangents,
    Update,
)
from scheduler.pytorch.capture.joint import Joint
from scheduler.pytorch.capture.locations import location
from scheduler.pytorch.capture.operators import (
    BATCH_NORMS,
    IN_PLACE,
    UPDATES,
    BatchNorm,
    describe_call,
    is_collective,
    is_getitem,
    is_random,
    may_overwrite_input,
    nodes_in,
    output_values,
    owner,
    storage_key,
)


def lower(joint: Joint, memory: DeviceMemory, *, name: str) -> Lowered:
    """Return the joint graph as a `Graph` of operations without times, with what each runs.

    Parameters
    ----------
    joint : Joint
    memory : DeviceMemory
        What stands beside the step.
    name : str

    Raises
    ------
    CaptureError
        If a forward operation needs a value of the backward.
    """
    return _Lowering(joint, memory).run(name)


@dataclass
class _Lowering:
    joint: Joint
    memory: DeviceMemory
    operations: list[Operation] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    tensor_of: dict[fx.Node, str] = field(default_factory=dict)
    """Tensor that holds a node's value; of a changed placeholder, its snapshot."""
    storage_of: dict[int, str] = field(default_factory=dict)
    """Storage in the graph of each fake storage."""
    required: list[str] = field(default_factory=list)
    random_token: str | None = None
    collective_token: str | None = None
    randoms: int = 0
    accumulations: int = 0
    made_backward: set[str] = field(default_factory=set)

    def run(self, name: str) -> Lowered:
        joint = self.joint
        folded = {} if joint.functional else self._find_folded_batch_norms()
        self.counters = {} if joint.functional else self._find_counters()
        kept = {statistic for _, statistics in folded.values() for statistic in statistics}
        kept.update(self.counters.values())
        self.mutations = [(old, new) for old, new in joint.mutations if old not in kept]
        calls = [node for node in joint.module.graph.nodes if node.op == "call_function" and not is_getitem(node)]
        backward = self._backward_nodes(calls)
        self.reuses = {} if joint.functional else find_reuses(joint.module.graph, backward)
        resident = self._add_resident()
        updates = self._updates_after(calls, backward)
        for node in calls:
            if node in self.counters:
                self._add_counter(node)
            elif node not in backward:
                self._add_snapshots_for(node)
                self._add_call(node, "forward", folded.get(node, (None, ()))[0])
                for old, new in updates.get(node, ()):
                    self._add_update(old, new)
        for old, new in updates.get(None, ()):
            self._add_update(old, new)
        outputs = self._add_return()
        begin = self._add_tangents()
        groups = self._groups_to_accumulate(calls)
        self._add_accumulations(groups.get(None, ()), begin)
        for node in calls:
            if node in backward:
                self._add_call(node, "backward", None, begin)
                self._add_accumulations(groups.get(node, ()), begin)
        gradients = tuple(self.tensor_of[node] for _, node in joint.gradients)
        made = [tensor for i, tensor in enumerate(gradients) if i not in self.accumulate_gradients]
        for tensor in gradients:
            if self.tensors[tensor].role == "activation":
                self.tensors[tensor] = replace(self.tensors[tensor], role="gradient")
        held = [tensor for tensor in self.tangents if self.tensors[tensor].size_bytes <= _SCALAR_BYTES]
        graph = Graph(
            operations=tuple(self.operations),
            tensors=tuple(self.tensors.values()),
            resident=(*resident, *self.standing, *self.accumulate_gradients.values()),
            results=tuple(dict.fromkeys([*self.returned, *made, *held])),
            required=tuple(self.required),
            name=name,
        )
        return Lowered(graph, tuple(self.instructions), resident, outputs, gradients)

    def _find_folded_batch_norms(self) -> dict[fx.Node, tuple[BatchNorm, tuple[fx.Node, ...]]]:
        """Return batch norms whose running statistics nothing else reads or changes."""
        updates = dict(self.joint.mutations)
        folded: dict[fx.Node, tuple[BatchNorm, tuple[fx.Node, ...]]] = {}
        for node in self.joint.module.graph.nodes:
            norm = BATCH_NORMS.get(node.target)
            if norm is None or (node.target is _NATIVE_BATCH_NORM and node.args[5] is not True):
                continue
            statistics = tuple(node.args[position] for position in norm.statistics)
            made = {user.args[1]: user for user in node.users if is_getitem(user)}
            pairs = [(old, made.get(position)) for old, position in zip(statistics, norm.updated, strict=True)]
            if all(_is_private(node, old, new) and updates.get(old) is new for old, new in pairs):
                folded[node] = (norm, statistics)
        return folded

    def _find_counters(self) -> dict[fx.Node, fx.Node]:
        """Return calls that only change a resident tensor by a number, with its placeholder."""
        return {
            new: old
            for old, new in self.joint.mutations
            if new.target in UPDATES
            and new.args[0] is old
            and len(new.all_input_nodes) == 1
            and _is_private(new, old, new)
            and new.meta["val"].dtype == old.meta["val"].dtype
        }

    def _backward_nodes(self, calls: list[fx.Node]) -> set[fx.Node]:
        """Return the calls of the backward: those tagged so, and all that need an incoming gradient."""
        late = set(self.joint.tangents)
        for node in calls:
            if node.meta.get("partitioner_tag") == "is_backward" or any(
                owner(argument) in late for argument in node.all_input_nodes
            ):
                late.add(node)
        for node in (*self.joint.outputs, *(new for _, new in self.joint.mutations)):
            if owner(node) in late:
                raise CaptureError(f'output or buffer "{node.name}" is made in the backward: it cannot be planned')
        return late

    def _add_resident(self) -> dict[str, fx.Node]:
        resident: dict[str, fx.Node] = {}
        changed = {old for old, _ in self.mutations}
        for node, source in self.joint.sources.items():
            value = node.meta["val"]
            if not isinstance(value, TorchTensor):
                continue
            tensor = f"{source.kind}:{source.names[0]}"
            if node in changed:
                self._add_tensor(tensor, value.untyped_storage().nbytes(), tensor, role=source.kind)
            else:
                self._add_value(tensor, value, role=source.kind)
            self.tensor_of[node] = tensor
            resident[tensor] = node
        self.pending = {old: self.tensor_of[old] for old in changed if self._readers(old)}
        """Changed placeholders whose snapshot is not made yet."""
        self.snapshots: dict[fx.Node, str] = {}
        self.standing = [
            self._add_tensor(tensor.name, tensor.size_bytes, role=tensor.role) for tensor in self.memory.tensors
        ]
        self.accumulate_gradients = {
            i: self._add_existing_gradient(trained)
            for i, (trained, _) in enumerate(self.joint.gradients)
            if self.memory.accumulate_gradients and self.joint.sources[trained].kind != "input"
        }
        """By the position of the gradient that is added to it."""
        return resident

    def _add_existing_gradient(self, trained: fx.Node) -> str:
        value = trained.meta["val"]
        name = f"gradient:{self.joint.sources[trained].names[0]}"
        return self._add_tensor(name, value.numel() * value.element_size(), role="gradient")

    def _groups_to_accumulate(self, calls: list[fx.Node]) -> dict[fx.Node | None, list[tuple[int, ...]]]:
        """Return the groups of gradients to hand over, by the call that makes the last of each."""
        place = {node: position for position, node in enumerate(calls)}
        made = {i: place.get(owner(self.joint.gradients[i][1]), -1) for i in self.accumulate_gradients}
        sizes = {i: self.tensors[name].size_bytes for i, name in self.accumulate_gradients.items()}
        after: dict[fx.Node | None, list[tuple[int, ...]]] = {}
        for group in group_gradients(made, sizes):
            last = made[group[-1]]
            after.setdefault(calls[last] if last >= 0 else None, []).append(group)
        return after

    def _add_accumulations(self, groups: Iterable[tuple[int, ...]], begin: str) -> None:
        for group in groups:
            inputs = [self.tensor_of[self.joint.gradients[i][1]] for i in group]
            inputs += [self.accumulate_gradients[i] for i in group]
            if not self.made_backward.intersection(inputs):
                inputs.append(begin)
            self.accumulations += 1
            name = f"accumulate {self.accumulations}"
            self._add(name, Accumulate(group), tuple(inputs), (), phase="backward", repeatable=False)

    def _readers(self, placeholder: fx.Node) -> list[fx.Node]:
        return [user for user in placeholder.users if user.op == "call_function"]

    def _updates_after(
        self, calls: list[fx.Node], backward: set[fx.Node]
    ) -> dict[fx.Node | None, list[tuple[fx.Node, fx.Node]]]:
        """Return the updates to place after each forward call: the first place where the old value is spent."""
        position = {node: i for i, node in enumerate(calls)}
        after: dict[fx.Node | None, list[tuple[fx.Node, fx.Node]]] = {}
        for old, new in self.mutations:
            needs = [owner(new), *(user for user in self._readers(old) if user not in backward)]
            known = [node for node in needs if node in position]
            last = max(known, key=position.__getitem__) if known else None
            after.setdefault(last, []).append((old, new))
        return after

    def _add_snapshots_for(self, node: fx.Node) -> None:
        for old in list(self.pending):
            if old in node.all_input_nodes:
                self._add_snapshot(old)

    def _add_snapshot(self, old: fx.Node) -> None:
        source = self.pending.pop(old)
        name = self.joint.sources[old].names[0]
        tensor = self._add_value(f"snapshot:{name}", old.meta["val"])
        token = self._add_token(f"snapshot:{name}:token")
        self._add(f"snapshot:{name}", Snapshot(source, tensor), (source,), (tensor, token), repeatable=False)
        self.tensor_of[old] = tensor
        self.snapshots[old] = token

    def _add_update(self, old: fx.Node, new: fx.Node) -> None:
        if old in self.pending:
            self._add_snapshot(old)
        source = self.joint.sources[old]
        target = f"{source.kind}:{source.names[0]}"
        value = self.tensor_of[new]
        tokens = (self.snapshots[old],) if old in self.snapshots else ()
        self._add(f"update:{source.names[0]}", Update(target, value), (value, *tokens), (), repeatable=False)

    def _add_counter(self, node: fx.Node) -> None:
        target = UPDATES[node.target]  # type: ignore[index]
        args = self._with_refs(node.args)
        call = Call(node, target, args, {}, (), has_several=False)  # type: ignore[arg-type]
        layer = location(node, self.joint.sources)
        read = (self.tensor_of[self.counters[node]],)
        self._add(_label(node, layer), call, read, (), repeatable=False, layer=layer)

    def _add_call(self, node: fx.Node, phase: str, norm: BatchNorm | None, begin: str | None = None) -> None:
        values = output_values(node)
        layer = location(node, self.joint.sources)
        name = _label(node, layer)
        if norm is not None:
            values = values[: norm.updated[0]]
        made = {user.args[1]: user for user in node.users if is_getitem(user)}
        several = isinstance(node.meta["val"], (tuple, list))
        draws = is_random(node)
        state, device = self._add_state(node, phase) if draws and not self.joint.functional else (None, None)
        names = [
            self.tensor_of[argument] for argument in nodes_in((node.args, node.kwargs)) if argument in self.tensor_of
        ]
        inputs = list(dict.fromkeys([*names, *([state] if state else [])]))
        if begin is not None and not self.made_backward.intersection(inputs):
            inputs.append(begin)
        target = node.target if norm is None else norm.update
        if may_overwrite_input(node) and not self.joint.functional:
            target = IN_PLACE[node.target]  # type: ignore[index]
            self.storage_of[storage_key(node.meta["val"])] = self._storage_of(node.args[0])
        args, kwargs, reuse = node.args, node.kwargs, self.reuses.get(node)
        if reuse is not None:
            target, args, kwargs = reuse.target, reuse.args, reuse.kwargs
            self.storage_of[storage_key(node.meta["val"])] = self._storage_of(reuse.source)
        outputs: list[str | None] = []
        for i, value in enumerate(values):
            getitem = made.get(i)
            holder = node if not several else getitem
            if isinstance(value, TorchTensor):
                tensor = self._add_value(f"{name}.{i}" if several else name, value)
                outputs.append(tensor)
                if holder is not None:
                    self.tensor_of[holder] = tensor
            else:
                outputs.append(None)
        made_tensors = [tensor for tensor in outputs if tensor is not None]
        if state is not None:
            self.random_token = self._add_token(f"rng token {self.randoms}", role="random state")
            made_tensors.append(self.random_token)
        meets = is_collective(node)
        if meets and not self.joint.functional:
            inputs += [] if self.collective_token is None else [self.collective_token]
            self.collective_token = self._add_token(f"{name}:done")
            made_tensors.append(self.collective_token)
        call = Call(
            node=node,
            target=target,  # type: ignore[arg-type]
            args=self._with_refs(args),  # type: ignore[arg-type]
            kwargs=self._with_refs(kwargs),  # type: ignore[arg-type]
            outputs=tuple(outputs),
            has_several=several,
            state=state,
            device=device,
            batch_norm=norm,
        )
        repeatable = not meets and reuse is None and (not draws or (phase == "forward" and state is not None))
        self._add(name, call, tuple(inputs), tuple(made_tensors), phase=phase, repeatable=repeatable, layer=layer)
        if state is not None or norm is not None:
            self.required.append(name)

    def _add_state(self, node: fx.Node, phase: str) -> tuple[str, torch.device]:
        device = next(value.device for value in output_values(node) if isinstance(value, TorchTensor))
        self.randoms += 1
        size = default_generator(device).get_state().untyped_storage().nbytes()
        state = self._add_tensor(f"state {self.randoms}", size, role="random state")
        inputs = () if self.random_token is None else (self.random_token,)
        self._add(
            f"rng state {self.randoms}", SaveState(state, device), inputs, (state,), phase=phase, repeatable=False
        )
        return state, device

    def _add_return(self) -> tuple[str, ...]:
        tensors = tuple(self.tensor_of[node] for node in self.joint.outputs)
        own = tuple(dict.fromkeys(t for t in tensors if t not in self._resident_names()))
        self.returned = tuple(f"{tensor}:returned" for tensor in own)
        for tensor, result in zip(own, self.returned, strict=True):
            self._add_tensor(result, self.tensors[tensor].size_bytes, self.tensors[tensor].storage, role="output")
        self._add("return", Return(own, self.returned), own, self.returned, repeatable=False)
        return tensors

    def _resident_names(self) -> set[str]:
        return {f"{source.kind}:{source.names[0]}" for source in self.joint.sources.values()}

    def _add_tangents(self) -> str:
        strides, outputs = [], []
        self.tangents: list[str] = []
        for node, output in self.joint.tangents.items():
            value = node.meta["val"]
            self.tensor_of[node] = self._add_value(f"tangent {output}", value, role="gradient")
            self.tangents.append(self.tensor_of[node])
            outputs.append(output)
            strides.append(tuple(value.stride()))
        begin = self._add_token("backward token")
        instruction = Tangents(tuple(outputs), tuple(self.tangents), tuple(strides))
        self._add("tangents", instruction, (), (*self.tangents, begin), phase="backward", repeatable=False)
        return begin

    def _add(
        self,
        name: str,
        instruction: Instruction,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        *,
        phase: str = "forward",
        repeatable: bool = True,
        layer: str = "",
    ) -> None:
        signature = describe_call(instruction.node) if isinstance(instruction, Call) else type(instruction).__name__
        self.operations.append(
            Operation(
                name=name,
                inputs=inputs,
                outputs=outputs,
                time=0.0,
                phase=phase,  # type: ignore[arg-type]
                repeatable=repeatable,
                signature=signature,
                layer=layer,
                kind=_kind_of(instruction),
            )
        )
        self.instructions.append(instruction)
        if phase == "backward":
            self.made_backward.update(outputs)

    def _storage_of(self, node: object) -> str:
        assert isinstance(node, fx.Node)
        return str(self.tensors[self.tensor_of[node]].storage)

    def _add_value(self, name: str, value: TorchTensor, *, role: Role = "activation") -> str:
        key = storage_key(value)
        storage = self.storage_of.setdefault(key, name)
        return self._add_tensor(name, value.untyped_storage().nbytes(), storage, role=role)

    def _add_token(self, name: str, *, role: Role = "activation") -> str:
        return self._add_tensor(name, 0, role=role)

    def _add_tensor(self, name: str, size: int, storage: str | None = None, *, role: Role = "activation") -> str:
        self.tensors[name] = Tensor(name, size, storage, role=role)
        return name

    def _with_refs(self, arguments: object) -> object:
        def replace(node: fx.Node) -> Argument:
            if node in self.tensor_of:
                return cast("Argument", Ref(self.tensor_of[node]))
            value = node.meta["val"]
            if isinstance(value, (bool, int, float)):
                return value
            raise CaptureError(f'"{node.name}" is used before it is made, or is no tensor: {value!r}')

        return fx.map_arg(cast("Argument", arguments), replace)


_NATIVE_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_SCALAR_BYTES = 8


_KINDS: dict[type[Instruction], str] = {
    SaveState: "save random state",
    Snapshot: "snapshot",
    Update: "update",
    Return: "return",
    Tangents: "tangents",
    Accumulate: "accumulate",
}


def _kind_of(instruction: Instruction) -> str:
    """Return the kind of an operation, by which exports tell calls from what the step does around them."""
    if isinstance(instruction, Call):
        return "batch norm update" if instruction.batch_norm is not None else ""
    return _KINDS[type(instruction)]


def _label(node: fx.Node, layer: str) -> str:
    return f"{layer}/{node.name}" if layer else node.name


def _is_private(node: fx.Node, old: object, new: fx.Node | None) -> bool:
    """Return whether only `node` reads `old`, and nothing but the end of the step reads `new`."""
    if not isinstance(old, fx.Node) or new is None:
        return False
    return set(old.users) == {node} and all(user.op == "output" for user in new.users)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that random operators on this device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
