from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from scheduler.api import make_plan
from scheduler.errors import (
    BudgetTooSmallError,
    CaptureError,
    ExecutionError,
    InvalidOptionError,
    PlanMismatchError,
)
from scheduler.graph.chain import Chain
from scheduler.plan import Plan
from scheduler.pytorch import checkpointed, measure, profile_layers
from scheduler.pytorch.layerwise.module import LayeredModule
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from tests.support.pytorch.layered import (
    check_layers,
    counted_calls,
    mixed_loss,
    mixed_stack,
    mixed_state,
    plan_of_layers,
    random_schedule,
)
from tests.support.pytorch.planning import check_equal, recompute_most, save_everything, train
from tests.support.pytorch.regression import batch, mean_square, mlp

SCHEDULES = {
    "save everything": save_everything,
    "recompute most": recompute_most,
    "at random": random_schedule(1),
    "at random, gradients too": random_schedule(2, dropped=0.8, gradients=True),
}
schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


def planned(model: nn.Sequential, schedule=recompute_most, args=None, loss=mean_square, **options) -> LayeredModule:
    args = (batch(8, 16),) if args is None else args
    graph = profile_layers(model, args, loss=loss).graph
    return checkpointed(model, plan_of_layers(graph, schedule(graph)), args, loss=loss, **options)


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "bfloat16 autocast"])
def mixed(request) -> tuple[nn.Sequential, Chain, bool]:
    if request.param and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("torch has no bfloat16 kernel for an LSTM on this processor")
    model = mixed_stack()
    with torch.autocast("cpu", torch.bfloat16, enabled=request.param):
        chain = profile_layers(model, (mixed_state(),), loss=mixed_loss)
    return model, chain, request.param


@pytest.mark.parametrize("budget", ["100%", "70%", "50%", "35%", "25%"])
def test_a_mixed_stack_trains_within_its_budget_as_under_autograd(mixed, budget):
    original, chain, autocast = mixed
    plan = make_plan(chain, budget, solver="dp")
    model, plain = copy.deepcopy(original), copy.deepcopy(original)
    state = mixed_state()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module = checkpointed(model, plan, (state,), loss=mixed_loss)
    for step_batch in (((state,), {}), ((mixed_state(seed=1),), {})):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = train(plain, [step_batch], mixed_loss)
        with counted_calls(model) as calls, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outcome = train(module, [step_batch])
        check_equal(outcome, expected)
        for number, layer in enumerate(chain.layers[:24]):
            assert calls[number] == 1 + plan.simulation.recomputed[f"{layer.name}.forward"]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        measured = measure(training_step(module, (state,)), resident=resident_tensors(module, state), repeats=1)
    assert measured.live_peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    assert measured.live_peak_bytes >= 0.99 * plan.peak_bytes


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_trains_as_under_autograd(seed):
    schedule = random_schedule(seed, dropped=0.3 + 0.05 * seed, gradients=seed % 2 == 1)
    check_layers(mixed_stack(6), schedule, (mixed_state(),), (mixed_state(seed=1),), loss=mixed_loss)


@schedules
def test_dropout_is_replayed_exactly(schedule):
    model = mlp(nn.Dropout(0.4), nn.Tanh(), nn.Dropout(0.2))
    check_layers(model, schedule, (batch(32, 16),), (batch(32, 16, seed=1),), loss=mean_square)


@pytest.mark.parametrize("momentum", [0.1, None])
@schedules
def test_batch_norm_statistics_are_updated_once(schedule, momentum):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3, momentum=momentum), nn.ReLU(inplace=True))
            for _ in range(4)
        )
    )
    check_layers(model, schedule, (batch(4, 3, 32, 32),), (batch(4, 3, 32, 32, seed=1),), loss=mean_square)
    assert int(model[0][1].num_batches_tracked) == 4  # two batches, and two steps measured


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_that_the_example_does_not_change_are_updated_once_too(norm):
    torch.manual_seed(0)
    model = nn.Sequential(*(norm(4, affine=True, track_running_stats=True) for _ in range(4)))
    plain = copy.deepcopy(model)
    module = planned(model, args=(torch.zeros(8, 4, 16),))
    module(batch(8, 4, 16)).backward()
    mean_square(plain(batch(8, 4, 16))).backward()
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


class Mutating(nn.Module):
    """Reads a buffer, changes it in place, replaces another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("shift", batch(16, seed=3))
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.linear(x) + self.shift)
        with torch.no_grad():
            self.shift.mul_(0.9).add_(hidden.mean(0))
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        return (hidden - self.average).cos()


@schedules
def test_changed_and_replaced_buffers_are_updated_once(schedule):
    torch.manual_seed(0)
    model = nn.Sequential(*(Mutating() for _ in range(4)))
    check_layers(model, schedule, (batch(512, 16),), (batch(512, 16, seed=1),), loss=mean_square)


@schedules
def test_functions_that_view_or_change_their_input_train_too(schedule):
    torch.manual_seed(0)
    layers = [
        nn.Linear(16, 32),
        lambda x: x.view(-1, 4, 8),
        torch.sin,
        lambda x: x.mul_(2),
        nn.Flatten(),
        nn.LayerNorm(32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 8),
    ]
    check_layers(layers, schedule, (batch(8, 16),), (batch(8, 16, seed=1),), loss=mean_square)


@pytest.mark.parametrize("rows", [8, 512])
@pytest.mark.parametrize("schedule", [save_everything, recompute_most])
def test_tied_and_frozen_parameters_get_the_gradients_of_autograd(schedule, rows):
    model = mlp(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
    model[5].weight = model[3].weight
    model[2].weight = model[3].weight
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    # A second gradient of a weight is counted where it may be needed, which is not always.
    check_layers(model, schedule, (batch(rows, 16),), (batch(rows, 16, seed=1),), loss=mean_square, least=0.8)
    assert model[0].weight.grad is None
    assert model[3].bias.grad is None


class Nested(nn.Module):
    """Passes on every kind of value in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: dict[str, object]) -> dict[str, object]:
        x, (tokens, *plain) = state["pair"]
        x = self.linear(x).tanh() * (tokens % 2 + state["count"])
        return {**state, "pair": [x, (tokens + 1, *plain)], "count": state["count"] + 1, "mask": x > 0}


@schedules
def test_state_may_be_any_nested_tensors_and_values(schedule):
    torch.manual_seed(0)
    state = {"pair": [batch(128, 16), (torch.arange(16), None, "text", torch.float32)], "count": 1, "mask": None}
    model = nn.Sequential(*(Nested() for _ in range(4)))
    # A state of which autograd keeps at least half counts as kept whole.
    check_layers(model, schedule, (state,), loss=lambda final: final["pair"][0].sum() * final["count"], least=0.9)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, scale: float, shift: Tensor) -> Tensor:
        return self.linear(x * scale + shift).sin()


@schedules
def test_keyword_arguments_go_to_the_first_layer_and_nested_outputs_are_returned(schedule):
    torch.manual_seed(0)
    layers = [Scaled(), nn.Linear(16, 4), lambda y: {"y": (y, y.detach() > 0), "name": "last"}]
    plain = copy.deepcopy(layers)
    kwargs = {"scale": 0.5, "shift": batch(16, seed=3)}
    graph = profile_layers(layers, (batch(8, 16),), kwargs).graph
    module = checkpointed(layers, plan_of_layers(graph, schedule(graph)), (batch(8, 16),), kwargs)
    ours = module(batch(8, 16), **kwargs)
    theirs = plain[2](plain[1](plain[0](batch(8, 16), **kwargs)))
    assert ours["name"] == "last"
    assert torch.equal(ours["y"][1], theirs["y"][1])
    for result in (ours, theirs):
        result["y"][0].square().sum().backward()
    assert torch.equal(layers[0].linear.weight.grad, plain[0].linear.weight.grad)
    with pytest.raises(ExecutionError, match=r"kwargs\['scale'\] is 0\.7, but the plan has 0\.5"):
        module(batch(8, 16), scale=0.7, shift=kwargs["shift"])


@schedules
def test_gradients_of_arguments_are_returned(schedule):
    model = mlp()
    plain = copy.deepcopy(model)
    x, y = batch(8, 16).requires_grad_(), batch(8, 16).requires_grad_()
    planned(model, schedule, (x,))(x).backward()
    mean_square(plain(y)).backward()
    assert torch.equal(x.grad, y.grad)


@schedules
def test_without_a_loss_the_outputs_carry_the_gradient(schedule):
    model = mlp()
    plain = copy.deepcopy(model)
    module = planned(model, schedule, loss=None)
    outputs = module(batch(8, 16))
    assert torch.equal(outputs, plain(batch(8, 16)))
    outputs[:, :3].exp().sum().backward()
    plain(batch(8, 16))[:, :3].exp().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("schedule", [save_everything, recompute_most])
def test_without_a_loss_the_caller_may_hold_the_outputs(schedule):
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 512))
    module = planned(model, schedule, loss=None)
    resident = resident_tensors(model, batch(8, 16))
    x = resident[-1]

    def step() -> None:
        model.zero_grad()
        outputs = module(x)
        outputs.backward(torch.ones_like(outputs))

    step()
    with StorageTracker(resident) as tracker:
        step()
    assert storage_bytes(resident) + tracker.peak_bytes <= module.plan.peak_bytes


@schedules
def test_gradients_are_added_to_those_that_exist(schedule):
    model, plain = mixed_stack(4), mixed_stack(4)
    module = planned(model, schedule, (mixed_state(),), mixed_loss)
    torch.manual_seed(0)
    for seed in (1, 2):
        module(mixed_state(seed=seed)).backward()
    torch.manual_seed(0)
    for seed in (1, 2):
        mixed_loss(plain(mixed_state(seed=seed))).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@schedules
def test_several_forwards_may_be_outstanding(schedule):
    model, plain = mixed_stack(8), mixed_stack(8)
    module = planned(model, schedule, (mixed_state(),), mixed_loss)
    gradients = []
    for step in (module, lambda state: mixed_loss(plain(state))):
        torch.manual_seed(0)
        losses = [step(mixed_state(seed=seed)) for seed in (1, 2, 3)]
        for number in (1, 0, 2):
            losses[number].backward()
        gradients.append([p.grad for p in (model if step is module else plain).parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


@schedules
def test_a_backward_outside_autocast_recomputes_inside(schedule):
    model, plain = mlp(nn.LayerNorm(64)), mlp(nn.LayerNorm(64))
    with torch.autocast("cpu", torch.bfloat16):
        module = planned(model, schedule)
        loss = module(batch(8, 16))
        expected = mean_square(plain(batch(8, 16)))
    loss.backward()
    expected.backward()
    assert torch.equal(loss, expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with pytest.raises(ExecutionError, match="autocast"):
        module(batch(8, 16))


class Late(nn.Module):
    """Needs most memory in its backward after it has freed its input."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.repeat(4, 1) * 2.0).view(4, *x.shape).sum(0) * x


@pytest.mark.parametrize("schedule", [save_everything, recompute_most])
def test_an_input_that_the_layer_before_keeps_stays_in_memory(schedule):
    model = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), Late())
    check_layers(model, schedule, (batch(64, 16),), loss=torch.sum, least=0.9)


def test_without_gradients_and_in_eval_the_layers_run_plainly():
    model = mlp(nn.Dropout(), nn.BatchNorm1d(64))
    module = planned(model)
    with torch.no_grad():
        assert not module(batch(5, 16)).requires_grad
    module.eval()
    assert torch.equal(module(batch(5, 16)), mean_square(model(batch(5, 16))))
    with counted_calls(model) as calls:
        module(batch(8, 16)).backward()
    assert set(calls.values()) == {1}
    module.train()
    with counted_calls(model) as calls:
        module(batch(8, 16)).backward()
    assert set(calls.values()) != {1}


def test_a_released_step_leaves_nothing_behind():
    model = mlp()
    module = planned(model)
    found = []
    model[0].register_forward_hook(lambda layer, arguments, output: found.append(weakref.ref(output)))
    loss = module(batch(8, 16))
    del loss
    gc.collect()
    module(batch(8, 16)).backward()
    gc.collect()
    assert found
    assert all(reference() is None for reference in found)


def test_gradient_hooks_run_once_as_under_autograd():
    model, plain = mlp(), mlp()
    module = planned(model)
    calls = []
    for trained in (model, plain):
        trained[2].weight.register_hook(lambda gradient: gradient * 2)
        trained[2].weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
    module(batch(8, 16)).backward()
    mean_square(plain(batch(8, 16))).backward()
    assert len(calls) == 2
    assert torch.equal(model[2].weight.grad, plain[2].weight.grad)


def test_targets_in_the_closure_of_the_loss_are_read_in_every_step():
    model, plain = mlp(), mlp()
    targets = torch.arange(8)

    def loss(outputs: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    module = planned(model, loss=loss)
    for shift in (0, 3):
        targets = (torch.arange(8) + shift) % 8
        module(batch(8, 16)).backward()
        loss(plain(batch(8, 16))).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_plan_file_runs_on_fresh_layers(tmp_path):
    plan = make_plan(
        profile_layers(mixed_stack(8), (mixed_state(),), loss=mixed_loss), "60%", solver="greedy", time_limit=2.0
    )
    plan.save(tmp_path / "plan.json")
    model, plain = mixed_stack(8), mixed_stack(8)
    module = checkpointed(model, Plan.load(tmp_path / "plan.json"), (mixed_state(),), loss=mixed_loss)
    batches = [((mixed_state(seed=seed),), {}) for seed in (1, 2)]
    check_equal(train(module, batches), train(plain, batches, mixed_loss))


def test_names_and_state_are_those_of_the_original_layers():
    model = mlp(nn.BatchNorm1d(64))
    module = planned(model)
    assert list(module.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(module.parameters(), model.parameters(), strict=True))
    listed = planned([nn.Linear(16, 4), torch.tanh, nn.Linear(4, 2)])
    assert list(listed.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_auto_takes_layers_where_capture_fails():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Untraceable(), nn.Linear(16, 4))
    with pytest.warns(UserWarning, match=r"planned by layers, because it cannot be planned by operations: .*tanh\(\)"):
        module = checkpointed(model, "100%", (batch(8, 16),), loss=mean_square, solver="save-all")
    assert isinstance(module, LayeredModule)
    module(batch(8, 16)).backward()
    with pytest.raises(CaptureError):
        checkpointed(model, "100%", (batch(8, 16),), loss=mean_square, granularity="operations")
    module = checkpointed(list(model), "100%", (batch(8, 16),), loss=mean_square, solver="save-all")
    assert isinstance(module, LayeredModule)


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if float(x.detach().sum()) < 1e9 else x


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.append(nn.Tanh()), "there are 7 layers, including the loss, but the plan has 6"),
        (lambda model: model.__setitem__(1, nn.ReLU()), '"1.ReLU" is another object'),
        (lambda model: setattr(model[2], "bias", None), '"2.Linear" has 1 parameters and buffers, but the plan has 2'),
        (lambda model: model[2].bias.requires_grad_(False), '"bias" of layer "2.Linear"'),
        (lambda model: model.double(), '"weight" of layer "0.Linear" is .*float64'),
        (lambda model: model[1].eval(), 'training of a module in layer "1.GELU" was True'),
    ],
    ids=["a layer more", "another layer", "a parameter less", "a frozen parameter", "another dtype", "a layer in eval"],
)
def test_layers_changed_after_planning_are_noticed(change, message):
    model = mlp()
    module = planned(model)
    change(model)
    with pytest.raises(ExecutionError, match=message):
        module(batch(8, 16))


def test_a_module_replaced_inside_a_layer_is_noticed():
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4))
    module = planned(model)
    model[0][1] = nn.Sigmoid()
    with pytest.raises(ExecutionError, match=r'a module in layer "0\.Sequential" is another one'):
        module(batch(8, 16))


def test_another_batch_is_refused_or_runs_plainly():
    model = mlp()
    with pytest.raises(ExecutionError, match=r"input tensor args\[0\] is \(3, 16\), but the plan has \(8, 16\)"):
        planned(model)(batch(3, 16))
    module = planned(model, on_mismatch="plain")
    assert torch.equal(module(batch(3, 16)), mean_square(model(batch(3, 16))))


def test_a_layer_that_returns_other_shapes_than_planned_is_noticed():
    class Growing(nn.Module):
        width = 4

        def forward(self, x: Tensor) -> Tensor:
            return x[:, : self.width] * 2

    model = nn.Sequential(nn.Linear(16, 16), Growing(), nn.Tanh())
    module = planned(model)
    model[1].width = 5
    with pytest.raises(ExecutionError, match=r'"1.Growing" returns .*\(8, 5\).*but the plan has .*\(8, 4\)'):
        module(batch(8, 16))


def test_a_parameter_changed_before_a_recomputation_is_noticed():
    model = mlp()
    loss = planned(model)(batch(8, 16))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(ExecutionError, match=r'"2\.Linear".*changed in place between forward and backward'):
        loss.backward()


def test_a_second_backward_is_refused():
    module = planned(mlp())
    loss = module(batch(8, 16))
    with pytest.raises(ExecutionError, match="retain_graph"):
        loss.backward(retain_graph=True)
    loss = module(batch(8, 16))
    with pytest.raises(ExecutionError, match="create_graph"):
        loss.backward(create_graph=True)
    loss = module(batch(8, 16))
    loss.backward()
    with pytest.raises((ExecutionError, RuntimeError), match="runs once"):
        loss.backward()


def test_a_plan_for_other_layers_is_refused():
    plan = make_plan(profile_layers(mlp(), (batch(8, 16),), loss=mean_square), "100%", solver="save-all")
    with pytest.raises(PlanMismatchError, match=r'"input" has 576 bytes, .* 512'):
        checkpointed(mlp(), plan, (batch(9, 16),), loss=mean_square)
    with pytest.raises(PlanMismatchError, match="operations"):
        checkpointed(mlp(nn.Tanh()), plan, (batch(8, 16),), loss=mean_square)
    with pytest.raises(PlanMismatchError):
        checkpointed(mlp(), plan, (batch(8, 16),), loss=mean_square, granularity="operations")


def test_a_budget_under_the_floor_names_the_layer():
    with pytest.raises(BudgetTooSmallError, match=r'"0\.Linear\.backward" and what must stay'):
        checkpointed(mlp(), "1%", (batch(8, 16),), loss=mean_square, granularity="layers")


def test_unknown_options_are_refused():
    with pytest.raises(InvalidOptionError, match="granularity"):
        checkpointed(mlp(), "80%", (batch(8, 16),), granularity="rows")
    with pytest.raises(InvalidOptionError, match="a plan or a budget"):
        checkpointed(mlp(), None, (batch(8, 16),))
    with pytest.raises(InvalidOptionError, match=r"needs an nn\.Module, got list"):
        checkpointed(list(mlp()), "80%", (batch(8, 16),), granularity="operations")
    with pytest.raises(InvalidOptionError, match=r"Linear.*give its layers as a list"):
        checkpointed(nn.Linear(16, 8), "80%", (batch(8, 16),), granularity="layers")
