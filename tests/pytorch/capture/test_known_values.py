"""A branch on a value that follows from shapes alone is traced as eager takes it; other branches are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError
from scheduler.pytorch.tracing import capture
from tests.support.pytorch.planning import check_like_autograd, recompute_most

X = torch.ones(2, 4)


class Branching(nn.Module):
    """A model that runs another function where a condition on a tensor of its own making holds."""

    def __init__(self, condition: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.condition = condition

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y.sum() if self.condition(x) else y.square().sum()


def changed_through_a_view(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    positions[1:].mul_(5)
    return positions.sum() > 10


FROM_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: (torch.arange(x.shape[1]).unsqueeze(0).diff() == 1).all(),
    "no positions": lambda x: torch.arange(x.shape[1])[-1] > 3,
    "mask": lambda x: torch.ones(x.shape, dtype=torch.bool).tril().all(),
    "equal": lambda x: torch.equal(torch.zeros(3), torch.arange(3) * 0.0),
}
FROM_ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "argument": lambda x: (x == torch.arange(4)).all(),
    "random": lambda x: torch.rand(3).sum() > 1,
    "random like known": lambda x: torch.rand_like(torch.ones(3)).sum() > 1,
    "drawn in place": lambda x: torch.ones(3).uniform_().sum() > 1,
    "uninitialized": lambda x: torch.empty_like(torch.ones(3)).sum() > 1,
    "changed through a view": changed_through_a_view,
    "filled from an argument": lambda x: torch.zeros(4).copy_(x[0]).sum() > 1,
}


@pytest.mark.parametrize("condition", FROM_SHAPES.values(), ids=FROM_SHAPES)
def test_a_branch_on_shapes_is_captured_directly(condition: Callable[[Tensor], Tensor]) -> None:
    module = Branching(condition)
    assert capture(module, (X,), costs="flops").joint.route == "direct"
    check_like_autograd(module, recompute_most, ((X,), {}))


@pytest.mark.parametrize("condition", FROM_ELSEWHERE.values(), ids=FROM_ELSEWHERE)
def test_a_branch_on_other_values_is_refused(condition: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError, match="cannot be captured as one graph"):
        capture(Branching(condition), (X,), costs="flops")


def test_forward_may_count_its_calls() -> None:
    class Counting(Branching):
        def __init__(self) -> None:
            super().__init__(FROM_SHAPES["positions"])
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    module = Counting()
    captured = capture(module, (X,), costs="flops")
    assert captured.joint.counters == ("calls",)
    assert module.calls == 0
