"""A backend for `torch.compile` that plans each graph within a memory budget.

TorchDynamo captures the code, guards it and recompiles it for other shapes; each graph that
needs gradients gets its own plan. With `compiler="eager"` the plan runs as generated code,
and the peak is the plan's. With "inductor" the plan decides what is saved and what is
recomputed; Inductor decides the kernels and their order, and so the peak of the backward.
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

from scheduler.api import TRAINING_GAP, SolveOptions
from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.problem import read_budget
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.device_memory import DeviceMemory, read_device_memory
from scheduler.pytorch.capture.rewriting import overlap
from scheduler.pytorch.compile.graphs import (
    BudgetShares,
    CompiledGraph,
    PlannedGraph,
    needs_gradients,
    remove_returned_inputs,
)
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.torch_private.tensors import storage_id
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

    It plans when a graph is compiled: at the first call, and at the first call with other
    shapes (TorchDynamo stops after `torch._dynamo.config.recompile_limit` of them). Graphs
    that need no gradients run without a plan.

    Parameters
    ----------
    budget : int or str
        Peak of the step, resident tensors included: bytes, "8GiB", "60%", "min" or "min+10%" as
        for `solve`, or "auto": the memory of the device that is free when the first graph is
        compiled, and what that graph already holds there. Compilations for other shapes keep
        the bytes of the first; if no schedule fits, "min" is raised.
    compiler : "eager" or "inductor"
        What runs the plan: generated code that calls operators one by one, with the peak
        of the plan; or Inductor's kernels, with the saved tensors and recomputations of the
        plan. Under Inductor the memory between forward and backward is predicted
        (`PlannedGraph.saved_bytes`), but the peak depends on what Inductor fuses.
    graph_breaks : "error" or "share"
        What to do if a step runs several planned graphs, or one of them several times,
        before its backward: raise an error that names the break, or share the budget between
        them in proportion to what each adds. A graph becomes known when it first runs, so the
        first step may exceed a shared budget. A graph compiled by Inductor cannot be planned
        again, so there only a budget in percent or "min", which applies to each graph alone, can be
        shared.
    costs, reserve, optimizer
        As for `trace`; `costs` is "flops" by default here.
    **options
        For `make_plan`: `solver`, `time_limit`, `gap` (0.005 by default here), `reorder`, `seed`.

    Returns
    -------
    Backend
        Callable; its attribute `plans` lists what was planned.

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
    _check_options(budget, compiler, graph_breaks)
    memory = read_device_memory((), reserve, optimizer)
    shares = BudgetShares(budget, memory, optimizer, {"gap": TRAINING_GAP, **options})
    return Backend(compiler, graph_breaks, costs, memory, shares)


def _check_options(budget: int | str, compiler: str, graph_breaks: str) -> None:
    if compiler not in get_args(Compiler):
        raise InvalidOptionError(f'compiler must be "eager" or "inductor", got {compiler!r}')
    if graph_breaks not in get_args(GraphBreaks):
        raise InvalidOptionError(f'graph_breaks must be "error" or "share", got {graph_breaks!r}')
    if compiler == "inductor" and graph_breaks == "share" and not read_budget(budget).is_relative:
        raise InvalidOptionError(
            "a budget in bytes cannot be shared between graphs compiled by Inductor, which cannot be planned again for"
            ' a smaller share: give the budget in percent or as "min", or pass compiler="eager"'
        )


class Backend:
    """A backend for `torch.compile`; returned by `backend`."""

    __name__ = "scheduler"

    def __init__(
        self,
        compiler: Compiler,
        graph_breaks: GraphBreaks,
        costs: Costs,
        memory: DeviceMemory,
        shares: BudgetShares,
    ) -> None:
        self._compiler = compiler
        self._graph_breaks = graph_breaks
        self._costs = costs
        self._memory = memory
        self._shares = shares
        self._in_flight: weakref.WeakSet[_Flight] = weakref.WeakSet()

    @property
    def plans(self) -> tuple[PlannedGraph, ...]:
        """The plans so far, in the order of compilation."""
        return tuple(graph.report() for graph in self._shares.graphs if graph.plan is not None)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[object]) -> Code:
        """Compile a graph; called by TorchDynamo.

        Raises
        ------
        CaptureError
            If the graph cannot be planned.
        """
        # int() turns a symbolic size into a number, and so adds it to TorchDynamo's guards.
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
        from scheduler.pytorch.torch_private.inductor import compile_graph  # importing Inductor is slow

        return compile_graph(module, inputs)

    def _eager(self, graph: CompiledGraph, module: fx.GraphModule, args: Sequence[object]) -> Code:
        module, returned = remove_returned_inputs(module)
        captured = capture_graph(module, args, costs=self._costs, memory=self._memory)
        self._shares.add(graph, captured.graph, args)
        changed = {captured.joint.sources[old].position for old, _ in captured.joint.mutations}
        planned: Code | None = None

        def run(*args: object) -> Sequence[object]:
            nonlocal planned
            self._begin(graph)
            _check_overlaps(args, changed)
            if planned is None or self._shares.budget(graph) != graph.budget:
                plan = self._plan(graph)
                planned = build(module, captured, plan.schedule, args)
            computed = iter(self._track(graph, planned(*args)))
            return [next(computed) if position is None else args[position] for position in returned]

        return run

    def _inductor(self, graph: CompiledGraph, module: fx.GraphModule, inputs: Sequence[object]) -> Code:
        from scheduler.pytorch.compile.partitioning import (  # importing Inductor is slow
            compile_with_inductor,
            partition_joint,
        )

        def solve(captured: Capture) -> Schedule:
            self._shares.add(graph, captured.graph, inputs)
            return self._plan(graph).schedule

        partition = functools.partial(partition_joint, solve=solve, costs=self._costs, memory=self._memory)
        planned = compile_with_inductor(module, inputs, partition)

        def run(*args: object) -> Sequence[object]:
            self._begin(graph)
            return self._track(graph, planned(*args))

        return run

    def _plan(self, graph: CompiledGraph) -> Plan:
        graph.plan = self._shares.plan(graph)
        return graph.plan

    def _begin(self, graph: CompiledGraph) -> None:
        """Count the runs of a graph that are in flight, or raise an error if there are others.

        This happens at run time: TorchDynamo wraps an error that is raised during compilation.
        """
        if self._graph_breaks == "error":
            self._check_first(graph)
        together = 1 + sum(flight.graph.frame == graph.frame for flight in self._in_flight)
        graph.most_in_flight = max(graph.most_in_flight, together)

    def _check_first(self, graph: CompiledGraph) -> None:
        for flight in self._in_flight:
            first = flight.graph
            reason = first.graph_break or "the compiled code runs more than once before its backward"
            if first.name == graph.name and first.piece != graph.piece:
                reason = (
                    "TorchDynamo splits a graph at the buckets of DistributedDataParallel, unless"
                    " torch._dynamo.config.optimize_ddp is False"
                )
            raise ExecutionError(
                f"the budget is for one planned graph, but graph {graph.name} ({graph.place}) starts before the"
                f" backward of graph {first.name} ({first.place}) has run: {reason}. Compile the whole step without"
                ' breaks (fullgraph=True shows them), or pass graph_breaks="share"'
            )

    def _track(self, graph: CompiledGraph, outputs: Sequence[object]) -> Sequence[object]:
        """Count a run as in flight until its backward has run or its outputs are deleted."""
        nodes = (output.grad_fn for output in outputs if isinstance(output, Tensor))
        node = next((node for node in nodes if node is not None), None)
        if node is not None:
            flight = _Flight(graph)
            self._in_flight.add(flight)
            node.register_hook(lambda *_: self._in_flight.discard(flight))
        return outputs


def _check_overlaps(args: Sequence[object], changed: set[int]) -> None:
    """Raise an error if an input that the step changes shares memory with another one.

    TorchDynamo does not guard against it.
    """
    if not changed:
        return
    tensors = [value for value in args if isinstance(value, Tensor)]
    on_storage: dict[int, list[Tensor]] = {}
    for tensor in tensors:
        on_storage.setdefault(storage_id(tensor.untyped_storage()), []).append(tensor)
    for i in changed:
        for other in on_storage[storage_id(tensors[i].untyped_storage())]:
            if other is not tensors[i] and overlap(other, tensors[i]):
                raise ExecutionError(
                    "an input that the compiled code changes in place overlaps another input in memory, which the plan"
                    " assumes to be unchanged: pass a clone()"
                )


@dataclass(eq=False)
class _Flight:
    """A run whose backward has not run yet; kept alive by its autograd node."""

    graph: CompiledGraph
