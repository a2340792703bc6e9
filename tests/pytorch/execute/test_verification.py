from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import ExecutionError
from scheduler.pytorch import checkpointed
from tests.support.pytorch.planning import check_equal, train
from tests.support.pytorch.regression import batch, mean_square

FAST: dict[str, object] = {"costs": "flops", "solver": "save-all"}
GRANULARITIES = pytest.mark.parametrize("granularity", ["operations", "layers"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.tau = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h = h * self.tau  # the scaled line
        return torch.dropout(self.norm(h).tanh(), 0.25, self.training)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Block())


def planned(model: nn.Module, granularity: str = "operations", **options: object) -> nn.Module:
    given = {"loss": mean_square, **FAST, **options}
    return checkpointed(model, "100%", (batch(8, 16),), granularity=granularity, **given)


@GRANULARITIES
def test_an_equal_step_is_reported_on_one_line(granularity):
    module = planned(network(), granularity)
    found = module.verify(batch(8, 16))
    assert found.is_equal
    expected = "the planned step equals the plain one: loss, 12 gradients, 9 buffers, random state"
    assert repr(found) == found.summary() == expected
    assert found.to_dict() == {"is_equal": True, "gradients": 12, "buffers": 9, "first": "", "differences": []}


@GRANULARITIES
@pytest.mark.parametrize("accumulates", [False, True])
def test_verifying_leaves_the_model_as_one_planned_step_does(granularity, accumulates):
    model = network()
    one, other = planned(model, granularity), planned(copy.deepcopy(model), granularity)
    if accumulates:
        for module in (one, other):
            for parameter in module.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
    x = batch(8, 16, seed=1)
    torch.manual_seed(3)
    loss = one.verify(x).outputs
    state = torch.get_rng_state()
    torch.manual_seed(3)
    expected = other(x)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
    assert int(one.state_dict()["0.norm.num_batches_tracked"]) == 1


@GRANULARITIES
def test_a_module_that_verifies_its_first_step_trains_like_the_plain_model(granularity):
    model = network()
    plain = copy.deepcopy(model)
    batches = [((batch(8, 16, seed=seed),), {}) for seed in (1, 2)]
    module = planned(model, granularity, verify=True)
    check_equal(train(module, batches), train(plain, batches, mean_square))


def frozen(module: nn.Module) -> None:
    """Switch the guards of a planned module off, so that it may differ from the plain one."""
    module.runner.difference = lambda: ""


def test_a_difference_names_the_values_how_far_and_the_first_operation_with_its_line():
    model = network()
    module = planned(model)
    frozen(module)
    model[1].tau = 1.5
    found = module.verify(batch(8, 16))
    assert not found.is_equal
    assert found.differences[0].name == "loss"
    assert found.differences[0].largest > 0
    assert {"gradient of 1.linear.weight", "buffer 1.norm.running_mean"} <= {one.name for one in found.differences}
    assert found.first.startswith('aten.mul.Tensor in module "1"')
    assert f"{__file__}:" in found.first
    assert "h = h * self.tau  # the scaled line" in found.first
    assert repr(found).startswith("the planned step differs from the plain one: loss: differs by up to ")
    assert "The first operation that differs is aten.mul.Tensor" in found.summary()
    assert found.to_dict()["differences"][0]["name"] == "loss"


def test_verify_refuses_a_first_step_that_differs():
    model = network()
    module = planned(model, verify=True)
    frozen(module)
    model[1].tau = 1.5
    for _ in range(2):  # it does not pass at the second try either
        with pytest.raises(ExecutionError, match=r"(?s)differs from the plain one.*loss: differs.*h \* self\.tau"):
            module(batch(8, 16))
    assert int(model[0].norm.num_batches_tracked) == 0
    model[1].tau = 1.0
    module(batch(8, 16)).backward()


class Doubled(torch.autograd.Function):
    """The identity, with a gradient that depends on a number of Python's."""

    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, incoming):
        return incoming * Doubled.factor


def test_a_difference_in_the_backward_only_names_the_operation_there(monkeypatch):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return Doubled.apply(self.linear(x)).sin()

    module = planned(Model())
    assert module.verify(batch(8, 16)).is_equal
    frozen(module)
    monkeypatch.setattr(Doubled, "factor", 3.0)
    found = module.verify(batch(8, 16))
    assert [one.name for one in found.differences] == ["gradient of linear.bias", "gradient of linear.weight"]
    assert found.differences[0].relative == pytest.approx(1 / 3)
    assert found.first == "aten.mul.Tensor in DoubledBackward"


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * noise()


def noise() -> float:
    return random.random() if Draws.training else 1.0


def test_a_model_that_is_not_deterministic_is_told_from_a_plan_that_is_wrong(monkeypatch):
    monkeypatch.setattr(Draws, "training", False, raising=False)
    module = planned(Draws(), verify=True)
    frozen(module)
    numbers = iter(range(2, 100))
    monkeypatch.setitem(globals(), "noise", lambda: float(next(numbers)))
    with pytest.warns(UserWarning, match="two plain steps differ in it too"):
        module(batch(8, 16)).backward()


def test_outputs_are_compared_with_made_up_gradients_which_are_not_kept():
    module = planned(network(), loss=None)
    x = batch(8, 16).requires_grad_()
    module = checkpointed(module.module, "100%", (x,), **FAST)
    found = module.verify(x)
    assert repr(found) == "the planned step equals the plain one: outputs, 13 gradients, 9 buffers, random state"
    assert x.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())
    found.outputs.sum().backward()
    assert x.grad is not None


def test_hooks_that_wait_for_gradients_run_once():
    module = planned(network())
    calls = []
    weight = module.module[0].linear.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
    module.verify(batch(8, 16))
    assert len(calls) == 1
    assert torch.equal(calls[0], weight.grad)


def test_each_plan_is_verified_where_plans_are_made_for_other_calls():
    module = planned(network(), on_mismatch="plan", verify=True)
    for rows in (8, 4, 8, 4):
        module(batch(rows, 16)).backward()
    assert module.verify(batch(4, 16)).is_equal
    assert len(module.others.modules) == 1


def test_a_call_without_a_plan_cannot_be_verified():
    module = planned(network(), on_mismatch="plain")
    for change in (lambda: module.eval(), lambda: module.train() and setattr(module.module[0], "tau", 2.0)):
        change()
        with pytest.raises(ExecutionError, match="runs without a plan, so there is nothing to verify"):
            module.verify(batch(8, 16))


def test_a_generator_of_the_users_is_put_back_and_compared():
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)
            self.generator = torch.Generator().manual_seed(7)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + torch.rand(16, generator=self.generator))

    model = Noisy()
    module = planned(model)
    twin = torch.Generator().manual_seed(7)
    for _ in range(2):
        assert module.verify(batch(8, 16)).is_equal
        torch.rand(16, generator=twin)
        assert torch.equal(model.generator.get_state(), twin.get_state())
