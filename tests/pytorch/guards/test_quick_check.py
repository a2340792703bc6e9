from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from scheduler.pytorch.guards.quick_check import Objects
from scheduler.pytorch.torch_private import guards

NAMES = {"tensors_check": guards.tensors_check, "one by one": guards.tensors_check_one_by_one}


def tensors() -> list[Tensor]:
    return [*(nn.Parameter(torch.ones(3, 3)) for _ in range(40)), torch.ones(()), torch.ones(2, 2, 2)]


def with_data(change: Callable[[Tensor], Tensor]) -> Callable[[list[Tensor]], object]:
    return lambda held: setattr(held[3], "data", change(held[3].data))


TENSOR_CHANGES = {
    "requires_grad": (lambda held: held[3].requires_grad_(False), False),
    "shape in the same memory": (with_data(lambda data: data.view(9)), False),
    "dtype": (with_data(Tensor.double), False),
    "size in place": (lambda held: held[41].resize_(8), False),
    "values": (with_data(lambda data: data * 2), True),
    "values in place": (lambda held: held[41].add_(1), True),
    "strides": (with_data(lambda data: data.t()), True),
}


@pytest.mark.parametrize("name", TENSOR_CHANGES)
@pytest.mark.parametrize("make", NAMES.values(), ids=NAMES)
def test_properties_of_a_tensor_count_and_values_do_not(make: Callable[..., guards.Check], name: str) -> None:
    held = tensors()
    check = make(held)
    change, expected = TENSOR_CHANGES[name]
    assert check()
    change(held)
    assert check() is expected


@pytest.mark.parametrize("count", [0, 1, 100])
def test_a_change_of_one_of_many_dicts_is_seen(count: int) -> None:
    dicts: list[dict[str, object]] = [{"a": object()} for _ in range(count)]
    check = guards.dicts_check(dicts)
    assert check() or not guards.SEES_DICTS
    for held in dicts[count // 2 :][:1]:
        held["a"] = object()
        assert not check()


def test_without_guards_of_torch_tensors_are_compared_one_by_one_and_dicts_always_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(guards.guards, "TensorGuards")
    monkeypatch.delattr(guards.guards, "RootGuardManager")
    monkeypatch.setattr(guards, "_dict_version", None)
    assert guards.tensors_check(tensors())()
    assert not guards.dicts_check([{} for _ in range(100)])()


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
        assert check() or not guards.SEES_DICTS
        change()
        assert not check()
