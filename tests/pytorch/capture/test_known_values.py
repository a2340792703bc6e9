"""A branch on a value that follows from shapes or arguments is traced as eager takes it; others are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError, ExecutionError
from scheduler.pytorch import checkpointed
from scheduler.pytorch.capture.exporting import export_varying
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.tracing import capture
from tests.support.pytorch.planning import check_like_autograd, recompute_most

X = torch.ones(2, 4)
HELD = torch.ones(3)


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


def changed_elsewhere(x: Tensor) -> Tensor:
    torch.arange(4).add_(1)
    return x.max() < 1.5


def changed_itself(x: Tensor) -> Tensor:
    y = x.unsqueeze(0)
    y[0, 1:].neg_()
    return x.max() < 1.5


FROM_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda x: (torch.arange(x.shape[1]).unsqueeze(0).diff() == 1).all(),
    "no positions": lambda x: torch.arange(x.shape[1])[-1] > 3,
    "mask": lambda x: torch.ones(x.shape, dtype=torch.bool).tril().all(),
    "equal": lambda x: torch.equal(torch.zeros(3), torch.arange(3) * 0.0),
}
FROM_ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "tensor of the code": lambda x: HELD.sum() > 1,
    "number in an argument": lambda x: x.sum(),
    "random": lambda x: torch.rand(3).sum() > 1,
    "random like known": lambda x: torch.rand_like(torch.ones(3)).sum() > 1,
    "drawn in place": lambda x: torch.ones(3).uniform_().sum() > 1,
    "uninitialized": lambda x: torch.empty_like(torch.ones(3)).sum() > 1,
    "changed through a view": changed_through_a_view,
    "changed argument": changed_itself,
    "filled from an argument": lambda x: torch.zeros(4).copy_(x[0]).sum() > 1,
}


@pytest.mark.parametrize("condition", FROM_SHAPES.values(), ids=FROM_SHAPES)
def test_a_branch_on_shapes_is_captured_directly(condition: Callable[[Tensor], Tensor]) -> None:
    module = Branching(condition)
    assert capture(module, (X,), costs="flops").joint.route == "direct"
    check_like_autograd(module, recompute_most, ((X,), {}))


ON_ARGUMENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: (x == torch.ones(4)).all(),
    "sum": lambda x: x.to(torch.bool).sum() == x.numel(),
    "equal": lambda x: torch.equal(x, torch.ones(2, 4)),
    "packed": lambda x: (torch.diff(x[0]) != 1).cumsum(-1)[-1] == 3,
    "largest": lambda x: x.max() < 1.5,
    "after a change of another": changed_elsewhere,
}


@pytest.mark.parametrize("condition", ON_ARGUMENTS.values(), ids=ON_ARGUMENTS)
def test_a_branch_on_arguments_is_planned_for_calls_with_the_same_answer(
    condition: Callable[[Tensor], Tensor],
) -> None:
    module, other = Branching(condition), torch.tensor([[2.0, 3, 0, 5], [1, 2, 3, 4]])
    assert capture(module, (X,), costs="flops").joint.route == "direct"
    for x in (X, other):
        check_like_autograd(module, recompute_most, ((x,), {}))
    planned = checkpointed(module, "100%", (X,), costs="flops")
    planned(X.clone())
    with pytest.raises(ExecutionError, match=r"condition on the values of args\[0\] was True .* is False"):
        planned(other)


def test_each_answer_has_a_plan_of_its_own() -> None:
    module = Branching(ON_ARGUMENTS["all"])
    planned = checkpointed(module, "1GiB", (X,), costs="flops", on_mismatch="plan")
    assert isinstance(planned, CheckpointedModule)
    assert planned.others is not None
    for x in (X, 2 * X, X, 3 * X):
        assert torch.equal(planned(x), module(x))
    assert len(planned.others.modules) == 1


def test_a_step_for_other_sizes_is_that_of_the_same_answers() -> None:
    module = Branching(lambda x: (x.sum() == x.numel()) and (torch.arange(x.shape[0]) < 9).all())
    step = export_varying(module, (X,), {}, None, {0: frozenset({0})})
    (condition,) = step.at([(5, 4)]).conditions
    assert not condition.difference([torch.ones(5, 4)])
    assert condition.difference([torch.full((5, 4), 7.0)])
    with pytest.raises(CaptureError, match="takes another path for the shapes"):
        step.at([(10, 4)])


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
