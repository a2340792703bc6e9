"""Models that cannot be captured compute under decisions and plans by modules what they compute plainly."""

from __future__ import annotations

import pytest

from tests.support.pytorch.module_training import bytes_over_budget, random_state_differences
from tests.support.pytorch.uncapturable import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.parametrize("name", CASES),
]


def test_random_decisions_change_nothing(name: str) -> None:
    assert random_state_differences(CASES[name], name) == ["", "", ""]


def test_a_model_trains_within_its_budget_as_without_a_plan(name: str) -> None:
    assert bytes_over_budget(CASES[name], batches=20) == []
