"""Run a plan under Inductor: split AOTAutograd's joint graph into a forward and a backward as a schedule says.

Inductor asks a partitioner which values the forward saves and which the backward recomputes.
It compiles both graphs in the layouts that they have, so these decisions are the plan's. The
order within each graph, the fusion of kernels, and so the peak within the backward are
Inductor's.

Random draws run once and are saved. A tensor that the step changes in place is copied before
the change if the backward reads its old value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, fx

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.arguments import Signature
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.descriptors import read_descriptors
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.capture.instructions import Call, Instruction, Ref, Return, Snapshot, Tangents, Update
from scheduler.pytorch.capture.joint import Joint, Source
from scheduler.pytorch.capture.operators import aten, check_call, is_getitem
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.inductor import CustomPartitionerFn, compile_graph, extract_forward_and_backward
from scheduler.pytorch.tracing import capture_joint
from scheduler.schedule import Compute, Schedule

Pair = tuple[fx.GraphModule, fx.GraphModule]


class Partition(Protocol):
    """A function that splits a joint graph into forward and backward."""

    def __call__(self, module: fx.GraphModule, num_fwd_outputs: int) -> Pair:
        """Return the forward, whose first outputs are the joint graph's, and the backward."""


class _Partitioner(CustomPartitionerFn):
    """A partition in the form that Inductor expects.

    Inductor's caches identify it only by the name that `uuid` returns. This is correct because
    the forward and the backward that it returns are part of their keys. AOTAutograd's cache
    does not look at them and must be disabled.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any) -> Pair:
        return self.partition(gm, num_fwd_outputs=options["num_fwd_outputs"])

    def uuid(self) -> str:
        return __name__

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (None,))


def compile_with_inductor(
    module: fx.GraphModule, inputs: Sequence[object], partition: Partition
) -> Callable[..., Sequence[object]]:
    """Compile a graph from TorchDynamo with Inductor.

    Parameters
    ----------
    module : GraphModule
    inputs
        Its arguments.
    partition : callable
        Splits the joint graph.
    """
    return compile_graph(module, inputs, _Partitioner(partition))


def partition_joint(
    module: fx.GraphModule,
    num_fwd_outputs: int,
    *,
    solve: Callable[[Capture], Schedule],
    costs: Costs,
    memory: DeviceMemory,
) -> Pair:
    """Split a joint graph as a schedule says.

    Parameters
    ----------
    module : GraphModule
        From AOTAutograd; is changed.
    num_fwd_outputs : int
        Number of its outputs that belong to the forward.
    solve : callable
        Returns a valid schedule of the captured step.
    costs, memory
        As for `capture`.

    Raises
    ------
    CaptureError
        If the graph cannot be planned; the message says why.
    """
    joint = _read_joint(module, num_fwd_outputs)
    captured = capture_joint(joint, "compiled", costs=costs, memory=memory)
    return _Splitter(captured, solve(captured)).run(num_fwd_outputs)


def _read_joint(module: fx.GraphModule, num_fwd_outputs: int) -> Joint:
    """Return AOTAutograd's joint graph, with its mutations of inputs removed from the graph."""
    mutations = _remove_mutations(module.graph)
    for node in module.graph.nodes:
        if node.op == "call_function" and not is_getitem(node):
            check_call(node)
    described = read_descriptors(module)
    values = [value for value, _ in described.outputs]
    if any(value is not None for value in values[num_fwd_outputs:]):
        raise CaptureError("the graph has an output of its backward that is not a gradient, and cannot be planned")
    placeholders = module.graph.find_nodes(op="placeholder")
    sources = {
        node: Source("input", (node.name,), position=position)
        for position, node in enumerate(placeholders)
        if node in described.inputs
    }
    spec = pytree.tree_structure(())
    return Joint(
        module=module,
        sources={**sources, **described.constants},
        tangents={node: number for number, node in enumerate(described.tangents)},
        outputs=tuple(
            v for v in values[:num_fwd_outputs] if isinstance(v, fx.Node) and isinstance(v.meta["val"], Tensor)
        ),
        output_spec=spec,
        output_leaves=(),
        mutations=tuple(mutations),
        gradients=described.gradients,
        signature=Signature(spec, ()),
        route="dynamo",
        functional=True,
    )


def _remove_mutations(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Remove the calls that change an input in place, and return each input with its new value."""
    mutations = []
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        old, new = node.args[:2]
        if not isinstance(old, fx.Node) or old.op != "placeholder" or not isinstance(new, fx.Node) or node.users:
            continue
        mutations.append((old, new))
        graph.erase_node(node)
    return mutations


class _Splitter:
    """Write a new joint graph in the order of the schedule, and let AOTAutograd split it in two."""

    def __init__(self, captured: Capture, schedule: Schedule) -> None:
        self.captured = captured
        self.joint = captured.joint
        self.operations = captured.graph.operations
        self.schedule = schedule
        self.graph = fx.Graph()
        self.inputs = {
            node: self.graph.node_copy(node)
            for node in self.joint.module.graph.nodes
            if node.op in ("placeholder", "get_attr")
        }
        """The copy of each input node."""
        self.node_of = {name: self.inputs[node] for name, node in captured.lowered.resident.items()}
        """The node that holds each tensor."""
        self.result_of: dict[str, str] = {}
        """The tensor that the caller holds of each returned tensor."""
        self.live = set(captured.graph.resident)
        self.updates: list[tuple[fx.Node, fx.Node]] = []
        """Inputs to change at the end of the forward, with their new values."""
        self.storages_read_late = self._find_storages_read_late()

    def run(self, num_fwd_outputs: int) -> Pair:
        early: set[fx.Node] = set()
        for action in self.schedule:
            if not isinstance(action, Compute):
                self.live.discard(action.tensor)
                continue
            i = self.captured.graph.index.operation_ids[action.operation]
            if self.operations[i].phase == "backward" and not early:
                self._write_updates()
                early.update(self.graph.nodes)
            self._write(self.captured.instructions[i])
            self.live.update(self.operations[i].outputs)
        self._write_output()
        saved = self._find_saved(early, num_fwd_outputs)
        joint = fx.GraphModule(self.joint.module, self.graph)
        return extract_forward_and_backward(joint, saved, num_fwd_outputs)

    def _find_storages_read_late(self) -> set[str | None]:
        """Return the storages that the backward and its recomputations read."""
        index = self.captured.graph.index
        runs = [self.operations[index.operation_ids[a.operation]] for a in self.schedule if isinstance(a, Compute)]
        first = next(k for k, operation in enumerate(runs) if operation.phase == "backward")
        read = {tensor for operation in runs[first:] for tensor in operation.inputs}
        return {self.captured.graph.tensor(tensor).storage for tensor in read}

    def _write(self, instruction: Instruction) -> None:
        if isinstance(instruction, Call):
            self._write_call(instruction)
        elif isinstance(instruction, Snapshot):
            self._write_snapshot(instruction)
        elif isinstance(instruction, Update):
            self.updates.append((self.node_of[instruction.target], self.node_of[instruction.value]))
        elif isinstance(instruction, Return):
            self.result_of.update(zip(instruction.values, instruction.results, strict=True))
            self.node_of.update({result: self.node_of[value] for value, result in self.result_of.items()})
        elif isinstance(instruction, Tangents):
            self.node_of.update(
                {name: self.inputs[node] for name, node in zip(instruction.tensors, self.joint.tangents, strict=True)}
            )

    def _write_call(self, call: Call) -> None:
        args, kwargs = pytree.tree_map_only(Ref, lambda ref: self.node_of[ref.tensor], (call.args, call.kwargs))
        node = self.graph.call_function(call.target, tuple(args), kwargs)
        node.meta = dict(call.node.meta)
        for position, tensor in enumerate(call.outputs):
            if tensor is None or tensor in self.live:
                continue
            self.node_of[tensor] = node
            if call.has_several:
                self.node_of[tensor] = self.graph.call_function(operator.getitem, (node, position))
                self.node_of[tensor].meta = {"val": call.node.meta["val"][position]}

    def _write_snapshot(self, snapshot: Snapshot) -> None:
        source = self.node_of[snapshot.source]
        if self.captured.graph.tensor(snapshot.tensor).storage in self.storages_read_late:
            source = self.graph.call_function(aten.clone.default, (source,))
            source.meta = {"val": self.node_of[snapshot.source].meta["val"].clone()}
        self.node_of[snapshot.tensor] = source

    def _write_updates(self) -> None:
        """Change inputs, at the end of the forward: after every call that reads their old values."""
        for old, new in self.updates:
            copy = self.graph.call_function(aten.copy_.default, (old, new))
            copy.meta = {"val": old.meta["val"], "partitioner_tag": "must_be_in_forward"}

    def _write_output(self) -> None:
        lowered = self.captured.lowered
        replaced = dict(self.inputs)
        for node, tensor in zip(self.joint.outputs, lowered.output_tensors, strict=True):
            replaced[node] = self.node_of[self.result_of.get(tensor, tensor)]
        for (_, node), tensor in zip(self.joint.gradients, lowered.gradient_tensors, strict=True):
            replaced[node] = self.node_of[tensor]
        (returned,) = self.joint.module.graph.find_nodes(op="output")
        output = self.graph.output(fx.map_arg(returned.args[0], replaced.__getitem__))
        output.meta = dict(returned.meta)

    def _find_saved(self, early: set[fx.Node], num_fwd_outputs: int) -> list[fx.Node]:
        """Return the nodes of the forward that the backward reads."""
        (returned,) = self.graph.find_nodes(op="output")
        late = [node for node in self.graph.nodes if node not in early and node is not returned]
        read = [argument for node in late for argument in node.all_input_nodes]
        read += [value for value in returned.args[0][num_fwd_outputs:] if isinstance(value, fx.Node)]
        given = {self.inputs[node] for node in self.joint.tangents}
        return [node for node in dict.fromkeys(read) if node in early and node not in given and node.op != "get_attr"]
