from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Never

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scheduler.pytorch.guards import object_words
from scheduler.pytorch.guards.quick_check import Objects
from scheduler.pytorch.torch_private import guards, tensor_words

CHECKS = {
    "by words": object_words.properties_check,
    "by guards of torch": guards.tensors_check,
    "one by one": guards.tensors_check_one_by_one,
}


def tensors() -> list[Tensor]:
    return [*(nn.Parameter(torch.ones(3, 3)) for _ in range(40)), torch.ones(()), torch.ones(2, 2, 2)]


def with_data(change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], object]:
    return lambda held: setattr(held[3], "data", change(held[3].data))


CHANGES_OF_PROPERTIES: dict[str, Callable[[list[Tensor]], object]] = {
    "requires_grad": lambda held: held[3].requires_grad_(False),
    "requires_grad of a constant": lambda held: held[41].requires_grad_(True),
    "requires_grad by an operation": lambda held: held[41].mul_(held[3][0, 0]),
    "detached from an operation": lambda held: held[42].detach_(),
    "shape in the same memory": with_data(lambda data: data.view(9)),
    "more dimensions than have their place": with_data(lambda data: data.view(1, 1, 1, 1, 3, 3)),
    "dtype": with_data(Tensor.double),
    "size in place": lambda held: held[41].resize_(8),
    "size of a tensor of many dimensions": lambda held: held[43].resize_(2),
    "requires_grad of a tensor of many dimensions": lambda held: held[43].requires_grad_(True),
    "class": lambda held: setattr(held[3], "__class__", Tensor),
    "swapped with another tensor": lambda held: torch.utils.swap_tensors(held[40], nn.Parameter(torch.ones(2))),
}
OTHER_CHANGES: dict[str, Callable[[list[Tensor]], object]] = {
    "values": with_data(lambda data: data * 2),
    "values in place": lambda held: held[41].add_(1),
    "gradient": lambda held: held[3].sum().backward(),
    "attribute": lambda held: setattr(held[3], "note", 1),
}


def all_kinds() -> list[Tensor]:
    """Return tensors of which the last ones have a history, or more dimensions than have their place."""
    computed = torch.ones(2).mul_(torch.ones(2, requires_grad=True))
    return [*tensors(), computed, torch.ones(1, 1, 1, 1, 1, 1)]


@pytest.mark.filterwarnings("ignore:.*resize:UserWarning")
@pytest.mark.parametrize("name", CHANGES_OF_PROPERTIES)
@pytest.mark.parametrize("make", CHECKS.values(), ids=CHECKS)
def test_properties_of_tensors_count(make: Callable[..., guards.Check], name: str) -> None:
    held = all_kinds()
    check = make(held)
    assert check()
    CHANGES_OF_PROPERTIES[name](held)
    assert not check()


@pytest.mark.parametrize("name", OTHER_CHANGES)
@pytest.mark.parametrize("make", CHECKS.values(), ids=CHECKS)
def test_values_of_tensors_do_not_count(make: Callable[..., guards.Check], name: str) -> None:
    held = all_kinds()
    check = make(held)
    OTHER_CHANGES[name](held)
    assert check()


def test_the_properties_of_parameters_have_their_places() -> None:
    """If a new version of torch has others, checks of many parameters cost three times as much, and are as strict."""
    assert tensor_words.tensor_words(nn.Parameter(torch.ones(2, 3))) is not None


def test_where_the_places_are_others_tensors_are_checked_by_guards_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_words, "_are_as_expected", lambda: False)
    test_properties_of_tensors_count(object_words.properties_check, "dtype")


PLACES = ["_IMPLEMENTATION", "_AUTOGRAD", "_DIM", "_SIZES", "_DTYPE_AND_DEVICE", "_KEYS", "_GRAD_FN", "_REQUIRES_GRAD"]


@pytest.mark.parametrize("name", PLACES)
def test_each_place_that_is_another_is_noticed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(tensor_words, name, getattr(tensor_words, name) + 1)
    assert not tensor_words._are_as_expected.__wrapped__()


@pytest.mark.parametrize("count", [0, 1, 100])
def test_a_change_of_one_of_many_dicts_is_seen(count: int) -> None:
    dicts: list[dict[str, object]] = [{"a": object()} for _ in range(count)]
    check = object_words.versions_check(dicts)
    assert check() or not object_words.dicts_have_versions()
    for held in dicts[count // 2 :][:1]:
        held["a"] = object()
        assert not check()


@pytest.mark.parametrize("attribute", ["new", "old", "gone"])
def test_a_change_of_an_attribute_changes_the_dict_of_a_module(attribute: str) -> None:
    """Attributes are set by other code of Python than entries are."""
    layer = nn.Module()
    layer.old, layer.gone = 1.0, 1.0
    check = object_words.versions_check([vars(layer)])
    for _ in range(20):  # often enough for Python to specialize the code
        assert check() or not object_words.dicts_have_versions()
        if attribute == "gone":
            del layer.gone
        else:
            setattr(layer, attribute, object())
        assert not check()
        layer.gone = 1.0
        check = object_words.versions_check([vars(layer)])


def test_another_class_of_one_of_many_objects_is_seen() -> None:
    class Other(nn.Linear):
        pass

    layers = [nn.Linear(1, 1) for _ in range(100)]
    check = object_words.types_check(layers)
    assert check()
    layers[50].__class__ = Other
    assert not check()


def test_without_versions_of_dicts_every_check_fails_and_types_are_read_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_words, "dicts_have_versions", lambda: False)
    monkeypatch.setattr(object_words, "_objects_refer_to_types", lambda: False)
    assert not object_words.versions_check([{}])()
    test_another_class_of_one_of_many_objects_is_seen()


def test_without_guards_of_torch_tensors_are_compared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(guards.guards, "TensorGuards")
    assert guards.tensors_check(tensors())()


class Slotted:
    __slots__ = ("gain",)


def changed_function() -> tuple[object, Callable[[], object]]:
    def function(x: int = 1) -> int:
        return x

    return function, lambda: setattr(function, "__defaults__", (2,))


def test_each_kind_of_object_shows_its_change() -> None:
    slotted, array, function = Slotted(), np.zeros(2), changed_function()
    slotted.gain = 1.0
    cell = (lambda: array).__closure__[0]  # type: ignore[index]
    kind = type("Kind", (), {})
    ordered, empty, globals_, entries = OrderedDict(a=1, b=2), {}, {"GAIN": 1.0}, deque([1.0])
    rows: list[tuple[Callable[[Objects], object], Callable[[], object]]] = [
        (lambda objects: objects.add_dict(ordered), lambda: ordered.move_to_end("a")),
        (lambda objects: objects.add_dict(empty), lambda: empty.update(a=1)),
        (lambda objects: objects.sequences.append(entries), lambda: entries.append(1.0)),
        (lambda objects: objects.slots.append((slotted, "gain")), lambda: setattr(slotted, "gain", 2.0)),
        (lambda objects: objects.buffers.append(array), lambda: array.fill(1)),
        (lambda objects: objects.entries.append((globals_, "GAIN")), lambda: globals_.clear()),
        (lambda objects: objects.cells.append(cell), lambda: setattr(cell, "cell_contents", None)),
        (lambda objects: objects.functions.append(function[0]), function[1]),  # type: ignore[arg-type]
        (lambda objects: objects.classes.append(kind), lambda: setattr(kind, "gain", 1.0)),
    ]
    for add, change in rows:
        objects = Objects()
        add(objects)
        check = objects.check()
        assert check() or not object_words.dicts_have_versions()
        change()
        assert not check()


class LazyMapping(OrderedDict[str, int]):
    """As in transformers, where `keys` imports the modules of all models."""

    def keys(self) -> Never:
        raise AssertionError("modules are imported")

    values = items = __iter__ = keys


def test_what_a_mapping_makes_its_entries_of_is_not_run() -> None:
    objects, mapping = Objects(), LazyMapping(a=1)
    objects.add_dict(mapping)
    check = objects.check()
    assert check() or not object_words.dicts_have_versions()
    mapping["b"] = 2
    assert not check()
