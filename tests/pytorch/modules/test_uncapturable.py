"""Models that cannot be captured compute under decisions and plans by modules what they compute plainly."""

from __future__ import annotations

import pytest

from tests.support.pytorch.module_training import check_random_decisions, check_training
from tests.support.pytorch.uncapturable import CASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.parametrize("name", CASES),
]


def test_random_decisions_change_nothing(name: str) -> None:
    check_random_decisions(CASES[name], name)


def test_a_model_trains_within_its_budget_as_without_a_plan(name: str) -> None:
    check_training(CASES[name], batches=20)
