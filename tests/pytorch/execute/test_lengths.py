"""Lengths that are announced get their plans before training, the longest first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import BudgetTooSmallError, ExecutionError, InvalidOptionError
from scheduler.pytorch import checkpointed, plan_lengths
from scheduler.pytorch.execute.module import CheckpointedModule
from tests.support.pytorch.regression import mean_square


class Reader(nn.Module):
    """Reads tokens of shape (rows, length) with a mask of shape (rows, 1, length, length)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)

    def forward(self, tokens: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        x = self.embed(tokens)
        weights = (x @ x.mT).masked_fill(~mask[:, 0], -1e9).softmax(-1)
        return self.mix(weights @ x) * scale


def tokens(length: int, rows: int = 3) -> tuple[Tensor, Tensor]:
    return torch.ones(rows, length, dtype=torch.long), torch.ones(rows, 1, length, length, dtype=torch.bool)


def planned(length: int, budget: int | str = "300%", **options: object) -> CheckpointedModule:
    settings = {"on_mismatch": "plan", "solver": "save-all", "costs": "flops", **options}
    return checkpointed(Reader(), budget, tokens(length), {"scale": 2.0}, loss=mean_square, **settings)


def lengths_of(module: CheckpointedModule) -> list[int]:
    assert module.others is not None
    return [other.planned_call.tensors[0][0][1] for other in module.others.modules]


def test_announced_lengths_are_planned_before_training_the_longest_first() -> None:
    module = planned(6)
    plans = plan_lengths(module, [4, 9, 6, 5, 9])
    assert [*plans] == [9, 6, 5, 4]
    assert plans[6] is module.plan
    assert lengths_of(module) == [9, 5, 4]
    before = list(module.others.modules)
    for length in (9, 4, 5, 6):
        module(*tokens(length), scale=2.0).backward()
    assert {*module.others.modules} == {*before}


def test_an_example_can_be_built_for_each_length() -> None:
    module = planned(6)
    asked = []

    def example(length: int) -> tuple[tuple[Tensor, ...], dict[str, float]]:
        asked.append(length)
        return tokens(length, rows=2), {"scale": 2.0}

    plan_lengths(module, range(2, 5), example=example)
    assert asked == [4, 3, 2]
    assert [other.planned_call.tensors[0][0] for other in module.others.modules] == [(2, 4), (2, 3), (2, 2)]


def test_a_budget_that_is_too_small_for_the_longest_is_known_before_anything_else_is_planned() -> None:
    module = planned(4, "100%", time_limit=1.0)
    with pytest.raises(BudgetTooSmallError, match=r"^length 40: "):
        plan_lengths(module, [4, 5, 40])
    assert lengths_of(module) == []


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths must be at least one int >= 1, got"),
        ([4, 0], "lengths must be at least one int >= 1, got"),
        ([4, "5"], "lengths must be at least one int >= 1, got"),
        ([2, 3, 4, 5], "lengths has 4 different lengths, but max_shapes=3 plans are kept"),
    ],
)
def test_lengths_that_cannot_be_planned_are_rejected(lengths: list[object], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        plan_lengths(planned(4, max_shapes=3), lengths)


def test_lengths_need_a_module_that_makes_plans_and_trains() -> None:
    with pytest.raises(InvalidOptionError, match='on_mismatch="plan"'):
        plan_lengths(planned(4, on_mismatch="plain"), [4])
    with pytest.raises(ExecutionError, match="call train"):
        plan_lengths(planned(4).eval(), [4])


def test_a_call_without_a_length_needs_an_example() -> None:
    module = checkpointed(
        nn.Linear(4, 4),
        "300%",
        (torch.ones(4),),
        loss=mean_square,
        on_mismatch="plan",
        solver="save-all",
        costs="flops",
    )
    with pytest.raises(InvalidOptionError, match=r"no argument has a second dimension.* pass example="):
        plan_lengths(module, [3])
