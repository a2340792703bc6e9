"""Public complaints of users of activation checkpointing, one test each.

Every test cites the issues that it answers. Where another file has a longer test, this is the short form.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import scheduler as sc
from scheduler.errors import CaptureError, ExecutionError
from scheduler.pytorch import backend, checkpointed, max_batch, measure, profile_layers, trace
from scheduler.pytorch.integrations.planned_forward import PlannedForward
from scheduler.pytorch.integrations.torch_checkpoint import layer_spans, selective_contexts
from scheduler.pytorch.measurement.memory import FlopCounter, Measurement, resident_tensors, training_step
from tests.support.fake_clock import FakeClock
from tests.support.plans import plan_of_schedule
from tests.support.pytorch.layered import check_layers, counted_calls, plan_of_layers
from tests.support.pytorch.modules import Meets, Step
from tests.support.pytorch.planning import check_equal, check_like_autograd, planned, recompute_most, train
from tests.support.pytorch.regression import mean_square
from tests.support.pytorch.watching import Count, Watched

ROWS, WIDTH, DEPTH = 64, 16, 8
PRODUCT = 2 * ROWS * WIDTH * WIDTH
"""FLOPs of one linear layer, forward."""
PLAIN_FLOPS = (3 * DEPTH - 1) * PRODUCT
"""FLOPs of a plain step: forward, gradients of weights, and gradients of inputs other than the batch."""
FAST: dict[str, object] = {"costs": "flops", "solver": "greedy", "time_limit": 2.0}


def batch(rows: int = ROWS, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def network(*extra: Callable[[], nn.Module], depth: int = DEPTH) -> nn.Sequential:
    """Return blocks of a linear layer, GELU and the extra modules."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), *(make() for make in extra)) for _ in range(depth))
    )


def used(module: nn.Module, loss: Callable[..., Tensor] | None = None) -> Measurement:
    x = batch()
    return measure(training_step(module, (x,), loss=loss), resident=resident_tensors(module, x), repeats=1)


def recomputations(plan: sc.Plan) -> int:
    return sum(plan.simulation.recomputed.values())


def check_equal_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


@pytest.fixture
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A gloo group of this process alone: collectives are issued as in a larger one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


alone = pytest.mark.usefixtures("_one_process")
compiles = pytest.mark.usefixtures("fresh_dynamo")


# Budget, peak, and choosing what to save


def test_recomputation_saves_memory_and_is_not_optimized_away():
    """jax#27748, flax#1285, pytorch/xla#3455: nothing saved, or memory lost; recomputation is merged away."""
    plain = used(network(), mean_square)
    module = checkpointed(network(), "50%", (batch(),), loss=mean_square, **FAST)
    ours = used(module)
    assert ours.live_peak_bytes == module.plan.peak_bytes <= module.plan.budget_bytes
    assert ours.live_peak_bytes < plain.live_peak_bytes
    products = sum(runs for name, runs in module.plan.simulation.recomputed.items() if "addmm" in name)
    assert products > 0
    assert (plain.flops, ours.flops) == (PLAIN_FLOPS, PLAIN_FLOPS + products * PRODUCT)


@compiles
def test_a_compiled_step_takes_less_memory_than_eager():
    """thunder#1337, thunder#1560, thunder#2527, pytorch#160773: compiling undoes or ignores checkpointing."""
    module = Step(network())
    eager = used(module)
    watched = Watched(backend("50%", solver="greedy", time_limit=2.0))
    compiled = torch.compile(module, backend=watched, fullgraph=True)
    x = batch()
    compiled(x).backward()
    between, peak = watched.measure(module, x, {}, lambda: compiled(x))
    (graph,) = watched.planned.plans
    assert between == graph.saved_bytes
    assert graph.plan.graph.resident_bytes + peak == graph.plan.peak_bytes <= graph.plan.budget_bytes
    assert graph.plan.peak_bytes < eager.live_peak_bytes


def test_the_slowdown_is_known_before_training_and_is_zero_if_memory_suffices():
    """Qwen-Image#69: a slowdown of 3.75 times, found out by training."""
    overheads = []
    for budget in ("100%", "50%"):
        module = checkpointed(network(), budget, (batch(),), loss=mean_square, **FAST)
        measured = used(module).flops / PLAIN_FLOPS - 1
        assert module.plan.overhead == pytest.approx(measured, abs=0.02)  # moved bytes count a little
        overheads.append(measured)
    none, some = overheads
    assert none == 0 < some


def test_the_largest_batch_for_a_budget_is_found():
    """optimum-habana#111: which batch makes use of the memory that checkpointing saves is unclear."""
    plain = used(network(), mean_square)
    found = max_batch(
        network,
        lambda size: ((batch(size),), {}),
        plain.live_peak_bytes,
        loss=mean_square,
        costs="flops",
        solver="greedy",
        time_limit=2.0,
    )
    assert found.batch_size > ROWS
    assert found.plan.peak_bytes <= plain.live_peak_bytes


def test_the_plan_chooses_which_layers_are_recomputed():
    """transformers#26103, mistral#58, WeatherGenerator#1141: how many layers to checkpoint, and which?"""
    model = network()
    profile = profile_layers(model, (batch(),), loss=mean_square)
    slow = {profile.layers[i].name for i in (1, 4, 6)}
    seconds = {layer.name: 100.0 if layer.name in slow else 1.0 for layer in profile.layers}
    layers = [
        replace(layer, forward_time=seconds[layer.name], forward_without_saving_time=seconds[layer.name])
        for layer in profile.layers
    ]
    plan = sc.make_plan(sc.Chain(layers, profile.input_bytes), "80%", solver="dp")
    chosen = {name for span in layer_spans(plan) if span.recompute for name in span.layers}
    assert chosen
    assert not chosen & slow
    module = checkpointed(model, plan, (batch(),), loss=mean_square)
    with counted_calls(list(model)) as counts:
        module(batch()).backward()
    assert {layers[i].name for i in range(DEPTH) if counts[i] > 1} == chosen


def test_a_plan_that_never_takes_effect_is_an_error():
    """Lightning#19919: classes that the wrapper does not meet are silently not checkpointed."""
    model = network()
    forward = PlannedForward(model[0], "50%", **FAST)
    model[1:](batch())
    with pytest.raises(ExecutionError, match="was not called in training"):
        forward.check_applied()


class Blockwise(nn.Module):
    """Checkpoints each of its blocks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = network(lambda: nn.BatchNorm1d(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_a_plan_replaces_the_checkpointing_of_the_model_itself():
    """Lightning#18006: checkpointing is applied twice."""
    model, plain = Blockwise(), network(lambda: nn.BatchNorm1d(WIDTH))
    module = checkpointed(model, "100%", (batch(),), loss=mean_square, **FAST)
    expected = train(plain, [((batch(),), {})], mean_square)
    found = train(module, [((batch(),), {})])
    for kind in ("gradients", "buffers"):
        pairs = zip(vars(found)[kind].values(), vars(expected)[kind].values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), kind
    assert used(module).flops == PLAIN_FLOPS


def test_no_division_into_segments_is_faster_than_the_proven_optimum():
    """pytorch#88825: the promise of a search for the best places of checkpoints."""
    chain = profile_layers(network(), (batch(),), loss=mean_square)
    seen = 0
    for budget in ("40%", "60%", "80%"):
        segments = sc.solve(chain, budget, solver="segments")
        best = sc.solve(chain, budget, solver="dp")
        assert best.status is sc.Status.OPTIMAL
        if segments.schedule is not None:
            seen += 1
            assert best.time <= segments.time * (1 + 1e-9)
    assert seen


def test_the_tradeoff_of_memory_and_speed_is_one_curve_with_bounds():
    """microsoft/tensorflow-rematerialization#1: the speed that each memory saved costs."""
    graph = trace(network(), (batch(),), loss=mean_square, costs="flops")
    with FakeClock(seconds_per_look=0.005):
        rows = sc.frontier(graph, ["50%", "70%", "100%"], solver="greedy", time_limit=4.0).rows
    assert [row.peak_bytes <= row.budget_bytes for row in rows] == [True] * 3
    assert all(slow.overhead >= fast.overhead for slow, fast in itertools.pairwise(rows))
    assert rows[0].overhead > rows[2].overhead == 0
    better = sc.solve(graph, rows[0].budget_bytes, solver="ilp", time_limit=4.0)
    assert rows[2].time < rows[0].bound <= better.time * (1 + 1e-9)
    assert better.time <= rows[0].time


# Correctness


@pytest.mark.parametrize("granularity", ["operations", "layers"])
def test_batch_norm_statistics_are_updated_once_and_in_the_forward(granularity):
    """pytorch#96136, pytorch#62471, insightface#2053, fairscale#1035: updated twice, or in the backward."""
    model, x = network(lambda: nn.BatchNorm1d(WIDTH)), batch()
    expected = 0.1 * model[0][:2](x).mean(0)  # momentum 0.1, from 0
    if granularity == "operations":
        module, captured, schedule = planned(model, recompute_most, (x,), None, mean_square)
        again = sc.simulate(captured.graph, schedule).recomputed
    else:
        graph = profile_layers(model, (x,), loss=mean_square).graph
        plan = plan_of_layers(graph, recompute_most(graph))
        module, again = checkpointed(model, plan, (x,), loss=mean_square), plan.simulation.recomputed
    assert sum(again.values()) >= DEPTH - 1
    loss = module(x)
    after_forward = copy.deepcopy(dict(model.named_buffers()))
    torch.testing.assert_close(after_forward["0.2.running_mean"], expected)
    loss.backward()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, after_forward[name]), name
    assert all(int(block[2].num_batches_tracked) == 1 for block in model)


@alone
def test_a_normalization_over_processes_communicates_once():
    """fairscale#694: SyncBatchNorm issues its all-reduce a second time when it is recomputed."""
    x = torch.randn(4, 8)
    counts = []
    for recompute in (False, True):
        model = Meets()
        module = planned(model, recompute_most, (x,))[0] if recompute else model
        with Count(torch.ops._c10d_functional.all_reduce.default) as counter:
            module(x).backward()
        counts.append(counter.count)
    assert counts == [2, 2]  # in the forward, and its gradient's in the backward


@pytest.mark.parametrize("granularity", ["operations", "layers"])
def test_losses_with_dropout_are_those_without_checkpointing(granularity):
    """OLMo-core#828, torchtitan#1323, guided-diffusion#167: the random state is not preserved, and losses differ."""
    model, plain = network(lambda: nn.Dropout(0.3)), network(lambda: nn.Dropout(0.3))
    if granularity == "operations":
        module, _, _ = planned(model, recompute_most, (batch(),), None, mean_square)
    else:
        graph = profile_layers(model, (batch(),), loss=mean_square).graph
        module = checkpointed(model, plan_of_layers(graph, recompute_most(graph)), (batch(),), loss=mean_square)
    batches = [((batch(seed=seed),), {}) for seed in range(5)]
    check_equal(train(module, batches), train(plain, batches, mean_square))


class Caching(nn.Module):
    """Appends its keys to a cache, and reads all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: tuple[Tensor, list[Tensor]]) -> tuple[Tensor, list[Tensor]]:
        x, cache = state
        cache.append(self.linear(x).tanh())
        return x + torch.stack(cache).sum(0).sin(), cache


class CachingNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Caching() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.layers((x, []))
        return outputs


def test_recomputation_does_not_lengthen_a_cache_of_keys():
    """pytorch#155171: recomputation appends to the key-value cache again, which doubles the sequence."""
    check_like_autograd(CachingNetwork(), recompute_most, ((batch(),), {}), ((batch(seed=1),), {}), loss=mean_square)
    layers = [lambda x: (x, []), *CachingNetwork().layers]
    # Layers know only whether a state is kept whole, so the prediction is an upper bound.
    check_layers(
        layers, recompute_most, (batch(),), (batch(seed=1),), loss=lambda state: mean_square(state[0]), least=0.8
    )


def test_a_cache_kept_from_step_to_step_is_refused():
    """pytorch#155171: a step would depend on how often those before it were computed."""
    model, kept = CachingNetwork(), []
    model.layers.register_forward_pre_hook(lambda _, args: ((args[0][0], kept),))
    model(batch())
    assert len(kept) == 4
    with pytest.raises(CaptureError, match=r"forward changes .*kept"):
        trace(model, (batch(),), loss=mean_square, costs="flops")
    assert len(kept) == 4


def test_recomputation_under_autocast_keeps_the_same_tensors():
    """pytorch#141896: under autocast, recomputation saves other tensors than the forward did."""
    model, plain = network(lambda: nn.LayerNorm(WIDTH)), network(lambda: nn.LayerNorm(WIDTH))
    with torch.autocast("cpu", torch.bfloat16):
        module, captured, schedule = planned(model, recompute_most, (batch(),), None, mean_square)
        ours, theirs = module(batch()), mean_square(plain(batch()))
    ours.backward()
    theirs.backward()
    assert sum(sc.simulate(captured.graph, schedule).recomputed.values()) > 0
    assert torch.equal(ours, theirs)
    check_equal_gradients(model, plain)


@alone
@compiles
def test_a_step_compiled_around_ddp_follows_a_plan():
    """pytorch#144035: with compile, checkpoint and DDP together, a different number of tensors is saved."""
    model = Step(network(lambda: nn.LayerNorm(WIDTH)))
    plain, made = copy.deepcopy(model), backend("50%", solver="greedy", time_limit=10.0)
    module = torch.compile(DistributedDataParallel(model), backend=made)
    for target in (module, plain):
        target(batch()).backward()
    (graph,) = made.plans
    assert recomputations(graph.plan) > 0
    check_equal_gradients(model, plain)


class Experts(nn.Module):
    """Routes every row to one of two experts, by a score with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        choice = (scores + torch.rand_like(scores)).argmax(1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            outputs = outputs.index_add(0, rows, expert(x[rows]).tanh() * scores[rows, number, None])
        return x + outputs


def test_experts_chosen_with_noise_are_the_same_in_recomputation():
    """torchtitan#1117, native-sparse-attention#24, Lightning#19267: recomputed sizes differ from those saved."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts() for _ in range(4)))
    with pytest.raises(CaptureError, match="modules"):
        trace(model, (batch(),), loss=mean_square, costs="flops")
    plain = copy.deepcopy(model)
    graph = profile_layers(model, (batch(),), loss=mean_square).graph
    plan = plan_of_layers(graph, recompute_most(graph))
    assert recomputations(plan) > 0
    module = checkpointed(model, plan, (batch(),), loss=mean_square)
    batches = [((batch(seed=seed),), {}) for seed in (1, 2)]
    check_equal(train(module, batches), train(plain, batches, mean_square))


@pytest.mark.parametrize("autocast", [False, True])
def test_layers_trained_behind_frozen_layers_get_their_gradients(autocast):
    """transformers#16276, transformers#24247, LlamaFactory#6358, pytorch#6884: frozen inputs, silently no gradients."""
    model = network()
    for block in model[:4]:
        block.requires_grad_(False)
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module = checkpointed(model, "60%", (batch(),), loss=mean_square, **FAST)
        module(batch()).backward()
        mean_square(plain(batch())).backward()
    assert recomputations(module.plan) > 0
    assert all(parameter.grad is not None for parameter in model[4:].parameters())
    check_equal_gradients(model, plain)


def test_a_model_without_anything_to_train_is_refused():
    """transformers#23170: "None of the inputs have requires_grad", as a warning."""
    with pytest.raises(CaptureError, match="so there is no backward to plan"):
        checkpointed(network().requires_grad_(False), "60%", (batch(),), loss=mean_square, **FAST)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_each_recomputed_layer_gets_the_state_of_the_one_before():
    """Megatron#290: with several layers per checkpoint, all got the original hidden state."""
    factors = [2.0, 4.0, 0.5, 8.0, 0.25, 2.0]
    model, x = nn.Sequential(*(Scale(factor) for factor in factors)), torch.ones(4096)
    graph = profile_layers(model, (x,), loss=torch.Tensor.sum).graph
    plan = plan_of_layers(graph, recompute_most(graph, keep_every=99))
    assert max(plan.simulation.recomputed.values()) > 1
    checkpointed(model, plan, (x,), loss=torch.Tensor.sum)(x).backward()
    product = 2.0 * 4.0 * 0.5 * 8.0 * 0.25 * 2.0
    assert [layer.factor.grad.item() for layer in model] == [4096 * product / factor for factor in factors]


class Rounded(torch.autograd.Function):
    """Rounds; its gradient is the incoming one, twice."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Round(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Rounded.apply(4 * x)


def test_a_plan_holds_through_a_custom_autograd_function():
    """pytorch#177396: checkpointing is lost at a custom autograd.Function."""
    check_like_autograd(network(Round), recompute_most, ((batch(),), {}), loss=mean_square)
    check_layers(network(Round), recompute_most, (batch(),), (batch(seed=1),), loss=mean_square)


# Several processes


class Gathering(nn.Module):
    """Gathers the rows of its weight from all processes, as a sharded unit does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shard = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = collectives.all_gather_single_autograd(self.shard, 0, dist.group.WORLD)
        return (x @ weight).tanh().sin()


@alone
def test_recomputation_gathers_no_parameters_again():
    """pytorch#105635, autoparallel#469: with checkpointing, parameters are gathered twice per layer."""
    model = nn.Sequential(*(Gathering() for _ in range(4)))
    module, captured, schedule = planned(model, recompute_most, (batch(),), None, mean_square)
    assert sum(sc.simulate(captured.graph, schedule).recomputed.values()) > 0
    with Count(torch.ops._c10d_functional.all_gather_into_tensor.default) as counter:
        module(batch()).backward()
    assert counter.count == 4


@alone
def test_wrapping_in_the_wrong_order_is_refused_with_the_right_one():
    """pytorch#82203, fairscale#777: checkpointing around a sharded module fails, or is it to be inside?"""
    with pytest.raises(CaptureError, match=r"plan before sharding.*fully_shard\(checkpointed\("):
        trace(fully_shard(network()), (batch(),), loss=mean_square, costs="flops")


class Profiled(nn.Module):
    """Marks its blocks for a profiler if `marked` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = network()
        self.marked = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            with torch.profiler.record_function("block") if self.marked else contextlib.nullcontext():
                x = block(x)
        return x


def test_marks_of_a_profiler_do_not_change_what_is_recomputed():
    """pytorch#196862: operators that only the run has shift the counts by which a policy knows operators."""
    model = Profiled()
    contexts = selective_contexts(
        sc.make_plan(trace(model, (batch(),), costs="flops"), "60%", solver="greedy", time_limit=2.0)
    )
    flops = []
    for model.marked in (False, True):
        with FlopCounter() as counter, Count(torch.ops.profiler._record_function_enter_new.default) as marks:
            checkpoint(model, batch(), use_reentrant=False, context_fn=contexts).sum().backward()
        flops.append(counter.flops)
        assert marks.count >= DEPTH * model.marked
    assert PLAIN_FLOPS < flops[0] == flops[1] < PLAIN_FLOPS + DEPTH * PRODUCT


def test_a_model_with_marks_of_a_profiler_is_planned():
    """pytorch#196862, in capture: marks compute nothing and are not part of a plan."""
    model = Profiled()
    unmarked = trace(model, (batch(),), loss=mean_square, costs="flops").structure_digest
    model.marked = True
    assert trace(model, (batch(),), loss=mean_square, costs="flops").structure_digest == unmarked


@alone
def test_sharded_units_with_frozen_parameters_train():
    """DeepSpeed#8130, DeepSpeed#8148, transformers#47254: recomputation meets frozen parameters that are freed."""
    model = network(depth=4)
    for block in model:
        block[0].weight.requires_grad_(False)
    plain, example = copy.deepcopy(model), (batch().requires_grad_(),)
    graph = trace(model[1], example, costs="flops")
    plan = plan_of_schedule(graph, recompute_most(graph))
    assert recomputations(plan) > 0
    for i, block in enumerate(model):
        model[i] = fully_shard(checkpointed(block, plan, example))
    mean_square(fully_shard(model)(batch().requires_grad_())).backward()
    mean_square(plain(batch())).backward()
    for block, other in zip(model, plain, strict=True):
        weight, bias = block.parameters()
        assert weight.grad is None
        assert torch.equal(bias.grad.to_local(), other[0].bias.grad)


@alone
def test_each_gradient_is_ready_once_under_ddp():
    """pytorch#24005, FocalNet#4, transformers#45519: a parameter is marked ready twice."""
    model = network()
    model[-1][0].weight = model[0][0].weight
    plain = copy.deepcopy(model)
    planned_model = checkpointed(model, "60%", (batch(),), loss=mean_square, **FAST)
    module, ready = DistributedDataParallel(planned_model), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
    module(batch()).backward()
    mean_square(plain(batch())).backward()
    assert recomputations(planned_model.plan) > 0
    assert sorted(ready) == sorted(name for name, _ in model.named_parameters())
    check_equal_gradients(model, plain)
