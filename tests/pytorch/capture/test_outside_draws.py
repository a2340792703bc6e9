"""What a step takes from outside torch is refused with the line of the code, or works as in plain PyTorch."""

from __future__ import annotations

import copy
import datetime
import itertools
import os
import random
import secrets
import time
import uuid
from collections.abc import Callable, Iterator
from time import perf_counter as tick

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError, ExecutionError
from scheduler.pytorch.checkpointing import checkpointed
from scheduler.pytorch.layerwise.profiling import profile_layers
from scheduler.pytorch.tracing import trace
from tests.support.pytorch.layered import plan_of_layers
from tests.support.pytorch.planning import recompute_most

OWN = torch.Generator().manual_seed(3)
RANDOM = random.Random(1)
STEPS = {"done": 0}


class Holder:
    def __init__(self) -> None:
        self.random = random.Random(2)
        self.numpy = np.random.default_rng(2)
        self.calls = 0


class Countdown:
    def __init__(self) -> None:
        self.left = 10

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.left -= 1
        return self.left


class Model(nn.Module):
    def __init__(self, draw: Callable[[Model, Tensor], Tensor], *, by_dynamo: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.draw, self.by_dynamo = draw, by_dynamo
        self.holder = Holder()
        self.table = {"rng": [random.Random(3)]}
        self.legacy = np.random.RandomState(4)
        self.generator = torch.Generator().manual_seed(5)
        self.bound = random.Random(6).uniform
        self.count = itertools.count()
        self.cycle = itertools.cycle([1.0, 2.0])
        self.list = iter([1.0, 2.0, 3.0])
        self.lazy = (float(i) for i in range(10))
        self.countdown = Countdown()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.by_dynamo and not torch.compiler.is_compiling():
            h.sum().item()  # cannot be captured directly
        return self.last(torch.tanh(self.draw(self, h))).sin()


def python_random(model: Model, h: Tensor) -> Tensor:
    return h * random.random()


def python_layer_drop(model: Model, h: Tensor) -> Tensor:
    return h if random.random() < 1e-9 else h.sin()


def python_shuffle(model: Model, h: Tensor) -> Tensor:
    order = [*range(8)]
    random.shuffle(order)
    return h[:, order]


def python_seeded(model: Model, h: Tensor) -> Tensor:
    random.seed(0)
    return h * 2


def own_random(model: Model, h: Tensor) -> Tensor:
    return h * model.holder.random.random()


def global_own_random(model: Model, h: Tensor) -> Tensor:
    return h * RANDOM.gauss(0.0, 1.0)


def own_random_in_containers(model: Model, h: Tensor) -> Tensor:
    return h * model.table["rng"][0].random()


def bound_method(model: Model, h: Tensor) -> Tensor:
    return h * model.bound(0.0, 1.0)


def closure(rng: random.Random) -> Callable[[Model, Tensor], Tensor]:
    def in_closure(model: Model, h: Tensor) -> Tensor:
        return h * rng.random()

    return in_closure


def random_without_seed(model: Model, h: Tensor) -> Tensor:
    return h * random.Random().random()


def system_random(model: Model, h: Tensor) -> Tensor:
    return h if random.SystemRandom().random() < 1e-9 else h.sin()


def secret(model: Model, h: Tensor) -> Tensor:
    return h * secrets.randbelow(7)


def numpy_random(model: Model, h: Tensor) -> Tensor:
    return h * float(np.random.rand())


def numpy_mask(model: Model, h: Tensor) -> Tensor:
    return h * torch.from_numpy(np.random.rand(8)).float()


def numpy_generator(model: Model, h: Tensor) -> Tensor:
    return h * model.holder.numpy.random()


def numpy_legacy(model: Model, h: Tensor) -> Tensor:
    return h * float(model.legacy.rand())


def numpy_without_seed(model: Model, h: Tensor) -> Tensor:
    return h * np.random.default_rng().random()


def clock(model: Model, h: Tensor) -> Tensor:
    return h * (time.time() % 1.0)


def clock_under_other_name(model: Model, h: Tensor) -> Tensor:
    return h if tick() < 0 else h.sin()


def clock_imported(model: Model, h: Tensor) -> Tensor:
    from time import monotonic

    return h * (monotonic() % 1.0)


def today(model: Model, h: Tensor) -> Tensor:
    return h * datetime.datetime.now().microsecond


def identifier(model: Model, h: Tensor) -> Tensor:
    return h * (uuid.uuid4().int % 7)


def system_bytes(model: Model, h: Tensor) -> Tensor:
    return h * os.urandom(1)[0]


def counter(model: Model, h: Tensor) -> Tensor:
    return h * next(model.count)


def cycle(model: Model, h: Tensor) -> Tensor:
    return h * next(model.cycle)


def list_iterator(model: Model, h: Tensor) -> Tensor:
    return h * next(model.list)


def generator_expression(model: Model, h: Tensor) -> Tensor:
    for factor in model.lazy:
        return h * factor
    return h


def own_iterator(model: Model, h: Tensor) -> Tensor:
    return h * next(model.countdown)


def count_in_object(model: Model, h: Tensor) -> Tensor:
    model.holder.calls += 1
    return h * model.holder.calls


def count_in_dict(model: Model, h: Tensor) -> Tensor:
    STEPS["done"] += 1
    return h * STEPS["done"]


def torch_seeded(model: Model, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h * torch.rand(h.shape)


def torch_seeded_inside(model: Model, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = torch.rand(h.shape)
    return h * noise


def own_generator_seeded(model: Model, h: Tensor) -> Tensor:
    model.generator.manual_seed(5)
    return h * torch.rand(h.shape, generator=model.generator)


def generator_made_inside(model: Model, h: Tensor) -> Tensor:
    return h * torch.rand(h.shape, generator=torch.Generator().manual_seed(0))


REFUSED = [
    python_random, python_layer_drop, python_shuffle, python_seeded, own_random, global_own_random,
    own_random_in_containers, bound_method, closure(random.Random(7)), random_without_seed, system_random,
    secret, numpy_random, numpy_mask, numpy_generator, numpy_legacy, numpy_without_seed, clock,
    clock_under_other_name, clock_imported, today, identifier, system_bytes, counter, cycle, list_iterator,
    torch_seeded, torch_seeded_inside, own_generator_seeded, generator_made_inside,
]  # fmt: skip

MARKS = (
    "random.", "rng", "bound(", "secrets.", "time()", "tick()", "monotonic()", "now()", "uuid", "urandom", "next(",
    "model.lazy", "seed", "legacy.", "numpy.", "RANDOM",
)  # fmt: skip


def states(model: Model) -> list[object]:
    generators = (torch.default_generator, OWN, model.generator)
    return [
        random.getstate(), RANDOM.getstate(), model.holder.random.getstate(), model.table["rng"][0].getstate(),
        np.random.get_state()[1].tobytes(), np.random.get_state()[2], model.holder.numpy.bit_generator.state,
        model.legacy.get_state()[1].tobytes(), *(generator.get_state().tolist() for generator in generators),
        model.holder.calls, dict(STEPS),
    ]  # fmt: skip


def refusal(model: Model, loss: Callable[[Tensor], Tensor] | None = None) -> str:
    before = states(model)
    with pytest.raises(CaptureError) as caught:
        trace(model, (torch.ones(4, 8),), loss=loss or torch.sum, costs="flops")
    assert states(model) == before
    return str(caught.value)


@pytest.mark.parametrize("draw", REFUSED, ids=lambda draw: draw.__name__)
def test_outside_draws_are_refused_with_their_line(draw: Callable[[Model, Tensor], Tensor]) -> None:
    message = refusal(Model(draw))
    first = draw.__code__.co_firstlineno
    lines = [f"test_outside_draws.py:{first + i}: " for i in range(1, 6)]
    line = next(line for line in lines if line in message)
    assert any(mark in message.partition(line)[2].partition(": ")[0] for mark in MARKS), message
    assert "outside of the step" in message


@pytest.mark.parametrize(
    ("draw", "line"), [(generator_expression, "for factor in model.lazy:"), (own_iterator, "self.left -= 1")]
)
def test_iterators_are_refused_with_the_line_that_advances_them(
    draw: Callable[[Model, Tensor], Tensor], line: str
) -> None:
    assert line in refusal(Model(draw))


@pytest.mark.parametrize("draw", [count_in_object, count_in_dict])
def test_counters_in_objects_are_refused_if_they_matter(draw: Callable[[Model, Tensor], Tensor]) -> None:
    assert "forward changes" in refusal(Model(draw))


def test_counters_in_objects_that_do_not_matter_are_put_back() -> None:
    def count(model: Model, h: Tensor) -> Tensor:
        model.holder.calls += 1
        return h

    model = Model(count)
    trace(model, (torch.ones(4, 8),), loss=torch.sum, costs="flops")
    assert model.holder.calls == 0


@pytest.mark.parametrize(
    "draw",
    [own_random, own_random_in_containers, numpy_random, numpy_mask, counter, count_in_object, count_in_dict],
)
def test_outside_draws_are_refused_when_torchdynamo_captures(draw: Callable[[Model, Tensor], Tensor]) -> None:
    message = refusal(Model(draw, by_dynamo=True))
    assert f"test_outside_draws.py:{draw.__code__.co_firstlineno + 1}: " in message
    assert "outside of the step" in message


@pytest.mark.parametrize("draw", [python_random, clock, identifier, numpy_generator, list_iterator, torch_seeded])
def test_no_outside_draw_is_silent_when_torchdynamo_captures(draw: Callable[[Model, Tensor], Tensor]) -> None:
    assert refusal(Model(draw, by_dynamo=True))


def test_draws_in_the_loss_are_refused() -> None:
    def loss(output: Tensor) -> Tensor:
        return output.sum() * random.random()

    message = refusal(Model(lambda _, h: h), loss)
    assert "return output.sum() * random.random()" in message


def test_draws_in_hooks_are_refused() -> None:
    model = Model(lambda _, h: h)
    model.first.register_forward_hook(lambda module, args, output: output * random.random())
    assert "register_forward_hook" in refusal(model)


def test_an_own_generator_with_a_fixed_seed_made_in_forward_is_not_refused() -> None:
    def draw(model: Model, h: Tensor) -> Tensor:
        return h * random.Random(0).random()

    trace(Model(draw), (torch.ones(4, 8),), loss=torch.sum, costs="flops")


def rand(model: Model, h: Tensor) -> Tensor:
    return h * torch.rand(h.shape, generator=OWN)


def randn(model: Model, h: Tensor) -> Tensor:
    return h * torch.randn(h.shape, generator=model.generator)


def bernoulli_in_place(model: Model, h: Tensor) -> Tensor:
    return h * torch.empty_like(h).bernoulli_(0.5, generator=model.generator)


def bernoulli(model: Model, h: Tensor) -> Tensor:
    return h * torch.bernoulli(torch.full_like(h, 0.5), generator=OWN)


def uniform_in_place(model: Model, h: Tensor) -> Tensor:
    return h * torch.empty(h.shape).uniform_(generator=OWN)


def normal_in_place(model: Model, h: Tensor) -> Tensor:
    return h * torch.empty(h.shape).normal_(generator=OWN)


def permutation(model: Model, h: Tensor) -> Tensor:
    return h[torch.randperm(len(h), generator=OWN)]


def several(model: Model, h: Tensor) -> Tensor:
    h = nn.functional.dropout(h * torch.rand(h.shape, generator=OWN), 0.3)
    return h * torch.rand(h.shape, generator=model.generator) * torch.rand(h.shape, generator=OWN)


@pytest.mark.filterwarnings("ignore::scheduler.errors.SlowPlanWarning")
@pytest.mark.parametrize(
    "draw", [rand, randn, bernoulli_in_place, bernoulli, uniform_in_place, normal_in_place, permutation, several]
)
def test_own_generators_draw_as_in_plain_pytorch(draw: Callable[[Model, Tensor], Tensor]) -> None:
    generators = [OWN, torch.default_generator]
    kept = [generator.get_state() for generator in generators]
    torch.manual_seed(0)
    plain = Model(lambda model, h: draw(model, torch.tanh(draw(model, h))))
    plain.load_state_dict({name: value.detach().clone() for name, value in plain.state_dict().items()})
    planned = Model(plain.draw)
    planned.load_state_dict(copy.deepcopy(plain.state_dict()))
    generators += [plain.generator, planned.generator]
    before = [generator.get_state() for generator in generators]
    step = checkpointed(planned, "100%", (torch.zeros(512, 8),), loss=torch.sum, costs="flops", solver="recompute-all")
    assert all(torch.equal(now.get_state(), then) for now, then in zip(generators, before, strict=True))
    assert any("set_state" in segment.source for segment in step.program.backward)
    for _ in range(3):
        x = torch.randn(512, 8)
        start = [generator.get_state() for generator in generators]
        expected = torch.sum(plain(x))
        expected.backward()
        wanted = [generator.get_state() for generator in generators[:3]]
        for generator, state in zip(generators[:2], start[:2], strict=True):
            generator.set_state(state)
        found = step(x)
        found.backward()
        assert torch.equal(found, expected)
        for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        assert torch.equal(OWN.get_state(), wanted[0])
        assert torch.equal(torch.get_rng_state(), wanted[1])
        assert torch.equal(planned.generator.get_state(), wanted[2])
    for generator, state in zip(generators[:2], kept, strict=True):
        generator.set_state(state)


class Factor(nn.Module):
    """A layer that scales its input by what it draws."""

    def __init__(self, draw: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.source = Model(draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.source.draw(self.source, x)).sin()


@pytest.mark.parametrize(
    "draw",
    [
        python_random, python_layer_drop, own_random, numpy_random, numpy_generator, numpy_legacy, clock, today,
        system_random, system_bytes, identifier, counter, cycle, list_iterator, count_in_object,
    ],
)  # fmt: skip
def test_layers_that_draw_from_outside_are_refused_by_name(draw: Callable[[Model, Tensor], Tensor]) -> None:
    layers = nn.Sequential(nn.Linear(8, 8), Factor(draw))
    before = states(layers[1].source)
    with pytest.raises(CaptureError, match=r'layer "1\.Factor"'):
        profile_layers(layers, (torch.ones(4, 8),), loss=torch.sum)
    assert states(layers[1].source) == before


@pytest.mark.parametrize("draw", [rand, randn, torch_seeded_inside])
def test_layers_replay_own_generators(draw: Callable[[Model, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(*(Factor(draw) for _ in range(4)))
    plain = nn.Sequential(*(Factor(draw) for _ in range(4)))
    plain.load_state_dict(copy.deepcopy(layers.state_dict()))
    before = OWN.get_state(), layers[0].source.generator.get_state()
    graph = profile_layers(layers, (torch.ones(64, 8),), loss=torch.sum).graph
    plan = plan_of_layers(graph, recompute_most(graph))
    step = checkpointed(layers, plan, (torch.ones(64, 8),), loss=torch.sum)
    assert torch.equal(OWN.get_state(), before[0])
    assert torch.equal(layers[0].source.generator.get_state(), before[1])
    for _ in range(3):
        x = torch.randn(64, 8)
        start = OWN.get_state()
        expected = torch.sum(plain(x))
        expected.backward()
        wanted = OWN.get_state()
        OWN.set_state(start)
        found = step(x)
        found.backward()
        assert torch.equal(found, expected)
        assert torch.equal(OWN.get_state(), wanted)
        for ours, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
            assert ours.grad is theirs.grad is None or torch.equal(ours.grad, theirs.grad)


def test_a_changed_environment_variable_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(model: Model, h: Tensor) -> Tensor:
        return h * float(os.environ.get("SCALE", "2"))

    step = checkpointed(Model(scale), "100%", (torch.ones(4, 8),), loss=torch.sum, costs="flops")
    step(torch.ones(4, 8))
    monkeypatch.setenv("SCALE", "3")
    with pytest.raises(ExecutionError, match=r"os.environ\['SCALE'\] was None when the plan was made, is '3'"):
        step(torch.ones(4, 8))
