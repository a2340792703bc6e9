"""The largest batch trains within its budget, one more does not fit, and invalid input is rejected."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from scheduler.cli import main
from scheduler.errors import (
    BudgetTooSmallError,
    CaptureError,
    InvalidBudgetError,
    InvalidOptionError,
)
from scheduler.plan import Plan
from scheduler.pytorch import max_batch
from scheduler.pytorch.largest_batch import measured_peak
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.models.catalog import ModelCase, make_model
from tests.support.pytorch.planning import check_like_autograd

pytestmark = pytest.mark.long(25)

SECONDS = 3.0


def small_gpt2(batch_size: int = 4) -> ModelCase:
    return make_model("gpt2", batch_size=batch_size, layers=2, width=32, heads=2, vocabulary=64, length=32)


def small_resnet(batch_size: int = 4) -> ModelCase:
    """Return a ResNet-50 with the first block of each stage only."""
    case = make_model("resnet50", batch_size=batch_size, width=8, size=32, classes=10)
    features = case.module.features
    assert isinstance(features, nn.Sequential)
    case.module.features = nn.Sequential(*features[:4], *(features[4 + first] for first in (0, 3, 7, 13)))
    return case


def eager_peak(case: ModelCase) -> int:
    """Return the live bytes at the peak of a plain step."""
    resident = resident_tensors(case.module, (case.args, dict(case.kwargs)))
    with StorageTracker(resident) as tracker:
        training_step(case.module, case.args, case.kwargs, loss=case.loss)()
    return storage_bytes(resident) + tracker.peak_bytes


@pytest.mark.parametrize(("factory", "budget"), [("small_gpt2", "1MiB"), ("small_resnet", "4MiB")])
def test_the_batch_trains_within_the_budget_and_one_more_does_not_fit(
    factory: str, budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["max-batch", f"{__name__}:{factory}", "--budget", budget, "--costs", "flops", "--json", "--measure"]
    assert main([*command, "--time-limit", str(SECONDS)]) == 0
    printed = capsys.readouterr()
    answer = json.loads(printed.out)
    size, budget_bytes = answer["batch_size"], int(budget[0]) * 2**20
    assert answer["measured_peak_bytes"] == answer["peak_bytes"] <= budget_bytes == answer["budget_bytes"]
    assert answer["next_measured_peak_bytes"] == answer["next_peak_bytes"] > budget_bytes
    assert answer["largest_possible"] >= size
    assert answer["one_more"] == ("proven not to fit" if answer["largest_possible"] == size else "not found to fit")
    assert answer["traced"] == [2, 3, size, size + 1]
    assert [line for line in printed.err.splitlines() if line.startswith("tracing")] == [
        f"tracing a batch of {traced}" for traced in (2, 3, size, size + 1)
    ]
    assert eager_peak(globals()[factory](batch_size=size)) > budget_bytes


class Squares(nn.Module):
    """A linear layer whose output is squared three times; at most `most` rows."""

    def __init__(self, most: int = 10**9) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise ValueError(f"at most {self.most} rows")
        y = self.linear(x)
        for _ in range(3):
            y = (y * y).sin()
        return y.sum()


def squares_case(batch_size: int) -> ModelCase:
    return ModelCase(Squares(), (torch.ones(batch_size, 8),))


def rows(size: int) -> tuple[tuple[object, ...], dict[str, object]]:
    return (torch.ones(size, 8),), {}


def find(budget: int | str = "16KiB", make_model=Squares, make_batch=rows, **options):
    options = {"costs": "flops", "time_limit": 1.0, **options}
    return max_batch(make_model, make_batch, budget, **options)


def test_bytes_and_text_are_one_budget() -> None:
    as_text, as_bytes = find("16KiB"), find(16 * 1024)
    assert as_text.batch_size == as_bytes.batch_size > 10
    assert as_text.plan.budget_bytes == as_bytes.plan.budget_bytes == 16384


def test_a_model_is_left_as_it_was() -> None:
    model = Squares()
    before = [parameter.clone() for parameter in model.parameters()]
    find(make_model=lambda: model)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


def test_the_plan_file_trains_the_batch_like_the_plain_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = str(tmp_path / "plan.json")
    command = ["max-batch", f"{__name__}:squares_case", "--budget", "16KiB", "--time-limit", "1", "-o", plan_file]
    assert main(command) == 0
    printed = capsys.readouterr().out.split()
    case = squares_case(int(printed[printed.index("batch_size") + 1]))
    check_like_autograd(case.module, lambda graph: Plan.load(plan_file).schedule, (case.args, {}))


def test_times_of_the_plan_are_measured_on_request() -> None:
    found = find(costs="measured")
    assert found.plan.graph.time_unit == "s"
    assert found.plan.peak_bytes <= 16384
    assert measured_peak(Squares(), found.plan, *rows(found.batch_size)) == found.plan.peak_bytes


class Branching(nn.Module):
    """Four blocks that run in a loop whose length depends on a value, so that no step can be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if x.sum().item() >= 0 else ():
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("granularity", ["auto", "modules"])
def test_a_model_that_cannot_be_captured_gets_its_largest_batch_by_modules(granularity: str) -> None:
    with (
        pytest.warns(UserWarning, match="by modules, because it cannot be planned by operations")
        if granularity == "auto"
        else nullcontext([])
    ) as warned:
        found = find("100KiB", Branching, granularity=granularity, time_limit=10.0)
    assert {one.filename for one in warned} <= {__file__}
    size = found.batch_size
    assert size > 10
    assert found.traced == (2, 3, size, size + 1)
    assert found.one_more == "proven not to fit"
    assert found.plan.granularity == found.next_plan.granularity == "modules"
    assert found.plan.peak_bytes <= 100 * 1024 < found.next_plan.peak_bytes
    for number, plan in ((size, found.plan), (size + 1, found.next_plan)):
        random_states = sum(tensor.size_bytes for tensor in plan.graph.tensors if tensor.role == "random state")
        assert measured_peak(Branching(), plan, *rows(number)) + random_states <= plan.peak_bytes


def test_a_batch_that_no_choice_of_modules_fits_is_rejected() -> None:
    with pytest.raises(BudgetTooSmallError, match=r"no schedule fits 4\.88 KiB .* The smallest possible") as caught:
        find(5000, Branching, granularity="modules")
    assert caught.value.proven
    found = find("100KiB", Branching, granularity="modules", limit=3)
    assert (found.batch_size, found.bound, found.next_plan, found.traced) == (3, None, None, (2, 3))


def test_the_search_ends_at_the_limit_and_claims_no_proof() -> None:
    found = find(limit=5)
    assert (found.batch_size, found.bound, found.next_plan, found.one_more) == (5, None, None, "not looked at")
    assert found.traced == (2, 3, 5)


def test_a_model_that_takes_no_larger_batch_is_distinguished_from_one_that_does_not_fit() -> None:
    with pytest.raises(
        CaptureError, match=r"batch of \d+; if the model only takes smaller batches, pass limit=.*at most 8"
    ):
        find(make_model=lambda: Squares(most=8))
    assert find(make_model=lambda: Squares(most=8), limit=8).batch_size == 8


def test_a_budget_that_fits_no_batch_is_rejected_with_the_needs_of_one() -> None:
    with pytest.raises(BudgetTooSmallError, match="proven: not even a batch of 1 fits 500 B") as caught:
        find(500)
    assert caught.value.proven
    assert main(["max-batch", "convnet", "--budget", "10KiB", "--time-limit", "1"]) == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"budget": "60%"}, InvalidBudgetError, 'in bytes, .* or "auto", got "60%": .* grow with the batch'),
        ({"budget": "8G"}, InvalidBudgetError, 'write "8GiB"'),
        ({"budget": -1}, InvalidBudgetError, "must be >= 0, got -1"),
        ({"make_batch": lambda size: rows(4)}, InvalidOptionError, r"make_batch\(3\) and make_batch\(2\) .*\(4, 8\)"),
        ({"make_batch": lambda size: rows(min(size, 9))}, InvalidOptionError, "of the same shapes"),
        (
            {"make_batch": lambda size: torch.ones(size, 8)},
            InvalidOptionError,
            r"return a tuple \(args, kwargs\) .*got Tensor",
        ),
        ({"make_batch": lambda size: (torch.ones(size, 8),)}, InvalidOptionError, r"\(args, kwargs\)"),
        ({"make_model": Squares()}, InvalidOptionError, "write lambda: model"),
        ({"make_model": lambda: None}, InvalidOptionError, "returns an nn.Module, got function"),
        ({"limit": 0}, InvalidOptionError, "limit must be an int >= 1, got 0"),
        ({"granularity": "layers"}, InvalidOptionError, '"auto", "operations" or "modules"'),
        ({"costs": "guess"}, InvalidOptionError, '"measured" or "flops"'),
        ({"time_limit": 0}, InvalidOptionError, "time_limit"),
        ({"reorder": "none"}, InvalidOptionError, "reorder"),
    ],
)
def test_invalid_arguments_are_rejected(options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find(**options)


def fixed_case() -> ModelCase:
    return small_gpt2()


def test_a_factory_that_takes_no_batch_size_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["max-batch", f"{__name__}:fixed_case", "--budget", "1MiB"]) == 2
    assert "batch_size" in capsys.readouterr().err
