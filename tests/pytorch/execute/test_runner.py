from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scheduler.errors import ExecutionError, InvalidOptionError, PlanMismatchError
from scheduler.plan import Plan
from scheduler.pytorch import checkpointed
from scheduler.pytorch.measurement.memory import FlopCounter, StorageTracker, resident_tensors, training_step
from scheduler.pytorch.models.catalog import make_model
from scheduler.pytorch.tracing import capture
from scheduler.simulator import simulate
from tests.support.pytorch.modules import Mutating
from tests.support.pytorch.planning import (
    SCHEDULES,
    check_equal,
    check_like_autograd,
    planned,
    recompute_most,
    save_everything,
    train,
)
from tests.support.pytorch.regression import batch, mean_square, mlp

schedules = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


@schedules
def test_a_plain_network_trains_as_under_autograd(schedule):
    batches = [((batch(8, 16, seed=seed),), {}) for seed in (1, 2)]
    check_like_autograd(mlp(), schedule, *batches, loss=mean_square)


@schedules
def test_dropout_is_replayed_exactly(schedule):
    batches = [((batch(32, 16, seed=seed),), {}) for seed in (1, 2)]
    check_like_autograd(mlp(nn.Dropout(0.4), nn.Tanh(), nn.Dropout(0.2)), schedule, *batches, loss=mean_square)


@schedules
def test_batch_norm_statistics_are_updated_once(schedule):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)) for _ in range(4))
    )
    batches = [((batch(4, 3, 8, 8, seed=seed),), {}) for seed in (1, 2)]
    check_like_autograd(model, schedule, *batches, loss=mean_square)


class CudnnNorm(nn.BatchNorm2d):
    """A batch norm by the operator that eager PyTorch runs on CUDA: its schema does not say what it changes."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return torch.ops.aten.cudnn_batch_norm(x, self.weight, self.bias, *statistics, True, self.momentum, self.eps)[0]


def use_cudnn_norms(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, CudnnNorm(child.num_features))
        use_cudnn_norms(child)


@schedules
def test_cudnns_batch_norm_is_captured_with_its_own_operators(schedule):
    case = make_model("resnet50", batch_size=2, width=8, size=32)
    plain = copy.deepcopy(case.module)
    use_cudnn_norms(case.module)
    batches = [case.batch(seed) for seed in (0, 1)]
    module, captured, made = planned(case.module, schedule, *batches[0])
    norms = [operation.name for operation in captured.graph.operations if "batch_norm" in operation.name]
    assert sum("_batch_norm_with_update_functional" in name for name in norms) == len(norms) / 2 == 53
    check_equal(train(module, batches), train(plain, batches))
    with StorageTracker(resident_tensors(module, batches[0])) as tracker:
        training_step(module, *batches[0])()
    assert captured.graph.resident_bytes + tracker.peak_bytes == simulate(captured.graph, made).peak_bytes


@schedules
def test_batch_norm_shared_by_two_calls_updates_its_statistics_twice(schedule):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16)
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.linear(self.norm(x)).sin()).cos()

    torch.manual_seed(0)
    check_like_autograd(Shared(), schedule, ((batch(8, 16),), {}), ((batch(8, 16, seed=1),), {}), loss=mean_square)


@schedules
def test_frozen_batch_norm_in_a_training_model_reads_its_statistics(schedule):
    model = mlp(nn.BatchNorm1d(64))
    model[3].eval()
    model[3].running_mean.fill_(0.3)
    check_like_autograd(model, schedule, ((batch(8, 16),), {}), loss=mean_square)


@schedules
def test_tied_weights_get_one_summed_gradient(schedule):
    model = mlp()
    model[2].weight = nn.Parameter(model[2].weight.detach()[:, :64])
    model.add_module("again", nn.Linear(8, 64))
    model.add_module("tied", nn.Linear(64, 64))
    model.tied.weight = model[2].weight
    check_like_autograd(model, schedule, ((batch(8, 16),), {}), loss=mean_square)


@schedules
def test_frozen_and_unused_parameters_get_no_gradient(schedule):
    model = mlp()
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model.unused = None
    model.register_parameter("spare", nn.Parameter(torch.ones(3)))
    module = check_like_autograd(model, schedule, ((batch(8, 16),), {}), loss=mean_square)
    assert model.spare.grad is None
    assert model[0].weight.grad is None
    assert len(list(module.parameters())) == 7


class Pair(nn.Module):
    """Takes keyword arguments of every kind and returns nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, options: dict[str, object], scale: float = 1.0) -> dict[str, object]:
        hidden = self.linear(x).sin() * scale
        hidden = self.linear(hidden + options["shift"]).cos()
        return {
            "pair": (hidden, [hidden[:, 0], hidden.sum()]),
            "mask": hidden > 0,
            "name": "pair",
            "input": x,
            "weight": self.linear.weight.t(),
            "detached": hidden.detach(),
        }


@schedules
def test_keyword_arguments_and_nested_outputs_are_kept(schedule):
    torch.manual_seed(0)
    model = Pair()
    plain = copy.deepcopy(model)
    kwargs = {"options": {"shift": batch(16, seed=2), "deep": [1, None]}, "scale": 0.5}
    x = batch(8, 16)
    module, _, _ = planned(model, schedule, (x,), kwargs)
    results = [m(x, **kwargs) for m in (module, plain)]
    for result in results:
        loss = result["pair"][0].square().sum() + 3 * result["pair"][1][0].sum() - result["pair"][1][1]
        (loss + result["weight"].square().sum()).backward()
    ours, theirs = results
    assert ours["name"] == "pair"
    assert ours["input"] is x
    for key in ("mask", "weight", "detached"):
        assert torch.equal(ours[key], theirs[key])
        assert ours[key].requires_grad == theirs[key].requires_grad
    assert torch.equal(ours["pair"][1][0], theirs["pair"][1][0])
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6, msg=name)


@schedules
def test_a_buffer_is_never_read_after_its_mutation(schedule):
    batches = [((batch(8, 16, seed=seed),), {}) for seed in (1, 2)]
    check_like_autograd(Mutating(), schedule, *batches, loss=lambda y: y.sum())


@schedules
def test_a_buffer_replaced_in_forward_is_updated(schedule):
    class Average(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.register_buffer("average", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x).sin()
            self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
            return (hidden - self.average).cos()

    torch.manual_seed(0)
    batches = [((batch(8, 16, seed=seed),), {}) for seed in (1, 2)]
    check_like_autograd(Average(), schedule, *batches, loss=mean_square)


@schedules
def test_an_input_changed_in_place_is_changed_once(schedule):
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(batch(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            y = ((x + 1).sin() @ self.weight).sin() @ self.weight
            x.mul_(0.5)
            return (y + x).cos().sum()

    model = Halving()
    plain = copy.deepcopy(model)
    module, _, _ = planned(model, schedule, (batch(8, 16),))
    ours, theirs = batch(8, 16), batch(8, 16)
    for _ in range(2):
        module(ours).backward()
        plain(theirs).backward()
        assert torch.equal(ours, theirs)
    assert torch.equal(model.weight.grad, plain.weight.grad)


@schedules
def test_gradients_of_inputs_are_returned(schedule):
    model = mlp()
    plain = copy.deepcopy(model)
    x, y = batch(8, 16).requires_grad_(), batch(8, 16).requires_grad_()
    module, _, _ = planned(model, schedule, (x,), None, mean_square)
    module(x).backward()
    mean_square(plain(y)).backward()
    assert torch.equal(x.grad, y.grad)


@schedules
def test_autocast_gives_the_gradients_of_autocast(schedule):
    model = mlp(nn.Dropout(0.1), nn.LayerNorm(64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        module, _, _ = planned(model, schedule, (batch(8, 16),), None, mean_square)
    results = []
    for step in (
        training_step(module, (batch(8, 16),)),
        training_step(copy.deepcopy(model), (batch(8, 16),), loss=mean_square),
    ):
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(step())
    assert torch.equal(*results)
    with pytest.raises(ExecutionError, match="autocast"):
        module(batch(8, 16))


def test_autocast_recomputation_equals_autocast_without():
    results = []
    for schedule in SCHEDULES.values():
        model = mlp(nn.Dropout(0.1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            module, _, _ = planned(model, schedule, (batch(8, 16),), None, mean_square)
            torch.manual_seed(3)
            loss = module(batch(8, 16))
        loss.backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@schedules
def test_without_a_loss_the_incoming_gradients_are_planned(schedule):
    model = mlp()
    plain = copy.deepcopy(model)
    x = batch(8, 16)
    module, captured, made = planned(model, schedule, (x,))
    mean_square(module(x)).backward()
    mean_square(plain(x)).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    # The gradient of a sum arrives expanded, with strides of 0.
    model.zero_grad()
    plain.zero_grad()
    module(x).sum().backward()
    plain(x).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert simulate(captured.graph, made).peak_bytes > captured.graph.resident_bytes


@schedules
def test_several_forwards_may_be_outstanding(schedule):
    model = mlp(nn.Dropout(0.3), nn.BatchNorm1d(64))
    plain = copy.deepcopy(model)
    module, _, _ = planned(model, schedule, (batch(8, 16),), None, mean_square)
    outcomes = []
    for target in (module, lambda x: mean_square(plain(x))):
        torch.manual_seed(1)
        losses = [target(batch(8, 16, seed=seed)) for seed in (1, 2, 3)]
        for position in (1, 0, 2):
            losses[position].backward()
        outcomes.append([loss.detach() for loss in losses])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_changed_between_forward_and_backward_is_noticed():
    model = mlp()
    module, _, _ = planned(model, recompute_most, (batch(8, 16),), None, mean_square)
    loss = module(batch(8, 16))
    with torch.no_grad():
        model[2].weight += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_and_a_second_derivative_are_refused():
    model = mlp()
    module, _, _ = planned(model, save_everything, (batch(8, 16),), None, mean_square)
    with pytest.raises(ExecutionError, match="retain_graph"):
        module(batch(8, 16)).backward(retain_graph=True)
    with pytest.raises(ExecutionError, match="create_graph"):
        module(batch(8, 16)).backward(create_graph=True)


def test_a_loss_that_is_never_used_leaves_no_memory_behind():
    model = mlp()
    module, _, _ = planned(model, save_everything, (batch(7, 16),), None, mean_square)
    loss = module(batch(7, 16))
    saved = [weakref.ref(tensor.untyped_storage()) for tensor in loss.grad_fn.saved_tensors if tensor.shape == (7, 64)]
    assert saved
    del loss
    gc.collect()
    assert all(reference() is None for reference in saved)


@pytest.mark.parametrize(
    ("args", "kwargs", "difference"),
    [
        ((batch(9, 16),), {}, r"shape of input tensor args\[0\]"),
        ((batch(16, 8).t(),), {}, r"strides of input tensor args\[0\]"),
        ((batch(8, 16).double(),), {}, r"dtype of input tensor args\[0\]"),
        ((batch(8, 16).requires_grad_(),), {}, r"requires_grad of input tensor args\[0\]"),
        ((), {"input": batch(8, 16)}, r"kwargs\['input'\] is new"),
    ],
)
def test_another_call_is_refused_with_what_differs(args, kwargs, difference):
    module, _, _ = planned(mlp(), save_everything, (batch(8, 16),), None, mean_square)
    with pytest.raises(ExecutionError, match=difference):
        module(*args, **kwargs)


def test_another_constant_or_training_flag_is_refused():
    model = Pair()
    kwargs = {"options": {"shift": batch(16)}, "scale": 0.5}
    module, _, _ = planned(model, save_everything, (batch(8, 16),), kwargs)
    with pytest.raises(ExecutionError, match=r"kwargs\['scale'\] is 2\.0, but the plan has 0\.5"):
        module(batch(8, 16), options=kwargs["options"], scale=2.0)
    module, _, _ = planned(mlp(nn.Dropout()), save_everything, (batch(8, 16),), None, mean_square)
    module.module[3].eval()
    with pytest.raises(ExecutionError, match=r"model\.3\.training was True"):
        module(batch(8, 16))
    module.module[3].train()
    module.module[0].weight.requires_grad_(False)
    with pytest.raises(ExecutionError, match=r'parameter "0\.weight"'):
        module(batch(8, 16))


def test_a_call_outside_the_plan_can_run_plainly():
    model = mlp()
    captured = capture(model, (batch(8, 16),), None, mean_square)
    from scheduler.pytorch.execute.runner import build

    schedule = save_everything(captured.graph)
    module = build(model, captured, schedule, (batch(8, 16),), loss=mean_square, on_mismatch="plain")
    assert torch.equal(module(batch(3, 16)), mean_square(model(batch(3, 16))))


def test_without_gradients_and_in_eval_the_model_runs_plainly():
    model = mlp(nn.Dropout())
    module, _, _ = planned(model, save_everything, (batch(8, 16),), None, mean_square)
    with torch.no_grad():
        assert not module(batch(5, 16)).requires_grad
    module.eval()
    assert not model.training
    assert torch.equal(module(batch(8, 16)), mean_square(model(batch(8, 16))))
    module.train()
    module(batch(8, 16)).backward()


def test_names_and_state_are_those_of_the_original_module():
    model = mlp(nn.BatchNorm1d(64))
    module, _, _ = planned(model, save_everything, (batch(8, 16),), None, mean_square)
    assert list(module.state_dict()) == list(model.state_dict())
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert [name for name, _ in module.named_buffers("x")] == [name for name, _ in model.named_buffers("x")]
    assert all(a is b for a, b in zip(module.parameters(), model.parameters(), strict=True))
    other = mlp(nn.BatchNorm1d(64))
    nn.init.ones_(other[0].weight)
    module.load_state_dict(other.state_dict())
    assert torch.equal(model[0].weight, torch.ones(64, 16))
    outer = nn.ModuleDict({"inner": module})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in model.state_dict()]
    nn.init.zeros_(other[0].weight)
    outer.load_state_dict({f"inner.{name}": value for name, value in other.state_dict().items()})
    assert not model[0].weight.any()


def test_an_optimizer_step_changes_what_the_plan_runs_with():
    model, x = mlp(), batch(8, 16)
    module, _, _ = planned(model, recompute_most, (x,), None, mean_square)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_gradients_accumulate_over_calls():
    model, plain = mlp(), mlp()
    module, _, _ = planned(model, recompute_most, (batch(8, 16),), None, mean_square)
    for seed in (1, 2):
        module(batch(8, 16, seed=seed)).backward()
        mean_square(plain(batch(8, 16, seed=seed))).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_recomputation_costs_the_flops_that_the_schedule_adds():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
    counts = []
    for schedule in SCHEDULES.values():
        module, captured, made = planned(model, schedule, (batch(8, 16),), None, mean_square)
        with FlopCounter() as counter:
            training_step(module, (batch(8, 16),))()
        counts.append(counter.flops)
        again = simulate(captured.graph, made).recomputed
        matrix_products = sum(runs for name, runs in again.items() if "addmm" in name)
        # One linear layer forward: 2 * 8 * 16 * 16 FLOPs; its backward twice that.
        assert counter.flops == 2 * 8 * 16 * 16 * (3 * 8 - 1 + matrix_products)
    assert counts[1] > counts[0]


def test_a_plan_file_runs_on_a_fresh_capture(tmp_path):
    from scheduler.api import make_plan

    case = make_model("convnet", batch_size=4, width=8, depth=4, size=16)
    plan = make_plan(
        capture(case.module, case.args, case.kwargs, case.loss).graph, "80%", solver="greedy", time_limit=2.0
    )
    plan.save(tmp_path / "plan.json")
    again = make_model("convnet", batch_size=4, width=8, depth=4, size=16)
    module = checkpointed(again.module, Plan.load(tmp_path / "plan.json"), again.args)
    expected = train(case.module, [case.batch(1), case.batch(2)])
    check_equal(train(module, [case.batch(1), case.batch(2)]), expected)


def test_a_plan_for_another_model_is_refused():
    from scheduler.api import make_plan

    plan = make_plan(capture(mlp(), (batch(8, 16),), None, mean_square).graph, "100%", solver="save-all")
    with pytest.raises(PlanMismatchError, match="in the captured step"):
        checkpointed(mlp(), plan, (batch(9, 16),), loss=mean_square)
    with pytest.raises(PlanMismatchError, match="operations"):
        checkpointed(mlp(nn.Tanh()), plan, (batch(8, 16),), loss=mean_square)


def test_unknown_options_are_refused():
    with pytest.raises(InvalidOptionError, match="granularity"):
        checkpointed(mlp(), "80%", (batch(8, 16),), granularity="lines")
    with pytest.raises(InvalidOptionError, match="on_mismatch"):
        checkpointed(mlp(), "80%", (batch(8, 16),), on_mismatch="guess")


@schedules
def test_a_loss_module_with_its_own_tensors_is_part_of_the_step(schedule):
    class Classify(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cross_entropy = nn.CrossEntropyLoss(weight=torch.arange(1.0, 9.0))
            self.targets = torch.arange(8) % 8

        def forward(self, outputs: Tensor) -> Tensor:
            return self.cross_entropy(outputs, self.targets)

    check_like_autograd(mlp(), schedule, ((batch(8, 16),), {}), loss=Classify())


@schedules
def test_targets_in_the_closure_of_the_loss_are_read_in_every_step(schedule):
    model = mlp()
    plain = copy.deepcopy(model)
    targets = torch.arange(8) % 8
    module, _, _ = planned(model, schedule, (batch(8, 16),), None, lambda y: F.cross_entropy(y, targets))
    for shift in (1, 2):
        targets = (torch.arange(8) + shift) % 8
        module(batch(8, 16)).backward()
        F.cross_entropy(plain(batch(8, 16)), targets).backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    targets = torch.arange(7)
    with pytest.raises(ExecutionError, match=r"loss: targets was a tensor of shape \(8,\)"):
        module(batch(8, 16))
