"""A model with decisions computes what it computes plainly, in the number of runs that they demand."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from scheduler.errors import ExecutionError
from scheduler.graph.decisions import Decision
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors
from scheduler.pytorch.modules.replay import Replay, is_following


class Counted(nn.Module):
    """A layer that counts the runs of its forward outside of its attributes."""

    def __init__(self, width: int, runs: Counter[str], name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.name = name
        self.runs = lambda: runs.update([name])

    def forward(self, x: Tensor) -> Tensor:
        self.runs()
        return torch.tanh(self.linear(x)).exp()


class Nested(nn.Module):
    """Two blocks of two layers, the second of which calls its first layer twice."""

    def __init__(self, runs: Counter[str]) -> None:
        super().__init__()
        self.first = nn.Sequential(Counted(4, runs, "first.0"), Counted(4, runs, "first.1"))
        self.second = Twice(Counted(4, runs, "second.layer"))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


class Twice(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x)) + 1


def step(model: nn.Module, replay: Replay | None, *args: Any, **kwargs: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Run a step and return its loss and gradients."""
    if replay is None:
        loss = model(*args, **kwargs)
    else:
        with replay.following():
            loss = model(*args, **kwargs)
    loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return loss.detach(), gradients


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        ([], {"first.0": 1, "first.1": 1, "second.layer": 2}),
        ([("first", 0)], {"first.0": 2, "first.1": 2, "second.layer": 2}),
        ([("first.0", 0)], {"first.0": 2, "first.1": 1, "second.layer": 2}),
        ([("first", 0), ("first.0", 0)], {"first.0": 3, "first.1": 2, "second.layer": 2}),
        ([("", 0), ("first", 0), ("first.0", 0)], {"first.0": 4, "first.1": 3, "second.layer": 4}),
        ([("second.layer", 0)], {"first.0": 1, "first.1": 1, "second.layer": 3}),
        ([("second", 0), ("second.layer", 1)], {"first.0": 1, "first.1": 1, "second.layer": 5}),
    ],
)
def test_a_call_runs_once_more_for_each_recomputed_call_around_it(
    decisions: list[tuple[str, int]], expected: dict[str, int]
) -> None:
    runs: Counter[str] = Counter()
    model = Nested(runs)
    x = torch.randn(3, 4)
    plain = step(model, None, x)
    runs.clear()
    replay = Replay(model, [Decision(*one) for one in decisions], calls={"first.1": 1, "second.layer": 2})
    with set_checkpoint_early_stop(False):
        planned = step(model, replay, x)
    assert runs == expected
    torch.testing.assert_close(planned, plain, rtol=0, atol=0)


def test_a_recomputation_ends_once_it_has_everything_that_the_backward_needs() -> None:
    runs: Counter[str] = Counter()
    model = nn.Sequential(nn.Sequential(Counted(4, runs, "0.0"), Counted(4, runs, "0.1")))
    replay = Replay(model, [Decision("0", 0), Decision("0.1", 0)])
    with replay.following():
        loss = model(torch.randn(3, 4)).sum()
    loss.backward()
    assert runs == {"0.0": 2, "0.1": 2}


def test_calls_that_the_plan_does_not_know_follow_the_strictest_decision() -> None:
    runs: Counter[str] = Counter()
    model = Nested(runs)
    step(model, Replay(model, [Decision("second.layer", 0)], calls={"second.layer": 1}), torch.randn(3, 4))
    assert runs["second.layer"] == 4


def test_modules_that_were_not_measured_follow_the_decisions_for_others_of_their_kind() -> None:
    runs: Counter[str] = Counter()
    model = nn.ModuleDict({"layers": nn.ModuleList(Counted(4, runs, str(i)) for i in range(3)), "head": nn.Tanh()})
    replay = Replay(model, [Decision("layers.0", 0)], calls={"layers.0": 1, "layers.1": 1})
    with replay.following():
        x = torch.randn(3, 4)
        for layer in model["layers"]:
            x = layer(x)
    x.sum().backward()
    assert runs == {"0": 2, "1": 1, "2": 2}


class OwnCheckpoint(nn.Module):
    """Recomputes a block itself, as `enable_gradient_checkpointing` of a diffusers model does."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_calls_that_a_model_recomputes_itself_follow_no_decision() -> None:
    runs: Counter[str] = Counter()
    block = nn.Sequential(*(Counted(4, runs, str(i)) for i in range(3)))
    model = nn.Sequential(OwnCheckpoint(block), Nested(runs))
    x = torch.randn(3, 4)
    plain = step(copy.deepcopy(model), None, x)
    runs.clear()
    planned = step(model, Replay(model, [Decision("0.block.1", 0), Decision("1.first", 0)]), x)
    torch.testing.assert_close(planned, plain, rtol=0, atol=0)
    assert runs == {"0": 2, "1": 2, "2": 2, "first.0": 2, "first.1": 2, "second.layer": 2}


def test_the_model_is_left_as_it_was() -> None:
    model = Nested(Counter())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with Replay(model, [Decision("first", 0), Decision("first.1", 0)]).following():
        model(torch.randn(3, 4))
        assert "forward" in vars(model.first)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_a_name_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r'"third", but Nested has no module of this name'):
        Replay(Nested(Counter()), [Decision("third", 0)])


class Routed(nn.Module):
    """Takes the next of some routes at each call."""

    def __init__(self, *routes: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.next = iter(routes).__next__

    def forward(self, x: Tensor) -> Tensor:
        return self.next()(self.linear(x)).exp()


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (torch.tanh, lambda x: x[:2].tanh(), r'a call of "0"'),
        (lambda x: x.tanh().tanh(), torch.tanh, r'recomputing a call of "0" saved fewer tensors'),
    ],
)
def test_a_recomputation_that_takes_another_route_is_named(
    first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor], text: str
) -> None:
    model = nn.Sequential(Routed(first, second))
    with Replay(model, [Decision("0", 0)]).following():
        loss = model(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match=text):
        loss.backward()


class FailingError(ValueError):
    """An error of the user's."""


def test_an_error_in_a_recomputed_call_keeps_its_type_and_leaves_the_model_as_it_was() -> None:
    def fail(x: Tensor) -> Tensor:
        raise FailingError("no")

    model = nn.Sequential(Routed(fail, torch.tanh))
    replay = Replay(model, [Decision("0", 0)])
    with pytest.raises(FailingError, match="no"), replay.following():
        model(torch.randn(3, 4))
    assert "forward" not in vars(model[0])
    assert not is_following()


def test_threads_follow_their_own_plans() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    replays = [Replay(model, [Decision(name, 0)]) for name in ("0", "1", "1.0", "2")]
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])

    def train(number: int) -> bool:
        for _ in range(20):
            with replays[number].following() if number < len(replays) else contextlib.nullcontext():
                loss = model(x).sum()
            found = torch.autograd.grad(loss, [*model.parameters()])
            if not all(map(torch.equal, found, expected)):
                return False
        return True

    with ThreadPoolExecutor(5) as pool:
        assert all(pool.map(train, range(5)))
    assert not any("forward" in vars(module) for module in model.modules())


def test_hooks_of_a_recomputed_module_run_once() -> None:
    model, seen = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    with Replay(model, [Decision("0", 0)]).following():
        loss = model(torch.randn(3, 4, requires_grad=True)).sum()
    loss.backward()
    assert seen == ["pre", "forward", "backward"]


def test_two_models_may_share_modules() -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    one, other = nn.Sequential(shared, nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), shared)
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(other(one(x)).sum(), [*shared.parameters()])
    with Replay(one, [Decision("0", 0)]).following():
        inner = one(x)
    with Replay(other, [Decision("1", 0), Decision("1.0", 0)]).following():
        loss = other(inner).sum()
    for gradient, plain in zip(torch.autograd.grad(loss, [*shared.parameters()]), expected, strict=True):
        assert torch.equal(gradient, plain)


def test_a_training_flag_or_attribute_that_is_changed_later_does_not_affect_the_recomputation() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()))
    x = torch.randn(64, 4)
    torch.manual_seed(0)
    expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
    torch.manual_seed(0)
    with Replay(model, [Decision("0", 0)]).following():
        loss = model(x).sum()
    model.eval()
    model[0][1].p = 0.9
    for gradient, plain in zip(torch.autograd.grad(loss, [*model.parameters()]), expected, strict=True):
        assert torch.equal(gradient, plain)
    assert not model[0].training
    assert model[0][1].p == 0.9


def test_parameters_replaced_for_one_call_are_those_of_the_recomputation() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    others = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
    x = torch.randn(3, 4)
    expected = torch.autograd.grad(torch.func.functional_call(model, others, x).sum(), [*others.values()])
    with Replay(model, [Decision("0", 0)]).following():
        loss = torch.func.functional_call(model, others, x).sum()
    for gradient, plain in zip(torch.autograd.grad(loss, [*others.values()]), expected, strict=True):
        assert torch.equal(gradient, plain)


def test_a_parameter_that_is_changed_before_the_backward_is_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with Replay(model, [Decision("0", 0)]).following():
        loss = model(torch.randn(3, 4)).sum()
    with torch.no_grad():
        model[0][0].bias.add_(1)
    with pytest.raises(ExecutionError, match=r'the parameter "bias" was changed in place between a call of "0"'):
        loss.backward()


def test_autocast_is_that_of_the_forward() -> None:
    model, x = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        expected = torch.autograd.grad(model(x).float().sum(), [*model.parameters()])
        with Replay(model, [Decision("0", 0)]).following():
            loss = model(x).float().sum()
    for gradient, plain in zip(torch.autograd.grad(loss, [*model.parameters()]), expected, strict=True):
        assert torch.equal(gradient, plain)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_modules_are_recomputed_as_a_whole_without_compiling_again(*, in_place: bool) -> None:
    compiled: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        compiled.append(graph)
        return graph

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    plain, x = copy.deepcopy(model), torch.randn(64, 4)
    if in_place:
        model[0].compile(backend=compiler)
    else:
        model[0] = torch.compile(model[0], backend=compiler)
    model(x)
    count = len(compiled)
    tracker = StorageTracker(resident_tensors(model, x))
    with tracker, Replay(model, [Decision("0", 0)]).following():
        loss = model(x).sum()
    assert tracker.live_bytes == 4 * 64 * 4 + 4  # the input of the last layer, and the loss
    found = torch.autograd.grad(loss, [*model.parameters()])
    for gradient, expected in zip(found, torch.autograd.grad(plain(x).sum(), [*plain.parameters()]), strict=True):
        torch.testing.assert_close(gradient, expected)
    assert len(compiled) == count
