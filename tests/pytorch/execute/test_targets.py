"""Ways to hand a loss its target: each is read anew in every step."""

from __future__ import annotations

import collections
import copy
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scheduler.errors import ExecutionError
from scheduler.pytorch import checkpointed, trace

Loss = Callable[..., Tensor]
Way = tuple[Loss | None, Callable[[Tensor], object]]
"""A loss, and a function that hands it its target."""

TARGET = torch.zeros(6, dtype=torch.long)
SCOPE: dict[str, Tensor] = {}


def target(step: int) -> Tensor:
    return (torch.arange(6) * 5 + step) % 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Pair(NamedTuple):
    name: str
    labels: Tensor


@dataclass
class Batch:
    labels: Tensor
    name: str = "batch"


@dataclass(frozen=True)
class Frozen:
    labels: Tensor


@dataclass(frozen=True)
class Nested:
    inner: Frozen


class Slotted:
    __slots__ = ("labels",)

    def __init__(self, labels: Tensor) -> None:
        self.labels = labels


class Criterion:
    latest = TARGET

    def __init__(self) -> None:
        self.batch: dict[str, Tensor] = {"labels": TARGET}

    @property
    def labels(self) -> Tensor:
        return self.batch["labels"]

    def loss(self, output: Tensor) -> Tensor:
        return F.cross_entropy(output, self.batch["labels"])

    def loss_of_property(self, output: Tensor) -> Tensor:
        return F.cross_entropy(output, self.labels)

    def loss_of_class(self, output: Tensor) -> Tensor:
        return F.cross_entropy(output, self.latest)

    def __call__(self, output: Tensor) -> Tensor:
        return self.loss(output)


class LossModule(nn.Module):
    labels: Tensor

    def __init__(self, *, as_buffer: bool) -> None:
        super().__init__()
        if as_buffer:
            self.register_buffer("labels", TARGET.clone())
        else:
            self.labels = TARGET

    def forward(self, output: Tensor) -> Tensor:
        return F.cross_entropy(output, self.labels)


def direct_closure(model: nn.Module) -> Way:
    labels = TARGET

    def hand(value: Tensor) -> None:
        nonlocal labels
        labels = value

    return lambda output: F.cross_entropy(output, labels), hand


def global_variable(model: nn.Module) -> Way:
    return lambda output: F.cross_entropy(output, TARGET), lambda value: globals().update(TARGET=value)


def dict_in_globals(model: nn.Module) -> Way:
    SCOPE["labels"] = TARGET
    return lambda output: F.cross_entropy(output, SCOPE["labels"]), lambda value: SCOPE.update(labels=value)


def dict_in_closure(model: nn.Module) -> Way:
    batch = {"labels": TARGET}
    return lambda output: F.cross_entropy(output, batch["labels"]), lambda value: batch.update(labels=value)


def rebound_dict(model: nn.Module) -> Way:
    batch = {"labels": TARGET}

    def hand(value: Tensor) -> None:
        nonlocal batch
        batch = {"labels": value}

    return lambda output: F.cross_entropy(output, batch["labels"]), hand


def entry_of_list(model: nn.Module) -> Way:
    batch = [None, TARGET]
    return lambda output: F.cross_entropy(output, batch[1]), lambda value: batch.__setitem__(1, value)


def entry_of_tuple(model: nn.Module) -> Way:
    batch = (None, TARGET)

    def hand(value: Tensor) -> None:
        nonlocal batch
        batch = (None, value)

    return lambda output: F.cross_entropy(output, batch[1]), hand


def field_of_namedtuple(model: nn.Module) -> Way:
    batch = Pair("a", TARGET)

    def hand(value: Tensor) -> None:
        nonlocal batch
        batch = Pair("a", value)

    return lambda output: F.cross_entropy(output, batch.labels), hand


def nested_dict(model: nn.Module) -> Way:
    batch = {"inputs": {}, "targets": {"all": [TARGET]}}
    return (
        lambda output: F.cross_entropy(output, batch["targets"]["all"][0]),
        lambda value: batch["targets"].update(all=[value]),
    )


def field_of_dataclass(model: nn.Module) -> Way:
    batch = Batch(TARGET)
    return lambda output: F.cross_entropy(output, batch.labels), lambda value: setattr(batch, "labels", value)


def field_of_frozen_dataclass(model: nn.Module) -> Way:
    batch = Nested(Frozen(TARGET))

    def hand(value: Tensor) -> None:
        nonlocal batch
        batch = Nested(Frozen(value))

    return lambda output: F.cross_entropy(output, batch.inner.labels), hand


def attribute_in_slots(model: nn.Module) -> Way:
    batch = Slotted(TARGET)
    return lambda output: F.cross_entropy(output, batch.labels), lambda value: setattr(batch, "labels", value)


def attribute_of_object(model: nn.Module) -> Way:
    holder = Criterion()
    return (
        lambda output: F.cross_entropy(output, holder.batch["labels"]),
        lambda value: setattr(holder, "batch", {"labels": value}),
    )


def attribute_of_class(model: nn.Module) -> Way:
    return Criterion().loss_of_class, lambda value: setattr(Criterion, "latest", value)


def attribute_of_function(model: nn.Module) -> Way:
    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output, loss.labels)

    loss.labels = TARGET
    return loss, lambda value: setattr(loss, "labels", value)


def bound_method(model: nn.Module) -> Way:
    holder = Criterion()
    return holder.loss, lambda value: setattr(holder, "batch", {"labels": value})


def callable_object(model: nn.Module) -> Way:
    holder = Criterion()
    return holder, lambda value: setattr(holder, "batch", {"labels": value})


def property_of_object(model: nn.Module) -> Way:
    holder = Criterion()
    return holder.loss_of_property, lambda value: setattr(holder, "batch", {"labels": value})


def buffer_of_loss_module(model: nn.Module) -> Way:
    loss = LossModule(as_buffer=True)
    return loss, lambda value: loss.labels.copy_(value)


def other_buffer_of_loss_module(model: nn.Module) -> Way:
    loss = LossModule(as_buffer=True)
    return loss, lambda value: setattr(loss, "labels", value)


def attribute_of_loss_module(model: nn.Module) -> Way:
    loss = LossModule(as_buffer=False)
    return loss, lambda value: setattr(loss, "labels", value)


def loss_module_in_closure(model: nn.Module) -> Way:
    loss = LossModule(as_buffer=True)
    return lambda output: loss(output), lambda value: setattr(loss, "labels", value)


def keyword_of_partial(model: nn.Module) -> Way:
    loss = functools.partial(F.cross_entropy, target=TARGET)
    return loss, lambda value: loss.keywords.update(target=value)


def argument_of_partial(model: nn.Module) -> Way:
    batch = [TARGET]
    loss = functools.partial(lambda batch, output: F.cross_entropy(output, batch[0]), batch)
    return loss, lambda value: batch.__setitem__(0, value)


def rebound_partial(model: nn.Module) -> Way:
    criterion = functools.partial(F.cross_entropy, target=TARGET)

    def hand(value: Tensor) -> None:
        nonlocal criterion
        criterion = functools.partial(F.cross_entropy, target=value)

    return lambda output: criterion(output), hand


def default_argument(model: nn.Module) -> Way:
    def loss(output: Tensor, labels: Tensor = TARGET) -> Tensor:
        return F.cross_entropy(output, labels)

    return loss, lambda value: setattr(loss, "__defaults__", (value,))


def default_of_keyword(model: nn.Module) -> Way:
    def loss(output: Tensor, *, labels: Tensor = TARGET) -> Tensor:
        return F.cross_entropy(output, labels)

    return loss, lambda value: setattr(loss, "__kwdefaults__", {"labels": value})


def closure_of_helper(model: nn.Module) -> Way:
    inner, hand = direct_closure(model)
    return lambda output: inner(output) * 2.0, hand


def global_of_helper(model: nn.Module) -> Way:
    return lambda output: helper(output) * 2.0, lambda value: globals().update(TARGET=value)


def helper(output: Tensor) -> Tensor:
    return F.cross_entropy(output, TARGET)


def wrapped_function(model: nn.Module) -> Way:
    inner, hand = direct_closure(model)

    @functools.wraps(inner)
    def loss(*args: Tensor) -> Tensor:
        return inner(*args)

    return loss, hand


class WithTarget(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.labels = TARGET
        self.state = {"labels": TARGET}
        self.pieces = [TARGET]

    def forward(self, x: Tensor) -> Tensor:
        labels = {"attribute": self.labels, "dict": self.state["labels"], "list": self.pieces[0]}
        return F.cross_entropy(super().forward(x), labels[self.kind])


def attribute_of_model(model: nn.Module) -> Way:
    return None, lambda value: setattr(model, "labels", value)


def dict_of_model(model: nn.Module) -> Way:
    return None, lambda value: model.state.update(labels=value)


def list_of_model(model: nn.Module) -> Way:
    return None, lambda value: model.pieces.__setitem__(0, value)


def deque(model: nn.Module) -> Way:
    batches = collections.deque([TARGET], maxlen=1)
    return lambda output: F.cross_entropy(output, batches[-1]), batches.append


def default_dict(model: nn.Module) -> Way:
    batch: dict[str, Tensor] = collections.defaultdict(lambda: TARGET, labels=TARGET)
    return lambda output: F.cross_entropy(output, batch["labels"]), lambda value: batch.update(labels=value)


def weights_of_classes(model: nn.Module) -> Way:
    """New weights in every step, drawn from the target, and the target itself."""
    labels, weights = TARGET, torch.ones(4)

    def hand(value: Tensor) -> None:
        nonlocal labels, weights
        labels, weights = value, 1.0 + torch.bincount(value, minlength=4)

    return lambda output: nn.CrossEntropyLoss(weight=weights)(output, labels), hand


def criterion_with_weights(model: nn.Module) -> Way:
    criterion = nn.CrossEntropyLoss(weight=torch.ones(4))

    def hand(value: Tensor) -> None:
        criterion.weight = 1.0 + torch.bincount(value, minlength=4)

    return lambda output: criterion(output, TARGET), hand


def teacher(model: nn.Module) -> Way:
    network, inputs = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)), torch.randn(6, 3)

    def loss(output: Tensor) -> Tensor:
        with torch.no_grad():
            goal = network(inputs)
        return F.cross_entropy(output, goal)

    def hand(value: Tensor) -> None:
        with torch.no_grad():
            network[0].weight += value[:4, None]

    return loss, hand


def namespace(model: nn.Module) -> Way:
    batch = types.SimpleNamespace(labels=TARGET)
    return lambda output: F.cross_entropy(output, batch.labels), lambda value: setattr(batch, "labels", value)


def named_by_strings(model: nn.Module) -> Way:
    batch = types.SimpleNamespace(labels_0=TARGET, other=1.0 + torch.zeros(4))

    def hand(value: Tensor) -> None:
        batch.labels_0, batch.other = value, 1.0 + torch.bincount(value, minlength=4)

    def loss(output: Tensor) -> Tensor:
        labels = [getattr(batch, f"labels_{i}") for i in range(1)]
        return F.cross_entropy(output, labels[0], weight=getattr(batch, "other"))  # noqa: B009

    return loss, hand


WAYS = [
    direct_closure, global_variable, dict_in_globals, dict_in_closure, rebound_dict, entry_of_list, entry_of_tuple,
    field_of_namedtuple, nested_dict, field_of_dataclass, field_of_frozen_dataclass, attribute_in_slots,
    attribute_of_object, attribute_of_class, attribute_of_function, bound_method, callable_object, property_of_object,
    buffer_of_loss_module, other_buffer_of_loss_module, attribute_of_loss_module, loss_module_in_closure,
    keyword_of_partial, argument_of_partial, rebound_partial, default_argument, default_of_keyword, closure_of_helper,
    global_of_helper, wrapped_function, deque, default_dict, weights_of_classes, criterion_with_weights, teacher,
    namespace, named_by_strings,
]  # fmt: skip
WAYS_OF_MODEL = {"attribute": attribute_of_model, "dict": dict_of_model, "list": list_of_model}


class Branching(Net):
    """A model that only TorchDynamo captures: a direct trace cannot know the contents of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool((x != x).any()):
            raise ValueError("x must be finite")
        return super().forward(x)


def check(model: nn.Module, way: Callable[[nn.Module], Way], monkeypatch: pytest.MonkeyPatch) -> None:
    """Train three steps with another target in each, planned and plainly."""
    monkeypatch.setattr(sys.modules[__name__], "TARGET", target(0))
    monkeypatch.setattr(sys.modules[__name__], "SCOPE", {})
    monkeypatch.setattr(Criterion, "latest", target(0))
    torch.manual_seed(0)
    loss, hand = way(model)
    x = torch.randn(6, 5)
    planned = checkpointed(model, "100%", (x,), loss=loss, costs="flops")
    losses = []
    for step in (1, 2, 3):
        hand(target(step))
        x = torch.randn(6, 5)
        result = planned(x)
        result.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        expected = model(x) if loss is None else loss(model(x))
        expected.backward()
        assert torch.equal(result, expected), step
        for one, other in zip(gradients, model.parameters(), strict=True):
            assert torch.equal(one, other.grad), step
        model.zero_grad()
        losses.append(result.item())
    assert len(set(losses)) == 3


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("network", [Net, Branching])
def test_the_loss_finds_another_target_in_every_step(network, way, monkeypatch):
    check(network(), way, monkeypatch)


@pytest.mark.parametrize("kind", WAYS_OF_MODEL)
def test_the_model_finds_another_target_in_every_step(kind, monkeypatch):
    check(WithTarget(kind), WAYS_OF_MODEL[kind], monkeypatch)


def check_steps(model: nn.Module, loss: Loss, hand: Callable[[int], object] = lambda step: None) -> None:
    """Compare three planned steps with plain ones in loss, gradients and the buffers of the model."""
    x = torch.randn(6, 5)
    planned = checkpointed(model, "100%", (x,), loss=loss, costs="flops")
    for step in range(3):
        hand(step)
        x = torch.randn(6, 5)
        with torch.random.fork_rng():
            planned(x).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        loss(model(x)).backward()
        for one, other in zip(gradients, model.parameters(), strict=True):
            assert torch.equal(one, other.grad), step
        model.zero_grad()


networks = pytest.mark.parametrize("network", [Net, Branching])


@networks
def test_two_places_of_one_tensor_may_hold_two_tensors_later(network):
    batch = {"one": torch.ones(6, 4), "other": torch.ones(6, 4)}
    batch["other"] = batch["one"]
    check_steps(
        network(),
        lambda output: (output * batch["one"] - output.square() * batch["other"]).sum(),
        lambda step: batch.update(one=torch.randn(6, 4), other=torch.randn(6, 4)),
    )


@networks
def test_an_entry_that_two_names_reach_must_stay_one_tensor(network):
    one = {"labels": torch.ones(6, 4)}
    holder = Batch(one)
    x = torch.randn(6, 5)
    planned = checkpointed(
        network(),
        "100%",
        (x,),
        loss=lambda output: (output * one["labels"] - output.square() * holder.labels["labels"]).sum(),
        costs="flops",
    )
    planned(x).backward()
    holder.labels = {"labels": torch.zeros(6, 4)}
    with pytest.raises(ExecutionError, match=r"holder\.labels\['labels'\].* were one tensor when the plan was made"):
        planned(x)


@networks
def test_the_input_may_be_the_target(network):
    class Encoder(network):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ torch.ones(4, 5)

    batch = {"x": torch.randn(6, 5), "mask": torch.ones(3)}
    model = Encoder()
    loss = lambda output: F.mse_loss(output, batch["x"])  # noqa: E731
    planned = checkpointed(model, "100%", (batch["x"],), loss=loss, costs="flops")
    for _ in range(2):
        batch["x"] = torch.randn(6, 5)
        for x in (batch["x"], torch.randn(6, 5)):
            planned(x).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            loss(model(x)).backward()
            assert all(map(torch.equal, gradients, [parameter.grad for parameter in model.parameters()]))
            model.zero_grad()


@networks
def test_a_tensor_that_is_not_read_is_not_part_of_the_step(network):
    batch = {"labels": TARGET, "unread": torch.zeros(1000)}
    x = torch.randn(6, 5)
    graph = trace(network(), (x,), loss=lambda output: F.cross_entropy(output, batch["labels"]), costs="flops")
    constants = [name for name in graph.resident if name.startswith("constant")]
    assert constants == ["constant:loss: batch['labels']"]


@networks
def test_parameters_in_a_closure_are_those_of_the_model(network):
    model = network()
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    check_steps(model, lambda output: output.square().sum() + sum(weight.norm() for weight in weights))
    check_steps(model, lambda output: output.square().sum() + sum(part.norm() for part in model.parameters()))


@networks
@pytest.mark.parametrize("frozen", [True, False])
def test_a_teacher_follows_its_own_flags_and_keeps_its_statistics(network, frozen):
    teacher = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).requires_grad_(not frozen)
    reference = copy.deepcopy(teacher)

    def loss(output: Tensor, teacher: nn.Module) -> Tensor:
        with torch.no_grad():
            goal = teacher(output.detach())
        return F.mse_loss(output, goal)

    model, x = network(), torch.randn(6, 5)
    planned = checkpointed(model, "100%", (x,), loss=lambda output: loss(output, teacher), costs="flops")
    for step in range(3):
        torch.manual_seed(step)
        planned(x).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        torch.manual_seed(step)
        loss(model(x), reference).backward()
        assert all(map(torch.equal, gradients, [parameter.grad for parameter in model.parameters()]))
        assert all(map(torch.equal, teacher.buffers(), reference.buffers()))
        model.zero_grad()
    teacher[2].p = 0.25
    with pytest.raises(ExecutionError, match=r"teacher.*\.p was 0\.5 when the plan was made, is 0\.25"):
        planned(x)
    teacher[2].p = 0.5
    teacher.eval()
    with pytest.raises(ExecutionError, match=r"teacher.*training was True"):
        planned(x)


@networks
def test_trainable_tensors_outside_the_model_get_their_gradients(network):
    model, scales, layers = network(), [torch.ones(4, requires_grad=True)], [nn.Linear(4, 4)]
    x = torch.randn(6, 5)
    loss = lambda output: layers[0](output * scales[0]).square().sum()  # noqa: E731
    planned = checkpointed(model, "100%", (x,), loss=loss, costs="flops")
    tensors = [*scales, *layers[0].parameters(), *model.parameters()]
    planned(x).backward()
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    loss(model(x)).backward()
    assert all(map(torch.equal, gradients, [tensor.grad for tensor in tensors]))


@networks
def test_a_target_that_is_gone_or_of_another_shape_is_named(network):
    batch = {"labels": TARGET}
    x = torch.randn(6, 5)
    planned = checkpointed(
        network(), "100%", (x,), loss=lambda output: F.cross_entropy(output, batch["labels"]), costs="flops"
    )
    batch["labels"] = torch.zeros(5, dtype=torch.long)
    with pytest.raises(ExecutionError, match=r"loss: batch\['labels'\] was a tensor of shape \(6,\)"):
        planned(x)
    del batch["labels"]
    with pytest.raises(ExecutionError, match=r"batch"):
        planned(x)


@networks
def test_an_array_is_part_of_the_plan_and_another_one_is_named(network):
    batch = {"labels": np.arange(6) % 4}
    model, x = network(), torch.randn(6, 5)
    loss = lambda output: F.cross_entropy(output, torch.as_tensor(batch["labels"]))  # noqa: E731
    planned = checkpointed(model, "100%", (x,), loss=loss, costs="flops")
    assert torch.equal(planned(x), loss(model(x)))
    batch["labels"] = np.zeros(6, dtype=np.int64)
    with pytest.raises(ExecutionError, match=r"loss: batch\['labels'\] was array"):
        planned(x)


@dataclass
class Output:
    value: Tensor
    kind: str = "scores"


@networks
def test_a_dataclass_that_the_model_returns_is_returned(network):
    class Wrapped(network):
        def forward(self, x: Tensor) -> Output:
            return Output(super().forward(x))

    model, x = Wrapped(), torch.randn(6, 5)
    planned = checkpointed(model, "100%", (x,), costs="flops")
    result = planned(x)
    assert isinstance(result, Output)
    assert result.kind == "scores"
    F.cross_entropy(result.value, target(1)).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    F.cross_entropy(model(x).value, target(1)).backward()
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in model.parameters()]))


class Sample:
    """An object that is no dataclass, with slots and a dict of its own."""

    __slots__ = ("__dict__", "x")

    def __init__(self, x: Tensor, labels: Tensor) -> None:
        self.x = x
        self.labels = labels


class Mapped(dict):  # type: ignore[type-arg]
    @property
    def labels(self) -> Tensor:
        return self["labels"]


class Encoded(collections.UserDict):  # type: ignore[type-arg]
    """As the tokenizer of transformers returns it."""

    def __init__(self, data: dict[str, Tensor]) -> None:
        super().__init__(data)
        self._encodings = [object()]

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass(frozen=True)
class Whole:
    x: Tensor
    targets: Nested
    scale: float = 1.0


ARGUMENTS = {
    "a dataclass": lambda x, labels: Whole(x, Nested(Frozen(labels))),
    "a plain object": Sample,
    "a subclass of dict": lambda x, labels: Mapped(x=x, labels=labels),
    "an encoding": lambda x, labels: Encoded({"x": x, "labels": labels}),
    "a namespace": lambda x, labels: types.SimpleNamespace(x=x, labels=labels),
    "a dict": lambda x, labels: {"x": x, "labels": labels},
}


@networks
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_fields_of_an_argument_are_read_in_every_step(network, kind):
    class OfBatch(network):
        def forward(self, batch: object) -> Tensor:
            if isinstance(batch, Whole):
                return F.cross_entropy(super().forward(batch.x), batch.targets.inner.labels) * batch.scale
            if isinstance(batch, dict | Encoded):
                return F.cross_entropy(super().forward(batch["x"]), batch["labels"])
            return F.cross_entropy(super().forward(batch.x), batch.labels)

    model, make = OfBatch(), ARGUMENTS[kind]
    planned = checkpointed(model, "100%", (make(torch.randn(6, 5), target(0)),), costs="flops")
    for step in range(3):
        batch = make(torch.randn(6, 5), target(step))
        planned(batch).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        model(batch).backward()
        assert all(map(torch.equal, gradients, [parameter.grad for parameter in model.parameters()]))
        model.zero_grad()


def test_the_field_of_an_argument_that_differs_is_named():
    class OfBatch(Net):
        def forward(self, batch: Whole) -> Tensor:
            return F.cross_entropy(super().forward(batch.x), batch.targets.inner.labels) * batch.scale

    x = torch.randn(6, 5)
    planned = checkpointed(OfBatch(), "100%", (Whole(x, Nested(Frozen(target(0)))),), costs="flops")
    with pytest.raises(ExecutionError, match=r"args\[0\]\.scale is 2\.0, but the plan has 1\.0"):
        planned(Whole(x, Nested(Frozen(target(0))), scale=2.0))
    with pytest.raises(ExecutionError, match=r"shape of input tensor args\[0\]\.targets\.inner\.labels is \(5,\)"):
        planned(Whole(x, Nested(Frozen(target(0)[:5]))))
