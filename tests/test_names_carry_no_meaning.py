"""A graph whose operations and tensors are all renamed plans, reports, exports and pipelines the same."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import scheduler as sc
from scheduler.export.chrome_trace import plan_to_chrome_trace
from scheduler.graph.layers import Mode
from scheduler.plan import Plan
from scheduler.timeline import Timeline
from tests.support.fake_clock import FakeClock
from tests.support.plans import layered_plan
from tests.support.renaming import renamed, renamed_plan, renamed_schedule, with_old_names

GRAPHS = {
    "chain": lambda: chain().graph,
    "transformer": lambda: sc.zoo.transformer(2, width=16, heads=2, length=8, vocabulary=32),
    "two layers": lambda: layered_plan().graph,
}
SOLVERS = ("save-all", "recompute-all", "segments", "greedy-segments", "greedy", "ilp")
CASES = [*product(GRAPHS, SOLVERS), ("transformer", "hierarchical")]


def chain() -> sc.Chain:
    mode = Mode(1.5, 2.5, 6)
    layers = [
        sc.Layer(f"h.{i}", 1.0, 2.0, 10, 40, parameter_bytes=8, parameter_gradient_bytes=8, modes=(mode,))
        for i in range(4)
    ]
    reserve = sc.Tensor("reserve", 64, role="reserve")
    return sc.Chain(layers, input_bytes=10, input_needs_gradient=True, resident=[reserve], name="chain")


def every_operation_in_a_layer(graph: sc.Graph) -> sc.Graph:
    """Operations without a layer are shown under their names, which do change."""
    return replace(
        graph, operations=[replace(operation, layer=operation.layer or "none") for operation in graph.operations]
    )


def plan_of(name: str) -> Plan:
    graph = every_operation_in_a_layer(GRAPHS[name]())
    with warnings.catch_warnings(action="ignore", category=sc.SlowPlanWarning):
        return sc.make_plan(graph, 2**40, solver="recompute-all")


@pytest.mark.parametrize(("name", "solver"), CASES)
def test_it_plans_the_same(name: str, solver: str) -> None:
    graph = GRAPHS[name]()
    budget = "100%" if solver in SOLVERS[:4] else "60%"
    solutions = []
    for g in (graph, renamed(graph)):
        with FakeClock(seconds_per_look=0.05):
            solutions.append(sc.solve(g, budget, solver=solver, time_limit=5.0))
    one, other = solutions
    assert (one.status, one.time, one.peak_bytes, one.bound, one.search_space) == (
        other.status,
        other.time,
        other.peak_bytes,
        other.bound,
        other.search_space,
    )
    if one.schedule is not None:
        assert other.schedule == renamed_schedule(graph, one.schedule)
    assert graph.structure_digest == renamed(graph).structure_digest
    assert graph.digest != renamed(graph).digest


@pytest.mark.parametrize("name", ["chain", "transformer"])
def test_it_pipelines_the_same(name: str) -> None:
    graph = GRAPHS[name]()
    (one,) = sc.plan_pipeline([graph], "60%", 3, solver="greedy", time_limit=3.0)
    (other,) = sc.plan_pipeline([renamed(graph)], "60%", 3, solver="greedy", time_limit=3.0)
    assert (one.kept_bytes, one.peak_bytes, one.budget_bytes) == (
        other.kept_bytes,
        other.peak_bytes,
        other.budget_bytes,
    )
    assert other.plan.schedule == renamed_schedule(graph, one.plan.schedule)


@pytest.mark.parametrize("name", GRAPHS)
def test_its_timeline_is_the_same(name: str) -> None:
    plan = plan_of(name)
    one, other = (Timeline.of(p.graph, p.schedule) for p in (plan, renamed_plan(plan)))
    assert [(run.start, run.memory_bytes, run.kind, run.layer) for run in one.runs] == [
        (run.start, run.memory_bytes, run.kind, run.layer) for run in other.runs
    ]
    assert [(h.start, h.end, h.layer, h.is_saved) for h in one.holdings] == [
        (h.start, h.end, h.layer, h.is_saved) for h in other.holdings
    ]


@pytest.mark.parametrize("name", GRAPHS)
def test_its_chrome_trace_is_the_same(name: str) -> None:
    plan = plan_of(name)
    one, other = (plan_to_chrome_trace(p) for p in (plan, renamed_plan(plan)))
    text = with_old_names(json.dumps(other), plan.graph)
    assert json.loads(text.replace(renamed_plan(plan).digest, plan.digest)) == one


@pytest.mark.parametrize("name", GRAPHS)
def test_its_report_and_its_plots_are_the_same(name: str) -> None:
    pytest.importorskip("matplotlib")
    from scheduler.export.html_report import layer_rows, report_html
    from scheduler.plots import inline_svg, plot_memory, plot_schedule

    plan = plan_of(name)
    other = renamed_plan(plan)
    assert with_old_names(repr(layer_rows(other)), plan.graph) == repr(layer_rows(plan))
    page = with_old_names(report_html(other), plan.graph)
    assert page.replace(other.digest, plan.digest).replace(other.graph.digest, plan.graph.digest) == report_html(plan)
    for draw in (plot_memory, plot_schedule):
        assert inline_svg(draw, other, "a") == inline_svg(draw, plan, "a")


def test_its_layer_spans_are_the_same() -> None:
    pytest.importorskip("torch")
    from scheduler.pytorch.integrations.torch_checkpoint import layer_spans

    graph = chain().graph
    solution = sc.solve(graph, "50%", solver="ilp", time_limit=5.0)
    plan = Plan.of(graph, solution, granularity="layers")
    spans = layer_spans(plan)
    assert {layer for span in spans for layer in span.layers} == {"h.0", "h.1", "h.2", "h.3"}
    assert {span.recompute for span in spans} == {True, False}
    assert layer_spans(renamed_plan(plan)) == spans


def test_a_plan_by_modules_recomputes_the_same_calls() -> None:
    pytest.importorskip("torch")
    from scheduler.pytorch.modules.choice import plan_modules
    from tests.support.call_trees import transformer_tree

    plan = plan_modules(transformer_tree(3), "40%")
    other = renamed_plan(plan)
    assert [str(decision) for decision in other.decisions] == ["h.0", "h.1", "h.2"]
    assert other.parts_text() == plan.parts_text()
    one, two = (Timeline.of(p.graph, p.schedule) for p in (plan, other))
    assert [run.layer for run in one.runs] == [run.layer for run in two.runs]


@pytest.fixture(scope="module")
def traced() -> tuple[Any, Any, sc.Graph]:
    torch = pytest.importorskip("torch")
    from scheduler.pytorch import trace

    torch.manual_seed(0)
    nn = torch.nn
    block = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(8, 8), block, nn.Linear(8, 8))
    batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters())
    graph = trace(model, (batch,), costs="flops", reserve=1000, optimizer=optimizer, accumulate_gradients=True)
    return model, batch, graph


def test_what_a_traced_graph_counts_in_addition_to_its_step_is_the_same(traced: tuple[Any, Any, sc.Graph]) -> None:
    from scheduler.pytorch.capture.device_memory import device_memory_of

    *_, graph = traced
    one, other = device_memory_of(graph), device_memory_of(renamed(graph))
    assert [(tensor.size_bytes, tensor.role) for tensor in one.tensors] == [
        (tensor.size_bytes, tensor.role) for tensor in other.tensors
    ]
    assert {tensor.role for tensor in one.tensors} == {"reserve", "optimizer state"}
    assert one.accumulate_gradients
    assert other.accumulate_gradients


def test_a_traced_graph_states_the_role_of_every_resident_tensor(traced: tuple[Any, Any, sc.Graph]) -> None:
    *_, graph = traced
    roles = {graph.tensor(name).role for name in graph.resident}
    assert roles == {"parameter", "buffer", "input", "reserve", "optimizer state", "gradient"}
    assert {graph.tensor(name).role for name in graph.results} == {"output"}  # gradients are added up


def test_a_traced_graph_saves_the_same_under_torch_checkpoint(traced: tuple[Any, Any, sc.Graph]) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.checkpoint import checkpoint

    from scheduler.pytorch.integrations.torch_checkpoint import selective_contexts
    from scheduler.pytorch.measurement.memory import FlopCounter, StorageTracker, resident_tensors

    model, batch, graph = traced
    plan = sc.make_plan(graph, "100%", solver="save-all")
    found = []
    for given in (plan, renamed_plan(plan)):
        block = copy.deepcopy(model[1])
        torch.manual_seed(2)
        with StorageTracker(resident_tensors(block, batch)) as tracker, FlopCounter() as counter:
            outputs = checkpoint(block, batch, use_reentrant=False, context_fn=selective_contexts(given, "1"))
            held = tracker.live_bytes
            outputs.sum().backward()
        found.append((held, counter.flops, [tensor.tolist() for tensor in (*block.buffers(), block[0].weight.grad)]))
    assert found[0] == found[1]
    assert block[1].num_batches_tracked == 1


def test_a_renamed_plan_of_operations_runs_the_same(traced: tuple[Any, Any, sc.Graph]) -> None:
    torch = pytest.importorskip("torch")
    from scheduler.pytorch import checkpointed

    model, batch, graph = traced
    plan = sc.make_plan(graph, "70%", solver="greedy")
    assert plan.overhead > 0
    gradients = []
    for given in (plan, renamed_plan(plan)):
        module = checkpointed(copy.deepcopy(model), given, (batch,))
        torch.manual_seed(2)
        module(batch).sum().backward()
        gradients.append([parameter.grad.tolist() for parameter in module.parameters()])
    assert gradients[0] == gradients[1]
