"""Emit the operations of a step: one method per kind of instruction."""

from __future__ import annotations

from typing import cast

from torch import Tensor as TorchTensor
from torch import fx

from scheduler.graph import Phase, Role
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.capture.instructions import (
    Accumulate,
    Call,
    Lowered,
    Return,
    SaveState,
    Snapshot,
    Tangents,
    Update,
)
from scheduler.pytorch.capture.joint import Joint
from scheduler.pytorch.capture.locations import location
from scheduler.pytorch.capture.lowering.analysis import Analysis, Mutation, Variant
from scheduler.pytorch.capture.lowering.graph_builder import GraphBuilder
from scheduler.pytorch.capture.lowering.storages import StorageSizes
from scheduler.pytorch.capture.operators import (
    UPDATES,
    given_generator,
    is_collective,
    is_getitem,
    is_random,
    nodes_in,
    output_values,
    returns_nothing,
)
from scheduler.pytorch.measurement.rng import default_generator
from scheduler.pytorch.torch_private.operators import OpOverload

_SCALAR_BYTES = 8
"""Incoming gradients of at most this size are results: freeing them gains nothing."""


class Emitter:
    """Emits the operations of a step, in the order in which its methods are called.

    Parameters
    ----------
    joint : Joint
    analysis : Analysis
        Of this joint graph.
    sizes : StorageSizes
    """

    def __init__(self, joint: Joint, analysis: Analysis, sizes: StorageSizes) -> None:
        self._joint = joint
        self._analysis = analysis
        self._builder = GraphBuilder(sizes)
        self._resident: dict[str, fx.Node] = {}
        """Placeholder of each tensor that the step reads from outside."""
        self._beside: list[str] = []
        """Further resident tensors, which the step does not read."""
        self._existing_gradients: dict[int, str] = {}
        """Existing gradient that each new one is added to."""
        self._snapshot_tokens: dict[fx.Node, str] = {}
        self._outputs: tuple[str, ...] = ()
        self._returned: tuple[str, ...] = ()
        self._tangents: list[str] = []
        self._random_calls = 0
        self._accumulations = 0
        self._random_token: str | None = None
        self._collective_token: str | None = None
        self._backward_token = ""
        self._gradients = {node for _, node in joint.gradients}

    def resident_tensors(self, memory: DeviceMemory) -> None:
        """Add the resident tensors: of the step, of the device besides it, and existing gradients."""
        for node, source in self._joint.sources.items():
            value = node.meta["val"]
            if not isinstance(value, TorchTensor):
                continue
            name = f"{source.kind}:{source.names[0]}"
            if node in self._analysis.changed:  # its snapshot takes the storage of the fake tensor
                self._builder.add_tensor(name, value.untyped_storage().nbytes(), role=source.kind)
            else:
                self._builder.add_value(name, value, role=source.kind)
            self._builder.tensor_of[node] = name
            self._resident[name] = node
        for tensor in memory.tensors:
            self._beside.append(self._builder.add_tensor(tensor.name, tensor.size_bytes, role=tensor.role))
        for i, size_bytes in self._analysis.existing_gradients.items():
            trained = self._joint.sources[self._joint.gradients[i][0]].names[0]
            self._existing_gradients[i] = self._builder.add_tensor(f"gradient:{trained}", size_bytes, role="gradient")

    def snapshot(self, old: fx.Node) -> None:
        """Save the old value of a placeholder that the step changes."""
        source = self._builder.tensor_of[old]
        name = f"snapshot:{self._joint.sources[old].names[0]}"
        tensor = self._builder.add_value(name, old.meta["val"])
        token = self._builder.add_token(f"{name}:token")
        self._builder.add_operation(name, Snapshot(source, tensor), [source], [tensor, token], kind="snapshot")
        self._builder.tensor_of[old] = tensor
        self._snapshot_tokens[old] = token

    def update(self, mutation: Mutation) -> None:
        """Write the new value of a tensor, after a snapshot of the old value if the backward needs one."""
        if mutation.needs_snapshot:
            self.snapshot(mutation.old)
        source = self._joint.sources[mutation.old]
        value = self._builder.tensor_of[mutation.new]
        instruction = Update(f"{source.kind}:{source.names[0]}", value)
        inputs = [value]
        if mutation.old in self._snapshot_tokens:
            inputs.append(self._snapshot_tokens[mutation.old])
        self._builder.add_operation(f"update:{source.names[0]}", instruction, inputs, [], kind="update")

    def counter(self, node: fx.Node) -> None:
        """Change a counter in place."""
        args = cast("tuple[object, ...]", self._builder.with_refs(node.args))
        update = UPDATES[cast(OpOverload, node.target)]
        call = Call(node, update, args, {}, (), has_several=False)
        name, layer = self._name_and_layer(node)
        counter = self._builder.tensor_of[self._analysis.counters[node]]
        self._builder.add_operation(name, call, [counter], [], layer=layer)

    def call(self, node: fx.Node, phase: Phase) -> None:
        """Run an operator, after saving the generator's state if it is random."""
        variant = self._analysis.variants[node]
        name, layer = self._name_and_layer(node)
        random, collective = is_random(node), is_collective(node)
        state = self._random_state(node, phase) if random and not self._joint.functional else None
        inputs = self._inputs(node, state, phase)
        outputs = self._call_outputs(node, name, variant)
        call = Call(
            node=node,
            target=variant.target,
            args=cast("tuple[object, ...]", self._builder.with_refs(variant.args)),
            kwargs=cast("dict[str, object]", self._builder.with_refs(variant.kwargs)),
            outputs=tuple(outputs),
            has_several=_has_several(node),
            state=None if state is None else state.tensor,
            generator=None if state is None else state.generator,
            batch_norm=variant.batch_norm,
        )
        produced = [tensor for tensor in outputs if tensor is not None]
        if state is not None:
            self._random_token = self._builder.add_token(f"rng token {self._random_calls}", role="random state")
            produced.append(self._random_token)
        if collective and not self._joint.functional:
            inputs += [] if self._collective_token is None else [self._collective_token]
            self._collective_token = self._builder.add_token(f"{name}:done")
            produced.append(self._collective_token)
        can_replay = not random or (phase == "forward" and state is not None)
        self._builder.add_operation(
            name,
            call,
            inputs,
            produced,
            phase=phase,
            repeatable=variant.repeatable and can_replay and not collective and not returns_nothing(node),
            required=state is not None or variant.batch_norm is not None,
            layer=layer,
            kind="" if variant.batch_norm is None else "batch norm update",
        )

    def _random_state(self, node: fx.Node, phase: Phase) -> SaveState:
        """Save the state of the generator that a random call draws from."""
        generator = given_generator(node)
        if generator is None:
            device = next(value.device for value in output_values(node) if isinstance(value, TorchTensor))
            generator = default_generator(device)
        self._random_calls += 1
        size_bytes = generator.get_state().untyped_storage().nbytes()
        state = self._builder.add_tensor(f"state {self._random_calls}", size_bytes, role="random state")
        inputs = [] if self._random_token is None else [self._random_token]
        instruction = SaveState(state, generator)
        self._builder.add_operation(
            f"rng state {self._random_calls}", instruction, inputs, [state], phase=phase, kind="save random state"
        )
        return instruction

    def _inputs(self, node: fx.Node, state: SaveState | None, phase: Phase) -> list[str]:
        tensor_of = self._builder.tensor_of
        arguments = nodes_in((node.args, node.kwargs))
        inputs = dict.fromkeys(tensor_of[argument] for argument in arguments if argument in tensor_of)
        if state is not None:
            inputs[state.tensor] = None
        return [*inputs] if phase == "forward" else self._after_backward_begins([*inputs])

    def _call_outputs(self, node: fx.Node, name: str, variant: Variant) -> list[str | None]:
        """Add a tensor for each output of a call that is a tensor."""
        if variant.overwritten is not None:
            self._builder.put_on_storage_of(variant.overwritten, node.meta["val"])
        values = output_values(node)
        if variant.batch_norm is not None:
            values = values[: variant.batch_norm.updated[0]]  # the statistics are updated in place
        several = _has_several(node)
        getitems = {user.args[1]: user for user in node.users if is_getitem(user)}
        outputs: list[str | None] = []
        for i, value in enumerate(values):
            if not isinstance(value, TorchTensor):
                outputs.append(None)
                continue
            holder = getitems.get(i) if several else node
            role: Role = "gradient" if holder in self._gradients else "activation"
            tensor = self._builder.add_value(f"{name}.{i}" if several else name, value, role=role)
            outputs.append(tensor)
            if holder is not None:
                self._builder.tensor_of[holder] = tensor
        return outputs

    def return_outputs(self) -> None:
        """Hand the outputs to the caller."""
        self._outputs = tuple(self._builder.tensor_of[node] for node in self._joint.outputs)
        own = tuple(dict.fromkeys(tensor for tensor in self._outputs if tensor not in self._resident))
        self._returned = tuple(f"{tensor}:returned" for tensor in own)
        for tensor, result in zip(own, self._returned, strict=True):
            returned = self._builder.tensor(tensor)
            self._builder.add_tensor(result, returned.size_bytes, returned.storage, role="output")
        self._builder.add_operation("return", Return(own, self._returned), own, self._returned, kind="return")

    def tangents(self) -> None:
        """Receive the incoming gradients, which begins the backward."""
        strides, outputs = [], []
        for node, output in self._joint.tangents.items():
            value = node.meta["val"]
            tensor = self._builder.add_value(f"tangent {output}", value, role="gradient")
            self._builder.tensor_of[node] = tensor
            self._tangents.append(tensor)
            outputs.append(output)
            strides.append(tuple(value.stride()))
        self._backward_token = self._builder.add_token("backward token")
        instruction = Tangents(tuple(outputs), tuple(self._tangents), tuple(strides))
        produced = [*self._tangents, self._backward_token]
        self._builder.add_operation("tangents", instruction, [], produced, phase="backward", kind="tangents")

    def accumulate(self, group: tuple[int, ...]) -> None:
        """Add a group of gradients to existing ones."""
        inputs = [self._builder.tensor_of[self._joint.gradients[i][1]] for i in group]
        inputs += [self._existing_gradients[i] for i in group]
        inputs = self._after_backward_begins(inputs)
        self._accumulations += 1
        name = f"accumulate {self._accumulations}"
        self._builder.add_operation(name, Accumulate(group), inputs, [], phase="backward", kind="accumulate")

    def lowered(self, name: str) -> Lowered:
        """Return the graph of the operations emitted so far, with their instructions."""
        gradients = tuple(self._builder.tensor_of[node] for _, node in self._joint.gradients)
        new = [tensor for i, tensor in enumerate(gradients) if i not in self._existing_gradients]
        small = [tensor for tensor in self._tangents if self._builder.tensor(tensor).size_bytes <= _SCALAR_BYTES]
        graph = self._builder.build(
            name,
            resident=(*self._resident, *self._beside, *self._existing_gradients.values()),
            results=dict.fromkeys([*self._returned, *new, *small]),
        )
        return Lowered(graph, tuple(self._builder.instructions), self._resident, self._outputs, gradients)

    def _after_backward_begins(self, inputs: list[str]) -> list[str]:
        """Add the token of the backward's begin unless the backward produces one of the inputs."""
        return inputs if self._builder.depends_on_backward(inputs) else [*inputs, self._backward_token]

    def _name_and_layer(self, node: fx.Node) -> tuple[str, str]:
        layer = location(node, self._joint.sources)
        return (f"{layer}/{node.name}" if layer else node.name), layer


def _has_several(node: fx.Node) -> bool:
    return not returns_nothing(node) and isinstance(node.meta["val"], (tuple, list))
