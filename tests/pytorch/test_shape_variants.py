"""Calls that differ in sizes only are captured from one trace with symbolic sizes, and train with the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError
from scheduler.pytorch import checkpointed, shape_variants, tracing
from scheduler.pytorch.capture.arguments import read_arguments
from scheduler.pytorch.capture.device_memory import NO_OTHER_MEMORY
from scheduler.pytorch.capture.exporting import export_joint, export_varying
from scheduler.pytorch.execute.guards import call_key
from scheduler.pytorch.execute.module import CheckpointedModule
from scheduler.pytorch.shape_variants import varying_dimensions
from scheduler.pytorch.tracing import capture_joint
from tests.support.pytorch.planning import check_equal, train
from tests.support.pytorch.regression import mean_square

ROWS, WIDTH, WORDS = 3, 8, 11


class Reader(nn.Module):
    """Attention over tokens; a branch on the values of a mask sends it through TorchDynamo."""

    def __init__(self, *, branches_on_values: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches_on_values = branches_on_values
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.branches_on_values and not torch.compiler.is_dynamo_compiling() and bool((tokens < 0).any()):
            raise ValueError("tokens must not be negative")
        x = self.embed(tokens) * tokens.shape[1] ** -0.5
        weights = (self.query(x) @ x.mT + torch.arange(tokens.shape[1])).softmax(-1)
        return self.drop(weights @ x)[:, 0:]


class Branching(Reader):
    """Computes something else from a length on."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        return x.sin() if tokens.shape[1] > 8 else x


def tokens(length: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, WORDS, (rows, length), generator=generator)


def planned(model: nn.Module, length: int) -> CheckpointedModule:
    return checkpointed(
        model, "1GiB", (tokens(length),), loss=mean_square, on_mismatch="plan", solver="save-all", costs="flops"
    )


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The dimensions with symbolic sizes of each trace, None for a call that was captured by itself."""
    found: list[object] = []

    def varying(*args: object) -> object:
        found.append(args[-1])
        return export_varying(*args)

    def single(*args: object) -> object:
        found.append(None)
        return export_joint(*args)

    monkeypatch.setattr(shape_variants, "export_varying", varying)
    monkeypatch.setattr(tracing, "export_joint", single)
    return found


@pytest.mark.parametrize("branches_on_values", [False, True])
def test_further_lengths_run_no_code_of_the_model_and_train_as_under_autograd(
    branches_on_values: bool, traces: list[object]
) -> None:
    model = Reader(branches_on_values=branches_on_values)
    plain = copy.deepcopy(model)
    module = planned(model, 6)
    for length in (9, 4, 7, 12):
        module.plan_call(tokens(length))
    assert traces == [None, {0: {1}}]
    batches = [((tokens(length),), {}) for length in (6, 9, 4, 7, 12)]
    check_equal(train(module, batches), train(plain, batches, mean_square))
    assert len(traces) == 2


def test_a_length_for_which_the_code_takes_another_branch_is_captured_by_itself(traces: list[object]) -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    module = planned(model, 4)
    batches = [((tokens(length),), {}) for length in (4, 5, 7, 9, 8, 12)]
    check_equal(train(module, batches), train(plain, batches, mean_square))
    assert traces == [None, {0: {1}}, None, {0: {1}}]  # a capture and a trace for each side of the branch


def test_a_change_of_the_model_is_not_covered_by_a_trace(traces: list[object]) -> None:
    model = Reader()
    plain = copy.deepcopy(model)
    module = planned(model, 4)
    module.plan_call(tokens(5))
    for target in (model, plain):
        target.drop.p = 0.6
    batches = [((tokens(length),), {}) for length in (6, 7)]
    check_equal(train(module, batches), train(plain, batches, mean_square))
    assert traces == [None, {0: {1}}, None, {0: {1}}]


def test_the_graph_of_other_sizes_is_that_of_a_capture_by_itself() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(32, 4))
    step = export_varying(model, (torch.ones(8, 16),), {}, None, {0: frozenset({0})})
    for rows in (8, 5, 100):
        joints = step.at([(rows, 16)]), export_joint(model, (torch.ones(rows, 16),), {}, None)
        one, other = (capture_joint(joint, "", costs="flops", memory=NO_OTHER_MEMORY).graph for joint in joints)
        assert one.structure_digest == other.structure_digest
    with pytest.raises(CaptureError, match="conditions that do not hold"):
        step.at([(8, 17)])
    with pytest.raises(CaptureError, match="conditions that do not hold"):
        step.at([(1, 16)])


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (torch.ones(2, 5), {0: {1}}),
        (torch.ones(3, 5), {0: {0, 1}}),
        (torch.ones(2, 3), {}),
        (torch.ones(2, 1), None),
        (torch.ones(2, 5, 1), None),
        (torch.ones(5, 2).T, None),
        (torch.ones(2, 5, dtype=torch.float64), None),
        (torch.ones(2, 5, requires_grad=True), None),
    ],
)
def test_calls_vary_in_sizes_of_contiguous_tensors_only(now: Tensor, expected: object) -> None:
    def key(tensor: Tensor) -> object:
        return call_key(*read_arguments((tensor,), {}))

    assert varying_dimensions(key(torch.ones(2, 3)), key(now)) == expected
