"""What a call has changed in attributes of modules is put back, and plain attributes are not read anew."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scheduler.pytorch.modules.recomputation.call_state import Parts
from scheduler.pytorch.modules.recomputation.contents import Attributes, Contents


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "count", 7),
        lambda module: setattr(module, "training", False),
        lambda module: setattr(module, "new", 1),
        lambda module: delattr(module, "count"),
        lambda module: (delattr(module, "count"), setattr(module, "other", 3)),
        lambda module: setattr(module, "last", torch.zeros(2)),
        lambda module: setattr(module, "seen", []),
        lambda module: module.seen.append(4),
    ],
)
def test_what_a_call_changes_is_put_back(change):
    module = nn.Linear(2, 2)
    module.count, module.seen, module.last = 3, [1], torch.ones(2)
    before, last = dict(vars(module)), module.last
    known: dict[nn.Module, Attributes] = {}
    for _ in range(2):
        contents = Contents([module], known)
        change(module)
        now = contents.now()
        contents.put(now)
        assert vars(module).keys() == before.keys()
        assert (module.count, module.training, module.seen) == (3, True, [1])
        assert module.last is last
        now.put()
        contents.put()
        assert (module.count, module.training, module.seen) == (3, True, [1])


def test_plain_attributes_are_read_once_and_tensors_are_not_held():
    plain, holding = nn.Conv2d(2, 2, 3), nn.Linear(2, 2)
    holding.last = torch.ones(2)
    known: dict[nn.Module, Attributes] = {}
    Contents([plain, holding], known)
    assert [*known] == [plain]
    first = known[plain]
    Contents([plain], known)
    assert known[plain] is first
    plain.eval()
    Contents([plain], known)
    assert known[plain] is not first


def test_parts_are_listed_anew_once_a_module_has_other_submodules():
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
    parts = Parts(model)
    first = parts.modules
    parts.update()
    assert parts.modules is first == [*model.modules()]
    model[0][0] = nn.GELU()
    parts.update()
    assert parts.modules == [*model.modules()] != first
