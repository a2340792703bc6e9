from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scheduler as sc
from scheduler.errors import ExecutionError, InvalidOptionError
from scheduler.plan import Plan
from scheduler.pytorch import profile_layers, trace
from scheduler.pytorch.integrations.torch_checkpoint import LayerSpan, layer_spans, selective_contexts
from scheduler.pytorch.measurement.memory import FlopCounter, StorageTracker, resident_tensors
from scheduler.pytorch.models.catalog import make_model
from scheduler.schedule import schedule_from_runs
from tests.support.plans import plan_of_schedule
from tests.support.pytorch.layered import counted_calls, plan_of_layers
from tests.support.pytorch.planning import recompute_most, save_everything
from tests.support.pytorch.regression import mean_square

ROWS, WIDTH = 32, 16
ACTIVATION_BYTES = ROWS * WIDTH * 4
MATRIX_FLOPS = 2 * ROWS * WIDTH * WIDTH


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def perceptrons(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)))


def recompute_gelus(graph: sc.Graph) -> sc.Schedule:
    """Run everything once, and every GELU again before the first backward operation that reads it."""
    index, names = graph.index, [operation.name for operation in graph.operations]
    again = {i for i, name in enumerate(names) if name.rpartition("/")[2].startswith("gelu") and "backward" not in name}
    runs = []
    for i in index.defaults:
        if graph.operations[i].phase == "backward":
            needed = {maker for tensor in index.inputs[i] for maker in index.producers[tensor]} & again
            runs += sorted(needed)
            again -= needed
        runs.append(i)
    return schedule_from_runs(graph, runs)


def chain_plan(*runs: str) -> Plan:
    """A plan of five equal layers, with these runs."""
    chain = sc.Chain([sc.Layer(name, 1, 2, 10, 20) for name in "abcde"], input_bytes=10)
    names = {"+": ".forward", ">": ".forward_without_saving", "<": ".backward"}
    found = [run if run.startswith("loss") else run[0] + names[run[1]] for run in runs]
    ids = chain.graph.index.operation_ids
    return plan_of_layers(chain.graph, schedule_from_runs(chain.graph, [ids[name] for name in found]))


def test_spans_are_those_between_the_states_that_the_plan_keeps():
    end = ["loss", "loss_backward"]
    forward = ["a+", "b>", "c>", "d+", "e>", *end]
    plan = chain_plan(*forward, "e+", "e<", "d<", "b+", "c+", "c<", "b<", "a<")
    assert layer_spans(plan) == (
        LayerSpan(("a",), False),
        LayerSpan(("b", "c"), True),
        LayerSpan(("d",), False),
        LayerSpan(("e",), True),
    )


def test_a_kept_state_between_recomputed_layers_divides_them():
    forward = ["a+", "b+", "c>", "d>", "e+", "loss", "loss_backward"]
    # The state between c and d is kept: d is computed from it, before c.
    plan = chain_plan(*forward, "e<", "d+", "d<", "c+", "c<", "b<", "a<")
    assert layer_spans(plan) == (
        LayerSpan(("a", "b"), False),
        LayerSpan(("c",), True),
        LayerSpan(("d",), True),
        LayerSpan(("e",), False),
    )


class MeanSquare(nn.Module):
    def forward(self, outputs: Tensor) -> Tensor:
        return mean_square(outputs)


def test_layers_in_their_spans_train_as_planned():
    model = nn.Sequential(*perceptrons(8), MeanSquare())
    plain = copy.deepcopy(model)
    chain = profile_layers(model, (batch(),))
    spans = layer_spans(sc.make_plan(chain, "60%", solver="dp"))
    assert [layer for span in spans for layer in span.layers] == [layer.name for layer in chain.layers]
    with counted_calls(list(model)) as counts:
        x, layers = batch(), iter(model)
        for span in spans:
            part = nn.Sequential(*(next(layers) for _ in span.layers))
            x = checkpoint(part, x, use_reentrant=False) if span.recompute else part(x)
        x.backward()
    plain(batch()).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    recomputed = [span.recompute for span in spans for _ in span.layers]
    assert [counts[i] for i in range(9)] == [1 + again for again in recomputed]
    assert 0 < sum(recomputed) < 9


def held_and_flops(model: nn.Module, plan: Plan) -> tuple[int, int]:
    """Bytes that live at the end of the forward, and FLOPs of the step, with the model as one region."""
    x = batch()
    with StorageTracker(resident_tensors(model, x)) as tracker, FlopCounter() as counter:
        outputs = checkpoint(model, x, use_reentrant=False, context_fn=selective_contexts(plan))
        held = tracker.live_bytes - ACTIVATION_BYTES  # the caller has the output
        outputs.sum().backward()
    return held, counter.flops


@pytest.mark.parametrize("schedule", [save_everything, recompute_gelus])
def test_a_region_keeps_what_the_plan_saves_and_recomputes_the_rest(schedule):
    model = perceptrons(3)
    graph = trace(model, (batch(),), costs="flops")
    plan = plan_of_schedule(graph, schedule(graph))
    held, flops = held_and_flops(model, plan)
    # Of three layers: three products forward, three for weights and two for inputs backward. All products are saved,
    # as the GELUs read them again; with everything saved, so are the first two outputs of GELUs.
    assert flops == 8 * MATRIX_FLOPS
    assert held == (5 if schedule is save_everything else 3) * ACTIVATION_BYTES


def test_what_the_plan_neither_saves_nor_needs_again_is_recomputed():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    graph = trace(model, (batch(),), costs="flops")
    # Tanh needs its output only: the plan lets go of the three products, and torch makes them again.
    _, flops = held_and_flops(model, plan_of_schedule(graph, save_everything(graph)))
    assert flops == (8 + 3) * MATRIX_FLOPS


@pytest.mark.parametrize("schedule", [save_everything, recompute_most])
def test_gradients_statistics_and_random_numbers_are_those_of_the_plain_model(schedule):
    case = make_model("convnet", batch_size=4, width=8, depth=3, size=16)
    for module in case.module.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    plain = copy.deepcopy(case.module)
    graph = trace(case.module, case.args, costs="flops")
    contexts = selective_contexts(plan_of_schedule(graph, schedule(graph)))
    states = []
    for call in (plain, lambda *args: checkpoint(case.module, *args, use_reentrant=False, context_fn=contexts)):
        torch.manual_seed(2)
        for _ in range(2):
            call(*case.args).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for one, other in zip(case.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(case.module.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def test_regions_of_submodules_find_their_part_of_the_plan():
    model = perceptrons(3)
    graph = trace(model, (batch(),), costs="flops")
    plan = plan_of_schedule(graph, recompute_gelus(graph))
    x = batch()
    with StorageTracker(resident_tensors(model, x)) as tracker:
        outputs = x
        for name, block in model.named_children():
            outputs = checkpoint(block, outputs, use_reentrant=False, context_fn=selective_contexts(plan, name))
        # Per block its product, and its input for the next; the last output is the caller's.
        assert tracker.live_bytes == (3 + 2 + 1) * ACTIVATION_BYTES
        outputs.sum().backward()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


def test_a_saved_tensor_that_is_changed_in_place_is_refused():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=True))
    graph = trace(model, (batch(),), costs="flops")
    contexts = selective_contexts(plan_of_schedule(graph, save_everything(graph)))
    with pytest.raises(ExecutionError, match="inplace=False"):
        checkpoint(model, batch(), use_reentrant=False, context_fn=contexts)


def test_plans_that_an_export_cannot_express_are_refused():
    class Decaying(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.register_buffer("shift", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            outputs = super().forward(x + self.shift)
            self.shift.mul_(0.5)
            return outputs

    model = perceptrons()
    layers = sc.make_plan(profile_layers(model, (batch(),), loss=mean_square), "100%", solver="dp")
    graph = trace(model, (batch(),), costs="flops")
    operations = plan_of_schedule(graph, save_everything(graph))
    with pytest.raises(InvalidOptionError, match="layer_spans"):
        selective_contexts(layers)
    with pytest.raises(InvalidOptionError, match="selective_contexts"):
        layer_spans(operations)
    with pytest.raises(InvalidOptionError, match=r'"blocks\.7"'):
        selective_contexts(operations, "blocks.7")
    graph = trace(Decaying(), (batch(),), costs="flops")
    with pytest.raises(InvalidOptionError, match='"update:shift"'):
        selective_contexts(plan_of_schedule(graph, save_everything(graph)))
