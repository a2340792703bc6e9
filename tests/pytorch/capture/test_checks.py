"""Calls that only check values and raise an error are part of the step that a plan runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from scheduler.errors import CaptureError
from scheduler.pytorch import checkpointed
from scheduler.pytorch.capture.instructions import Call
from scheduler.pytorch.capture.operators import check_call, returns_nothing
from scheduler.pytorch.tracing import capture
from tests.support.pytorch.planning import check_like_autograd, planned, recompute_most


class Checked(nn.Module):
    """Matrices made by a linear layer, and a function of them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        root = self.linear(x).sin()
        value = self.function(root @ root.mT + x)
        return (value * torch.linspace(-1, 1, value.numel()).view(value.shape)).sum()


FUNCTIONS = {
    "inv": torch.linalg.inv,
    "solve": lambda x: torch.linalg.solve(x, x.sin()),
    "cholesky": torch.linalg.cholesky,
    "eigh": lambda x: torch.linalg.eigh(x).eigenvalues,
    "eig": lambda x: torch.linalg.eigvals(x).abs(),
    "svd": torch.linalg.svdvals,
    "logdet": torch.logdet,
    "normal distribution": lambda x: torch.distributions.MultivariateNormal(
        torch.zeros(4), x, validate_args=False
    ).rsample(),
    "one hot": lambda x: x * F.one_hot(x.argmax(-1), 4),
}
IDENTITIES = torch.eye(4).expand(3, 4, 4)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_with_checks_is_the_plain_one(name: str) -> None:
    torch.manual_seed(0)
    check_like_autograd(Checked(FUNCTIONS[name]), recompute_most, ((IDENTITIES.clone(),), {}), ((2 * IDENTITIES,), {}))


@pytest.mark.parametrize(("name", "checks"), [("inv", 1), ("cholesky", 1), ("one hot", 2)])
def test_every_check_is_one_operation_that_runs_once(name: str, checks: int) -> None:
    captured = capture(Checked(FUNCTIONS[name]), (IDENTITIES.clone(),), costs="measured")
    found = [
        operation
        for operation, instruction in zip(captured.graph.operations, captured.instructions, strict=True)
        if isinstance(instruction, Call) and returns_nothing(instruction.node)
    ]
    assert len(found) == checks
    assert not any(operation.repeatable or operation.outputs for operation in found)


@pytest.mark.parametrize("name", ["inv", "solve", "cholesky"])
def test_a_singular_matrix_fails_as_in_the_plain_step(name: str) -> None:
    class Singular(Checked):
        def forward(self, x: Tensor) -> Tensor:
            return self.function(x * self.linear.weight.abs()).sum()

    model, zeros = Singular(FUNCTIONS[name]), torch.zeros(4, 4)
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        model(zeros)
    module, _, _ = planned(model, recompute_most, (torch.eye(4),))
    with pytest.raises(torch.linalg.LinAlgError) as found:
        module(zeros)
    assert str(found.value) == str(expected.value)


def test_a_class_out_of_range_fails_under_a_plan() -> None:
    class Labeled(nn.Linear):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return (super().forward(x) * F.one_hot(labels, 4)).sum()

    module = checkpointed(Labeled(4, 4), "100%", (torch.ones(3, 4), torch.arange(3)), costs="flops")
    with pytest.raises(RuntimeError, match=r"Class values must be smaller than num_classes"):
        module(torch.ones(3, 4), torch.full((3,), 7))


@pytest.mark.parametrize(
    ("name", "advice"),
    [("c10d.allreduce_.default", "functional form"), ("aten._linalg_check_errors.default", 'compiler="eager"')],
)
def test_a_call_for_its_side_effects_is_refused_with_what_to_do(name: str, advice: str) -> None:
    node = fx.Graph().call_function(torch.ops.higher_order.with_effects, (None, name))
    with pytest.raises(CaptureError, match=f'"{name}" for its side effects.*{advice}'):
        check_call(node)
