"""The graphs into which TorchDynamo compiles code: where they come from, and their shares of a budget."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from scheduler.api import SolveOptions, make_plan
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.planning.shape_planner import ShapePlanner
from scheduler.problem import parse_budget, read_budget
from scheduler.pytorch.capture.device_memory import DeviceMemory
from scheduler.pytorch.measurement.free_memory import device_budget
from scheduler.pytorch.torch_private.dynamo import compilation_number
from scheduler.pytorch.torch_private.tensors import storage_id
from scheduler.simulator import simulate
from scheduler.units import format_bytes, parse_bytes


@dataclass(frozen=True)
class PlannedGraph:
    """The plan of one graph of compiled code.

    Attributes
    ----------
    name : str
        TorchDynamo's number of the frame and of its compilation: "0/1" for a second shape.
    place : str
        Where its code begins.
    shapes : tuple of tuple of int
        Shapes of its tensor inputs, without parameters.
    graph_break : str
        Why and where the graph ends before its function does, "" if it does not.
    plan : Plan
        With `compiler="inductor"`, its peak and overhead are those of operators that run one
        by one, not of Inductor's kernels.
    """

    name: str
    place: str
    shapes: tuple[tuple[int, ...], ...]
    graph_break: str
    plan: Plan

    @property
    def saved_bytes(self) -> int:
        """Bytes in memory between forward and backward: saved tensors and outputs."""
        return simulate(self.plan.graph, self.plan.schedule).saved_bytes

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"graph {self.name} ({self.place}): peak {format_bytes(plan.peak_bytes)} instead of"
            f" {format_bytes(plan.baseline_peak_bytes)}, {format_bytes(self.saved_bytes)} between forward and"
            f" backward, overhead {plan.overhead:.2%}, {plan.status.name}"
        )


class CompiledGraph:
    """A graph as it is compiled, planned and run.

    Attributes
    ----------
    name, place, shapes, graph_break
        As in `PlannedGraph`.
    frame : str
        The same for all compilations of one piece of code.
    piece : int
        Index among the graphs of one compilation: TorchDynamo splits a graph at the buckets
        of DistributedDataParallel.
    resident : dict of int to int
        Bytes of each storage of the inputs.
    graph : Graph
        Set by `BudgetShares.add`.
    added_bytes : int
        What saving everything adds to the inputs; set by `BudgetShares.add`.
    budget : int or str
        The budget of its plan.
    plan : Plan or None
    most_in_flight : int
        Largest number of runs of its frame, this one included, that waited for their backward.
    """

    graph: Graph
    added_bytes: int
    budget: int | str = 0
    plan: Plan | None = None
    most_in_flight = 1

    def __init__(self, module: fx.GraphModule, args: Sequence[object], earlier: Sequence[CompiledGraph]) -> None:
        self.name = compilation_number()
        self.piece = sum(other.name == self.name for other in earlier)
        self.frame = f"{self.name.partition('/')[0]}.{self.piece}"
        self.place = _place_of(module)
        self.graph_break = _break_of(module)
        tensors = [value for value in args if isinstance(value, Tensor)]
        self.shapes = tuple(tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, nn.Parameter))
        self.resident = {storage_id(t.untyped_storage()): t.untyped_storage().nbytes() for t in tensors}

    def report(self) -> PlannedGraph:
        """Return the plan with the origin of the graph."""
        assert self.plan is not None
        return PlannedGraph(self.name, self.place, self.shapes, self.graph_break, self.plan)


class BudgetShares:
    """A budget and the graphs that share it.

    A budget in percent or "min" applies to each graph alone; its bytes are those of the first
    compilation. Of a budget in bytes or "auto", each graph gets its inputs and a part of the
    rest, in proportion to what saving everything would add there. The graphs of one step then
    fit the budget even if all reach their peaks at once.

    Parameters
    ----------
    budget : int or str
        As for `backend`.
    memory : DeviceMemory
    optimizer : torch.optim.Optimizer or None
        The optimizer whose state is in `memory`.
    options : SolveOptions
        As for `backend`.
    """

    def __init__(
        self, budget: int | str, memory: DeviceMemory, optimizer: Optimizer | None, options: SolveOptions
    ) -> None:
        self._budget, self._optimizer, self._options = budget, optimizer, options
        read = read_budget(budget)
        self._is_relative = read.is_relative
        self._bytes = read.bytes if read.form == "bytes" else None
        self._planners: dict[str, ShapePlanner] = {}
        self._reserved_bytes = sum(tensor.size_bytes for tensor in memory.tensors)
        self.graphs: list[CompiledGraph] = []

    def add(self, compiled: CompiledGraph, graph: Graph, inputs: Sequence[object]) -> None:
        """Add a graph to those that share the budget; the first one tells the device."""
        if self._bytes is None and not self._is_relative:
            self._bytes = parse_bytes(device_budget(self._budget, (), inputs, self._optimizer))
        compiled.graph = graph
        compiled.added_bytes = parse_budget("100%", graph) - graph.resident_bytes
        self.graphs.append(compiled)

    def plan(self, compiled: CompiledGraph) -> Plan:
        """Return a plan of one graph within its share."""
        compiled.budget = self.budget(compiled)
        if not self._is_relative:
            return make_plan(compiled.graph, compiled.budget, **self._options)
        if compiled.frame not in self._planners:
            self._planners[compiled.frame] = ShapePlanner(self._budget, self._options)
        return self._planners[compiled.frame].plan(compiled.graph)

    def budget(self, compiled: CompiledGraph) -> int | str:
        """Return the budget of one graph, its inputs included."""
        if self._bytes is None:
            return self._budget
        added: dict[str, int] = {}
        resident: dict[int, int] = {}
        for other in self.graphs:
            added[other.frame] = max(added.get(other.frame, 0), other.most_in_flight * other.added_bytes)
            resident |= other.resident
        if len(added) == 1 and compiled.most_in_flight == 1:
            return self._bytes
        free = max(0, self._bytes - self._reserved_bytes - sum(resident.values()))
        part = compiled.added_bytes * free // max(1, sum(added.values()))
        return compiled.graph.resident_bytes + min(compiled.added_bytes, part)


def needs_gradients(module: fx.GraphModule) -> bool:
    """Return whether an output requires a gradient, so that a backward can follow."""
    (returned,) = module.graph.find_nodes(op="output")
    values = [node.meta.get("example_value") for node in returned.all_input_nodes]
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def remove_returned_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, list[int | None]]:
    """Return a graph without the outputs that are inputs, and for each output the index of that input or None.

    TorchDynamo returns a buffer that was changed in place, to assign it to its attribute.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(module.graph, copies)
    inputs = [node.meta.get("example_value") for node in module.graph.find_nodes(op="placeholder")]
    (returned,) = module.graph.find_nodes(op="output")
    outputs = returned.args[0]
    positions = [
        next((i for i, value in enumerate(inputs) if isinstance(node, fx.Node) and _is_same(node, value)), None)
        for node in outputs
    ]
    kept = [node for node, position in zip(outputs, positions, strict=True) if position is None]
    graph.output(tuple(copies[node] if isinstance(node, fx.Node) else node for node in kept))
    return fx.GraphModule(module, graph), positions


def _is_same(node: fx.Node, other: object) -> bool:
    """Return whether an output without gradient has the same elements of the same storage as an input."""
    value = node.meta.get("example_value")
    return (
        isinstance(value, Tensor)
        and isinstance(other, Tensor)
        and not value.requires_grad
        and storage_id(value.untyped_storage()) == storage_id(other.untyped_storage())
        and (value.dtype, value.shape, value.stride()) == (other.dtype, other.shape, other.stride())
        and value.storage_offset() == other.storage_offset()
    )


def _place_of(module: fx.GraphModule) -> str:
    for node in module.graph.nodes:
        found = re.search(r'File "([^"]*)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
        if found:
            return _place(found[1], int(found[2]), found[3])
    return "unknown place"


def _break_of(module: fx.GraphModule) -> str:
    reason = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    what = reason.reason.strip().splitlines()[0]
    if not reason.user_stack:
        return f"graph break: {what}"
    last = reason.user_stack[-1]
    return f"graph break in {_place(last.filename, last.lineno, last.name)}: {what}"


def _place(path: str, line: int | None, function: str) -> str:
    return f"{os.path.basename(path)}:{line} in {function}"
