from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from scheduler.pytorch.guards.read_names import ReadNames
from scheduler.pytorch.guards.tensors import TensorPlace, find_tensors

LABELS = torch.zeros(3)
labels = {"of a global": torch.zeros(3)}


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


@dataclass(frozen=True)
class Frozen:
    labels: Tensor


class Slotted:
    __slots__ = ("labels",)

    def __init__(self) -> None:
        self.labels = torch.zeros(3)


class Criterion:
    def __init__(self) -> None:
        self.labels = torch.zeros(3)
        self.unread = torch.zeros(3)

    def __call__(self, output: Tensor) -> Tensor:
        return output - self.labels


def places(loss: object, module: nn.Module | None = None) -> dict[str, TensorPlace]:
    module = module or nn.Linear(2, 2)
    return {place.name: place for place in find_tensors(module, loss, ReadNames(module, loss))}


def partial() -> object:
    return functools.partial(torch.nn.functional.mse_loss, target=torch.zeros(3))


HOLDERS = [
    ("['a'][1]", lambda: {"a": [0, torch.zeros(3)]}),
    ("[0][1]", lambda: ((0, torch.zeros(3)),)),
    ("[1]", lambda: deque([0, torch.zeros(3)])),
    (".labels", lambda: Frozen(torch.zeros(3))),
    (".labels", Slotted),
    (".labels", Criterion),
    (".keywords['target']", partial),
    (".weight", lambda: nn.CrossEntropyLoss(weight=torch.zeros(3))),
    ("[0].bias", lambda: [nn.LayerNorm(3).requires_grad_(False)]),
]


@pytest.mark.parametrize(("path", "make"), HOLDERS)
def test_a_tensor_in_a_closure_is_found_replaced_and_put_back(path, make):
    holder = make()
    found = places(lambda output: holder(output).labels)
    place = found[f"loss: holder{path}"]
    old, new = place.get(), torch.ones(3)
    before = holder
    undo = place.put(new)
    assert place.get() is new
    undo()
    assert place.get() is old
    assert holder is before


def test_a_named_tuple_stays_one():
    holder = Pair(torch.zeros(1), torch.zeros(2))
    before = holder
    place = places(lambda output: holder)["loss: holder[1]"]
    undo = place.put(torch.ones(2))
    assert isinstance(holder, Pair)
    assert torch.equal(holder.other, torch.ones(2))
    undo()
    assert holder is before


def test_only_what_code_mentions_is_found():
    criterion = Criterion()
    assert [*places(criterion)] == ["loss.labels"]
    assert [*places(criterion.__call__)] == ["loss.labels"]


def test_a_global_is_found_only_where_it_is_read_as_a_global():
    holder = Criterion()
    assert [*places(lambda output: holder.labels)] == ["loss: holder.labels"]
    assert [*places(lambda output: labels)] == ["loss: labels['of a global']"]
    assert [*places(lambda output: LABELS)] == ["loss: LABELS"]


def test_two_ways_to_one_tensor_are_two_places():
    batch = {"labels": torch.zeros(3)}
    holder = [batch]
    found = places(lambda output: (batch, holder))
    assert [*found] == ["loss: batch['labels']", "loss: holder[0]['labels']"]
    assert found["loss: batch['labels']"].get() is found["loss: holder[0]['labels']"].get()


def test_tensors_of_modules_are_found_unless_they_are_registered():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].mask = torch.zeros(3)
    assert [*places(None, module)] == ["0.mask"]


def test_cycles_end():
    holder: list[object] = [torch.zeros(3)]
    holder.append(holder)
    assert [*places(lambda output: holder)] == ["loss: holder[0]"]


def test_a_place_that_is_gone_or_holds_something_else_says_so():
    batch: dict[str, object] = {"labels": torch.zeros(3)}
    place = places(lambda output: batch)["loss: batch['labels']"]
    batch["labels"] = 3
    with pytest.raises(TypeError, match=r"loss: batch\['labels'\] must be a tensor, got int"):
        place.get()
    assert not place.holds(torch.zeros(3))
    del batch["labels"]
    with pytest.raises(LookupError):
        place.get()


def test_tensors_in_large_containers_are_found():
    holder = [torch.zeros(()) for _ in range(1200)]
    assert len(places(lambda output: holder)) == 1200
