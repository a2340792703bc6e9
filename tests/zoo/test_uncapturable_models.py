"""Models of libraries that cannot be captured train by modules as without a plan; run by `pytest -m zoo`."""

from __future__ import annotations

import pytest

from tests.support.pytorch.module_training import bytes_over_budget, random_state_differences
from tests.zoo.uncapturable import CASES

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
    pytest.mark.parametrize("name", CASES),
]


def test_random_decisions_change_nothing(name: str) -> None:
    assert random_state_differences(CASES[name], name) == ["", "", ""]


def test_a_model_trains_within_its_budget_as_without_a_plan(name: str) -> None:
    assert bytes_over_budget(CASES[name], batches=20) == []
