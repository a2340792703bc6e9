"""A backend for `torch.compile` that plans each graph within a memory budget.

TorchDynamo captures the code, guards it and compiles again for other shapes; each graph that
needs gradients gets a plan of its own. With `compiler="eager"` the plan runs as generated
code, and its peak is the plan's. With "inductor" what is saved and what is computed again is
the plan's; kernels, their order and so the peak within the backward are Inductor's.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Unpack, get_args

import torch
from torch import Tensor, fx
from torch.optim import Optimizer

from scheduler.api import SolveOptions, make_plan
from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.device_memory import DeviceMemory, read_device_memory
from scheduler.pytorch.capture.rewriting import overlap
from scheduler.pytorch.compile.graphs import (
    CompiledGraph,
    PlannedGraph,
    Shares,
    is_relative,
    needs_gradients,
    take_out_returned_inputs,
)
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.tracing import capture_graph
from scheduler.schedule import Schedule

Compiler = Literal["eager", "inductor"]
GraphBreaks = Literal["error", "share"]
Code = Callable[..., Sequence[object]]


def backend(
    budget: int | str,
    *,
    compiler: Compiler = "eager",
    graph_breaks: GraphBreaks = "error",
    costs: Costs = "flops",
    reserve: int | str = 0,
    optimizer: Optimizer | None = None,
    **options: Unpack[SolveOptions],
) -> Backend:
    """Return a backend for `torch.compile` that keeps a training step within a memory budget.

    A plan is made when a graph is compiled: at the first call, and at the first call with
    other shapes (TorchDynamo stops after `torch._dynamo.config.recompile_limit` of them).
    Graphs that need no gradients run without a plan.

    Parameters
    ----------
    budget : int or str
        Of the peak of the step, resident tensors included: bytes, "8GiB", or "60%" of what
        saving everything adds.
    compiler : "eager" or "inductor"
        What runs the plan: generated code that calls operators one by one, with the peak
        that the plan says; or Inductor's kernels, with the saved tensors and recomputations
        that the plan says. There the memory kept between forward and backward can be
        predicted (`PlannedGraph.saved_bytes`); the peak depends on what Inductor fuses.
    graph_breaks : "error" or "share"
        What to do where a step runs several planned graphs, or one several times, before
        its backward: raise, saying where the break is; or share the budget between them in
        proportion to what each adds. A graph becomes known when it first runs, so the first
        step may exceed a shared budget. Inductor cannot plan a graph again: there only a
        budget in percent, which every graph keeps for itself, can be shared.
    costs : "flops" or "measured"
        As for `trace`.
    reserve, optimizer
        As for `trace`.
    **options
        For `make_plan`: `solver`, `time_limit`, `order`, `seed`.

    Returns
    -------
    Backend
        Callable; its `plans` says what was planned.

    Raises
    ------
    InvalidOptionError
        If `compiler` or `graph_breaks` is unknown, or a budget in bytes is to be shared
        with `compiler="inductor"`.
    InvalidBudgetError
        If `budget` or `reserve` cannot be understood.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> planned = backend("100%")
    >>> loss = torch.compile(model, backend=planned)(torch.ones(2, 4)).sum()
    >>> loss.backward()
    >>> [graph.plan.overhead for graph in planned.plans]
    [0.0]
    """
    if compiler not in get_args(Compiler):
        raise InvalidOptionError(f'compiler is "eager" or "inductor", not {compiler!r}')
    if graph_breaks not in get_args(GraphBreaks):
        raise InvalidOptionError(f'graph_breaks is "error" or "share", not {graph_breaks!r}')
    if compiler == "inductor" and graph_breaks == "share" and not is_relative(budget):
        raise InvalidOptionError(
            "graphs that Inductor has compiled cannot be planned again for a smaller share of bytes:"
            ' give the budget in percent, or take compiler="eager"'
        )
    memory = read_device_memory((), reserve, optimizer)
    return Backend(compiler, graph_breaks, costs, memory, Shares(budget, memory), options)


class Backend:
    """A backend for `torch.compile`; made by `backend`."""

    __name__ = "scheduler"

    def __init__(
        self,
        compiler: Compiler,
        graph_breaks: GraphBreaks,
        costs: Costs,
        memory: DeviceMemory,
        shares: Shares,
        options: SolveOptions,
    ) -> None:
        self._compiler = compiler
        self._graph_breaks = graph_breaks
        self._costs = costs
        self._memory = memory
        self._shares = shares
        self._options = options
        self._in_flight: weakref.WeakSet[_Flight] = weakref.WeakSet()

    @property
    def plans(self) -> tuple[PlannedGraph, ...]:
        """What was planned so far, in the order of compilation."""
        return tuple(graph.report() for graph in self._shares.graphs if graph.plan is not None)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[object]) -> Code:
        """Compile a graph; called by TorchDynamo.

        Raises
        ------
        CaptureError
            If the graph cannot be planned.
        """
        # A size that TorchDynamo holds symbolic becomes a number here, and so part of its guards.
        args = [int(value) if isinstance(value, torch.SymInt) else value for value in inputs]
        if not needs_gradients(module):
            return self._without_plan(module, inputs)
        graph = CompiledGraph(module, args, self._shares.graphs)
        if self._compiler == "eager":
            return self._eager(graph, module, args)
        return self._inductor(graph, module, inputs)

    def _without_plan(self, module: fx.GraphModule, inputs: Sequence[object]) -> Code:
        if self._compiler == "eager":
            return module.forward
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(module, inputs)  # type: ignore[arg-type, return-value]

    def _eager(self, graph: CompiledGraph, module: fx.GraphModule, args: Sequence[object]) -> Code:
        module, returned = take_out_returned_inputs(module)
        captured = capture_graph(module, args, costs=self._costs, memory=self._memory)
        self._shares.add(graph, captured.graph)
        changed = {captured.joint.sources[old].position for old, _ in captured.joint.mutations}
        planned: Code | None = None

        def run(*args: object) -> Sequence[object]:
            nonlocal planned
            self._begin(graph)
            _refuse_overlaps(args, changed)
            if planned is None or self._shares.budget(graph) != graph.budget:
                plan = self._plan(graph)
                planned = build(module, captured, plan.schedule, args)
            made = iter(self._hold(graph, planned(*args)))
            return [next(made) if position is None else args[position] for position in returned]

        return run

    def _inductor(self, graph: CompiledGraph, module: fx.GraphModule, inputs: Sequence[object]) -> Code:
        from scheduler.pytorch.compile.partitioning import (  # importing Inductor is slow
            compile_with_inductor,
            partition_joint,
        )

        def solve(captured: Capture) -> Schedule:
            self._shares.add(graph, captured.graph)
            return self._plan(graph).schedule

        partition = functools.partial(partition_joint, solve=solve, costs=self._costs, memory=self._memory)
        planned = compile_with_inductor(module, inputs, partition)

        def run(*args: object) -> Sequence[object]:
            self._begin(graph)
            return self._hold(graph, planned(*args))

        return run

    def _plan(self, graph: CompiledGraph) -> Plan:
        graph.budget = self._shares.budget(graph)
        graph.plan = make_plan(graph.graph, graph.budget, **self._options)
        return graph.plan

    def _begin(self, graph: CompiledGraph) -> None:
        """Refuse a graph that begins while another is in flight, or count how many runs of it are.

        Not done when a graph is compiled: TorchDynamo would wrap the error in its own.
        """
        if self._graph_breaks == "error":
            self._refuse_second(graph)
        together = 1 + sum(flight.graph.frame == graph.frame for flight in self._in_flight)
        graph.most_in_flight = max(graph.most_in_flight, together)

    def _refuse_second(self, graph: CompiledGraph) -> None:
        for flight in self._in_flight:
            first = flight.graph
            why = first.graph_break or "the compiled code runs more than once before its backward"
            if first.name == graph.name and first.piece != graph.piece:
                why = (
                    "TorchDynamo cut one graph at the buckets of DistributedDataParallel, unless"
                    " torch._dynamo.config.optimize_ddp is False"
                )
            raise ExecutionError(
                f"the budget is for one planned graph, and graph {graph.name} ({graph.place}) begins while what"
                f" graph {first.name} ({first.place}) keeps for its backward is held: {why}. Compile the whole step"
                ' without breaks (fullgraph=True shows them), or pass graph_breaks="share"'
            )

    def _hold(self, graph: CompiledGraph, outputs: Sequence[object]) -> Sequence[object]:
        """Count a run as in flight until its backward has run, or its outputs are dropped."""
        nodes = (output.grad_fn for output in outputs if isinstance(output, Tensor))
        node = next((node for node in nodes if node is not None), None)
        if node is not None:
            flight = _Flight(graph)
            self._in_flight.add(flight)
            node.register_hook(lambda *_: self._in_flight.discard(flight))
        return outputs


def _refuse_overlaps(args: Sequence[object], changed: set[int]) -> None:
    """Refuse inputs that lie on one another if a step changes one of them; TorchDynamo does not guard against it."""
    if not changed:
        return
    tensors = [value for value in args if isinstance(value, Tensor)]
    on_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        on_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for i in changed:
        for other in on_storage[tensors[i].untyped_storage()._cdata]:
            if other is not tensors[i] and overlap(other, tensors[i]):
                raise ExecutionError(
                    "an input that the compiled code changes in place lies on the memory of another input, which the"
                    " plan takes for unchanged: pass a clone()"
                )


@dataclass(eq=False)
class _Flight:
    """A run whose backward is still to come; held by its autograd node."""

    graph: CompiledGraph
