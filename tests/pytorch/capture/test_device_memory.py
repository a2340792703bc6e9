from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop

import scheduler as sc
from scheduler.errors import InvalidBudgetError, InvalidOptionError
from scheduler.pytorch import checkpointed, profile_layers, trace
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes
from scheduler.pytorch.models.catalog import make_model
from tests.support.pytorch.regression import mean_square


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))


def batch() -> Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def counted(graph: sc.Graph, prefix: str) -> int:
    return sum(graph.tensor(name).size_bytes for name in graph.resident if name.startswith(prefix))


def traced(model: nn.Module, **options: object) -> sc.Graph:
    return trace(model, (batch(),), loss=mean_square, costs="flops", **options)


OPTIMIZERS = {
    "AdamW": AdamW,
    "AdamW for all at once": lambda p: AdamW(p, foreach=True),
    "AdamW, fused": lambda p: AdamW(p, fused=True),
    "Adam with the largest second moments": lambda p: Adam(p, amsgrad=True),
    "SGD": SGD,
    "SGD with momentum": lambda p: SGD(p, momentum=0.9),
    "Adafactor": Adafactor,
    "Adagrad": Adagrad,
    "RMSprop": lambda p: RMSprop(p, momentum=0.5, centered=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_state_is_sized_before_its_first_step_as_after_it(make):
    model = network()
    optimizer = make(model.parameters())
    before = counted(traced(model, optimizer=optimizer), "optimizer:")
    mean_square(model(batch())).backward()
    optimizer.step()
    assert before == storage_bytes(state_tensors(optimizer))
    assert before == counted(traced(model, optimizer=optimizer), "optimizer:")


def test_memory_in_addition_to_the_step_is_named_and_adds_up():
    model = network()
    model[3].bias.requires_grad_(False)
    optimizer = AdamW([{"params": model[0].parameters()}, {"params": model[3].parameters(), "amsgrad": True}])
    graph = traced(model, reserve="1MiB", optimizer=optimizer)
    held = {name: graph.tensor(name).size_bytes for name in graph.resident if not name.startswith(("para", "buff"))}
    # Two moments and a step number per element of a parameter, three of a parameter with amsgrad.
    assert held == {
        "input:args[0]": 32 * 16 * 4,
        "reserve": 2**20,
        "optimizer:0.weight": 2 * 64 * 16 * 4 + 4,
        "optimizer:0.bias": 2 * 64 * 4 + 4,
        "optimizer:3.weight": 3 * 64 * 8 * 4 + 4,
    }
    plain = traced(model)
    assert graph.resident_bytes - plain.resident_bytes == sum(held.values()) - held["input:args[0]"]
    saved_all = [sc.simulate(g, sc.solve(g, 2**30, solver="save-all").schedule).peak_bytes for g in (graph, plain)]
    assert saved_all[0] - saved_all[1] == graph.resident_bytes - plain.resident_bytes


def test_sizing_leaves_the_optimizer_and_the_model_as_they_were():
    model = network()
    optimizer = AdamW(model.parameters())
    steps: list[object] = []
    optimizer.register_step_post_hook(lambda *arguments: steps.append(arguments))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    values = [parameter.clone() for parameter in model.parameters()]
    traced(model, optimizer=optimizer)
    assert not optimizer.state
    assert not steps
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())


def test_an_optimizer_whose_state_cannot_be_found_is_refused_with_what_to_do():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(InvalidOptionError, match=r"LBFGS cannot take a step .* reserve="):
        traced(model, optimizer=optimizer)
    with pytest.raises(InvalidOptionError, match=r"torch\.optim\.Optimizer, got str"):
        traced(model, optimizer="AdamW")
    wrapper = SGD(model.parameters())
    wrapper.inner = AdamW(model.parameters())
    with pytest.raises(InvalidOptionError, match="wraps another optimizer"):
        traced(model, optimizer=wrapper)
    with pytest.raises(InvalidBudgetError, match="must be >= 0, got -1"):
        traced(model, reserve=-1)


def test_a_step_and_its_adamw_need_the_predicted_memory():
    case = make_model("convnet", batch_size=8, width=8, depth=5, size=16)
    optimizer = AdamW(case.module.parameters(), foreach=False)
    module = checkpointed(
        case.module,
        "70%",
        case.args,
        loss=case.loss,
        costs="flops",
        solver="greedy",
        time_limit=2.0,
        optimizer=optimizer,
    )

    def train() -> None:
        optimizer.zero_grad()
        module(*case.args).backward()

    train()
    optimizer.step()
    resident = [*resident_tensors(module, case.args), *state_tensors(optimizer)]
    optimizer.zero_grad()
    with StorageTracker(resident) as tracker:
        train()
    assert storage_bytes(resident) == module.plan.graph.resident_bytes
    assert storage_bytes(resident) + tracker.peak_bytes == module.plan.peak_bytes <= module.plan.budget_bytes


@pytest.mark.parametrize("foreach", [False, True])
def test_what_the_optimizers_own_step_allocates_is_beyond_the_prediction(foreach):
    parameters = [nn.Parameter(torch.ones(32, 32)) for _ in range(10)]
    optimizer = AdamW(parameters, foreach=foreach)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        resident = [*parameters, *(parameter.grad for parameter in parameters), *state_tensors(optimizer)]
        with StorageTracker(resident) as tracker:
            optimizer.step()
    # One parameter after the other, each with three temporary tensors; or one temporary for all at once.
    assert tracker.peak_bytes == (10 if foreach else 3) * 32 * 32 * 4


def test_layers_count_memory_in_addition_to_theirs():
    model = network()
    optimizer = AdamW(model.parameters())
    plain = profile_layers(model, (batch(),), loss=mean_square)
    chain = profile_layers(model, (batch(),), loss=mean_square, reserve=1000, optimizer=optimizer)
    mean_square(model(batch())).backward()
    optimizer.step()
    expected = 1000 + storage_bytes(state_tensors(optimizer))
    assert chain.graph.resident_bytes - plain.graph.resident_bytes == expected
    assert sc.Chain.from_dict(chain.to_dict()) == chain
    options = {"granularity": "layers", "solver": "dp", "reserve": 1000, "optimizer": optimizer}
    module = checkpointed(list(model), "100%", (batch(),), loss=mean_square, **options)
    again = checkpointed(list(model), module.plan, (batch(),), loss=mean_square)
    assert counted(again.plan.graph, "optimizer:") == expected - 1000


def test_a_plan_states_the_memory_in_addition_to_the_step():
    model = network()
    optimizer = AdamW(model.parameters())
    module = checkpointed(
        model, "100%", (batch(),), loss=mean_square, costs="flops", solver="save-all", reserve=7, optimizer=optimizer
    )
    again = checkpointed(network(), module.plan, (batch(),), loss=mean_square)
    again(batch()).backward()
    assert all(parameter.grad is not None for parameter in again.parameters())
    with pytest.raises(InvalidOptionError, match=r"\['optimizer', 'reserve'\]"):
        checkpointed(model, module.plan, (batch(),), loss=mean_square, reserve=7, optimizer=optimizer)
