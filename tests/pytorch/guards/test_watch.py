from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError
from scheduler.pytorch.capture.device_memory import NO_OTHER_MEMORY
from scheduler.pytorch.guards.outside_states import iterator_state
from scheduler.pytorch.guards.read_names import ReadNames
from scheduler.pytorch.guards.watch import Watch
from scheduler.pytorch.tracing import capture_watched

SCALE = 2.0
TABLE = {"weights": [1.0, 2.0]}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE * TABLE["weights"][0]


@dataclass
class Settings:
    mode: str = "sum"
    rates: list[float] = field(default_factory=lambda: [0.1, 0.2])
    unread: int = 0


@dataclass(frozen=True)
class Frozen:
    gain: float = 1.0


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Block(nn.Module):
    boost = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(4)
        self.tau = 1.0
        self.flag = True
        self.label = "a"
        self.sizes = (1, 2)
        self.chosen = {1, 2}
        self.settings = Settings()
        self.frozen = Frozen()
        self.slotted = Slotted()
        self.config = {"scale": 1.0, "deep": {"gains": [1.0]}}
        self.never_read = 1.0
        self.activation = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.drop(self.norm(self.linear(x)))) * self.tau * self.config["scale"]
        if self.flag and self.label == "a" and 1 in self.chosen and self.settings.mode == "sum":
            x = x * self.settings.rates[0] * self.config["deep"]["gains"][0] * self.sizes[0] * self.boost
        return scaled(self.rescaled(x)) * self.frozen.gain * self.slotted.gain

    def rescaled(self, x: Tensor) -> Tensor:
        return x * 1.0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Criterion:
    def __init__(self) -> None:
        self.beta = 0.5
        self.batch = {"target": torch.zeros(2, 4)}

    def __call__(self, output: Tensor) -> Tensor:
        return self.beta * (output - self.batch["target"]).square().mean()

    def loss(self, output: Tensor) -> Tensor:
        return self(output)


def assign(name: str, value: object) -> Callable[[Model], None]:
    """Set an attribute of the second block."""

    def change(model: Model) -> None:
        *path, last = name.split(".")
        setattr(functools.reduce(getattr, path, model.blocks[1]), last, value)

    return change


def put(name: str, key: object, value: object) -> Callable[[Model], None]:
    """Set an entry of a container in the second block."""

    def change(model: Model) -> None:
        functools.reduce(getattr, name.split("."), model.blocks[1])[key] = value

    return change


CHANGES: dict[str, tuple[Callable[[Model], object], str]] = {
    "a number": (assign("tau", 0.1), r"model\.blocks\.1\.tau was 1\.0 when the plan was made, is 0\.1"),
    "an int in place of an equal float": (assign("tau", 1), r"tau was 1\.0 .* is 1"),
    "a flag": (assign("flag", False), "flag was True"),
    "a string": (assign("label", "b"), "label was 'a'"),
    "a tuple": (assign("sizes", (1, 3)), r"sizes\[1\] was 2"),
    "a set": (lambda model: model.blocks[1].chosen.add(3), "chosen was"),
    "an attribute of a dataclass": (assign("settings.mode", "mean"), r"settings\.mode was 'sum'"),
    "an entry of a list in a dataclass": (put("settings.rates", 1, 0.5), r"settings\.rates\[1\] was 0\.2"),
    "a list that grows": (lambda model: model.blocks[1].settings.rates.append(1), "had 2 entries .* has 3"),
    "another frozen dataclass": (assign("frozen", Frozen(2.0)), r"frozen\.gain was 1\.0"),
    "an attribute in slots": (assign("slotted.gain", 2.0), r"slotted\.gain was 1\.0"),
    "an entry of a dict": (put("config", "scale", 2.0), r"config\['scale'\] was 1\.0"),
    "a new entry of a dict": (put("config", "other", 2.0), "config had 2 entries"),
    "an entry of nested containers": (
        lambda model: model.blocks[1].config["deep"].update(gains=[3.0]),
        r"config\['deep'\]\['gains'\]\[0\] was 1\.0",
    ),
    "the rate of a dropout": (assign("drop.p", 0.5), r"drop\.p was 0\.1"),
    "the momentum of a batch norm": (assign("norm.momentum", 0.5), r"norm\.momentum was 0\.1"),
    "a training flag": (lambda model: model.blocks[1].drop.eval(), r"drop\.training was True"),
    "an activation": (assign("activation", torch.tanh), "activation was"),
    "a submodule of the same class": (assign("linear", nn.Linear(4, 4)), r"linear was replaced"),
    "a submodule added": (lambda model: model.blocks.append(Block()), r"model\.blocks\.2 was added"),
    "a submodule removed": (lambda model: model.blocks.__delitem__(1), r"model\.blocks\.1 was removed"),
    "a parameter set to None": (assign("linear.bias", None), "bias was replaced"),
    "a method of an object": (assign("rescaled", lambda x: x), "rescaled was added"),
    "the forward of an object": (assign("linear.forward", lambda x: x), r"linear\.forward was added"),
    "a forward hook": (lambda model: model.blocks[1].linear.register_forward_hook(lambda *_: None), "hook .* added"),
    "a forward pre-hook": (
        lambda model: model.blocks[1].register_forward_pre_hook(lambda *_: None),
        r"hook in model\.blocks\.1\._forward_pre_hooks was added",
    ),
    "a backward hook": (lambda model: model.register_full_backward_hook(lambda *_: None), "hook .* added"),
    "a parametrization": (
        lambda model: nn.utils.parametrizations.weight_norm(model.blocks[1].linear),
        "linear was a Linear .* is a ParametrizedLinear",
    ),
    "another class": (assign("drop.__class__", nn.Identity), "drop was a Dropout"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_is_named(name: str) -> None:
    model = Model()
    watch = Watch(model, None)
    assert watch.difference() == ""
    change, expected = CHANGES[name]
    change(model)
    with pytest.raises(ValueError, match=expected):
        raise ValueError(watch.difference())
    assert watch.difference() != ""  # a change that was reported is not taken over


def test_a_change_that_no_code_can_read_is_no_difference() -> None:
    model = Model()
    watch = Watch(model, None)
    model.blocks[1].never_read = 2.0
    model.blocks[1].settings.unread = 2
    model.new = "value"
    assert watch.difference() == ""


def test_equal_values_in_other_objects_are_no_difference() -> None:
    model = Model()
    watch = Watch(model, None)
    model.blocks[1].config = {"scale": 1.0, "deep": {"gains": [1.0]}}
    model.blocks[1].settings = Settings()
    model.train()
    assert watch.difference() == ""
    model.blocks[1].config["deep"]["gains"][0] = 2.0
    assert "gains" in watch.difference()


def test_a_removed_hook_is_named() -> None:
    model = Model()
    handle = model.blocks[0].register_forward_hook(lambda *_: None)
    watch = Watch(model, None)
    assert watch.difference() == ""
    handle.remove()
    assert "hook in model.blocks.0._forward_hooks was removed" in watch.difference()


def test_a_hook_for_all_modules_is_named() -> None:
    watch = Watch(Model(), None)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert "_global_forward_hooks was added" in watch.difference()
    finally:
        handle.remove()
    assert watch.difference() == ""


def test_what_a_hook_reads_is_watched() -> None:
    gain = [1.0]
    model = Model()
    model.blocks[0].register_forward_hook(lambda module, args, output: output * gain[0])
    watch = Watch(model, None)
    gain[0] = 2.0
    assert "gain[0] was 1.0" in watch.difference()


def test_globals_of_the_model_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Model(), None)
    monkeypatch.setitem(TABLE, "weights", [3.0, 2.0])
    assert "scaled: TABLE['weights'][0] was 1.0" in watch.difference()
    monkeypatch.undo()
    assert watch.difference() == ""
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert "scaled: SCALE was 2.0 when the plan was made, is 3.0" in watch.difference()


def test_attributes_and_methods_of_classes_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Model(), None)
    monkeypatch.setattr(Block, "boost", 2.0)
    assert "Block.boost was 1.0" in watch.difference()
    monkeypatch.undo()
    monkeypatch.setattr(Block, "rescaled", lambda self, x: x)
    assert "Block.rescaled was" in watch.difference()
    monkeypatch.undo()
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x)
    assert "Linear.forward was" in watch.difference()


def closure() -> tuple[object, Callable[[float], None]]:
    beta = 0.5

    def loss(output: Tensor) -> Tensor:
        return output.sum() * beta

    def change(value: float) -> None:
        nonlocal beta
        beta = value

    return loss, change


def through_default() -> tuple[object, Callable[[float], None]]:
    def loss(output: Tensor, weights: list[float] = [0.5]) -> Tensor:  # noqa: B006
        return output.sum() * weights[0]

    return loss, lambda value: loss.__defaults__[0].__setitem__(0, value)


def through_object() -> tuple[object, Callable[[float], None]]:
    criterion = Criterion()
    return criterion, lambda value: setattr(criterion, "beta", value)


def through_method() -> tuple[object, Callable[[float], None]]:
    criterion = Criterion()
    return criterion.loss, lambda value: setattr(criterion, "beta", value)


def through_partial() -> tuple[object, Callable[[float], None]]:
    weights = {"beta": 0.5}
    return functools.partial(lambda output, w: output.sum() * w["beta"], w=weights), lambda value: weights.update(
        beta=value
    )


def through_helper() -> tuple[object, Callable[[float], None]]:
    loss, change = closure()
    return lambda output: loss(output) + 1, change


def through_module() -> tuple[object, Callable[[float], None]]:
    loss = nn.HuberLoss(delta=0.5)
    return lambda output: loss(output, output), lambda value: setattr(loss, "delta", value)


@pytest.mark.parametrize(
    "make",
    [closure, through_default, through_object, through_method, through_partial, through_helper, through_module],
)
def test_a_number_that_the_loss_reads_is_watched(make: Callable[[], tuple[object, Callable[[float], None]]]) -> None:
    loss, change = make()
    watch = Watch(Model(), loss)
    assert watch.difference() == ""
    change(0.25)
    with pytest.raises(ValueError, match=r"was 0\.5 when the plan was made, is 0\.25"):
        raise ValueError(watch.difference())
    change(0.5)
    assert watch.difference() == ""


def test_a_tensor_may_have_other_values_and_no_other_shape() -> None:
    criterion = Criterion()
    watch = Watch(Model(), criterion)
    criterion.batch = {"target": torch.ones(2, 4)}
    assert watch.difference() == ""
    criterion.batch["target"] = torch.ones(3, 4)
    assert "batch['target'] was a tensor of shape (2, 4)" in watch.difference()


def test_names_lead_through_helpers_and_not_into_libraries() -> None:
    read = ReadNames(Model(), None)
    assert {"tau", "scaled", "SCALE", "rescaled", "p", "momentum"} <= read.names
    assert scaled in read.functions
    assert not {"unread", "never_read"} & read.names
    assert all(not function.__module__.startswith("torch") for function in read.functions)


class Lazy(dict[str, float]):
    """Makes its entries when it is asked for them, as tables of models do that import each one then."""

    def __getitem__(self, key: str) -> float:
        raise AssertionError("the plan must not ask")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the plan must not ask")

    keys = values = items = __iter__  # type: ignore[assignment]


LAZY = Lazy(stored=1.0)


def test_a_dict_that_makes_its_entries_is_not_asked_for_them() -> None:
    class Model(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * dict.get(LAZY, "stored")

    captured, watch = capture_watched(
        Model(2, 2), (torch.ones(2),), {}, torch.sum, costs="flops", memory=NO_OTHER_MEMORY
    )
    assert captured.graph.operations
    assert watch.difference() == ""
    dict.__setitem__(LAZY, "stored", 2.0)
    assert "LAZY['stored'] was 1.0 when the plan was made, is 2.0" in watch.difference()


def test_a_cycle_of_objects_ends() -> None:
    model = Model()
    model.blocks[0].config["deep"]["gains"].append(model.blocks[0].config)
    watch = Watch(model, None)
    assert watch.difference() == ""
    model.blocks[0].config["scale"] = random.Random(0).random()
    assert "config['scale'] was 1.0" in watch.difference()


def test_a_change_is_found_although_another_one_is_accepted_in_the_same_step() -> None:
    model = Model()
    watch = Watch(model, None)
    model.blocks[1].settings = Settings()
    assert watch.difference() == ""
    model.blocks[0].settings = Settings()
    model.blocks[1].tau = 3.0
    assert "model.blocks.1.tau was 1.0" in watch.difference()


class Holder(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return x * len(self.held)


LARGE: dict[str, tuple[Callable[[], object], Callable[[object], object], str]] = {
    "lists in a list": (lambda: [[i] for i in range(2000)], lambda held: held[5].append(1), r"held\[5\] had 1 entries"),
    "lists in a dict": (
        lambda: {i: [i] for i in range(2000)},
        lambda held: held.update({5: [6]}),
        r"held\[5\]\[0\] was 5",
    ),
    "numbers in a dict": (lambda: {i: i for i in range(2000)}, lambda held: held.update({5: 6}), r"held was \{0: 0"),
    "tuples in a set": (lambda: {(1, 2)}, lambda held: held.add((3, 4)), r"held was \{\(1, 2\)\}"),
    "order of a dict": (
        lambda: {"a": 1, "b": 2},
        lambda held: held.update(a=held.pop("a")),
        r"the entries of model\.held have another order",
    ),
    "order of a large dict": (
        lambda: {i: i for i in range(2000)},
        lambda held: held.update({0: held.pop(0)}),
        r"held was \{0: 0",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_change_of_a_container_is_named_whatever_its_size(name: str) -> None:
    make, change, expected = LARGE[name]
    model = Holder(make())
    watch = Watch(model, None)
    assert watch.difference() == ""
    change(model.held)
    with pytest.raises(ValueError, match=expected):
        raise ValueError(watch.difference())


def test_a_container_too_large_to_compare_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"model\.held may be read by the step and holds 100001 entries: at most"):
        Watch(Holder([(i,) for i in range(100_001)]), None)
    assert Watch(Holder([*range(100_001)]), None).difference() == ""


class Counted:
    """An iterator that holds a mapping."""

    def __init__(self, table: object) -> None:
        self.table = table

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        return 1


class Refusing(dict):  # type: ignore[type-arg]
    """A mapping whose methods fail."""

    def items(self) -> object:  # type: ignore[override]
        raise RuntimeError("not now")

    values = keys = __len__ = __iter__ = items  # type: ignore[assignment]


def test_the_methods_of_mappings_are_not_relied_on() -> None:
    held = Refusing()
    dict.__setitem__(held, "scale", scaled)
    read = ReadNames(nn.Linear(2, 2), functools.partial(lambda y, table: y, table=MappingProxyType(held)))
    assert read.names


def test_the_state_of_an_iterator_is_read_without_the_code_of_what_it_holds() -> None:
    source = iter(Counted(Refusing(a=1)))
    before = iterator_state(source)
    assert before == iterator_state(source)
