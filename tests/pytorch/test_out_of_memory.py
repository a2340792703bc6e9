"""Out of memory, explained: what was live to the byte, and changes of the step that do suffice."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from scheduler.planning.fit_answers import Lever
from scheduler.pytorch import checkpointed, explain_oom, resident_tensors
from scheduler.pytorch.measurement.memory import StorageTracker, storage_bytes
from scheduler.pytorch.out_of_memory import ExplainedOutOfMemoryError, MemoryReport

BATCH, WIDTH, DEPTH = 256, 32, 6
ROW = 4 * BATCH * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).sum()


PARAMETERS = DEPTH * 2 * 4 * 4 * WIDTH * WIDTH


class Limited(StorageTracker):
    """A device without memory for more than so many bytes of live storages; it fails once."""

    def __init__(self, most_bytes: int, model: nn.Module, inputs: object, *others: Tensor) -> None:
        resident = [*resident_tensors(model, inputs), *others]
        super().__init__(resident)
        self.most_bytes = most_bytes - storage_bytes(resident)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.live_bytes > self.most_bytes:
            self.most_bytes = 2**60  # what explains the failure runs without data
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return result


def failed(most_bytes: int, model: nn.Module, x: Tensor, **options: object) -> MemoryReport:
    """Return the report of a step that fails at so many bytes."""
    optimizer = options.get("optimizer")
    state = [] if optimizer is None else [t for s in optimizer.state.values() for t in s.values()]  # type: ignore[attr-defined]
    with (
        pytest.raises(ExplainedOutOfMemoryError, match="CUDA out of memory") as caught,
        Limited(most_bytes, model, x, *state),
        explain_oom(model, **options),  # type: ignore[arg-type]
    ):
        model(x).backward()
    return caught.value.report


def test_what_was_live_adds_up_by_kind_and_by_module() -> None:
    model, x = Model(), torch.ones(BATCH, WIDTH)
    # A block saves its hidden rows after tanh, four times as wide, and returns its own. While tanh runs,
    # its input is live too: 2 x 5 + 8 rows in the third block. The fourth asks for more: 3 x 5 + 4.
    room = PARAMETERS + ROW + (2 * 5 + 8) * ROW
    report = failed(room, model, x, limit=room)
    assert report.live_bytes == {"parameters": PARAMETERS, "inputs": ROW, "activations": 15 * ROW}
    assert report.activation_bytes == {"blocks.*": 15 * ROW}
    assert (report.operator, report.module) == ("aten.mm.default", "blocks.3.up")
    assert report.capacity_bytes == room
    text = report.summary()
    assert re.search(r"^ran out in +aten.mm.default in blocks.3.up$", text, re.MULTILINE)
    assert re.search(r"^    blocks\.\* +480.00 KiB$", text, re.MULTILINE)


def test_gradients_and_optimizer_state_are_kinds_of_their_own() -> None:
    model, x = Model(), torch.ones(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
    steps = 4 * 2 * DEPTH  # AdamW counts its steps in one number per parameter
    # All blocks have run; the backward of the last needs 4 rows for each side of tanh.
    room = 3 * PARAMETERS + steps + ROW + DEPTH * 5 * ROW + 7 * ROW
    report = failed(room, model, x, optimizer=optimizer)
    assert report.live_bytes["optimizer state"] == 2 * PARAMETERS + steps
    assert report.module == "(backward)"
    assert report.peak_bytes is not None
    assert report.peak_bytes > room
    assert lever(report, "optimizer sgd").saved_bytes == 2 * PARAMETERS + steps
    assert lever(report, "optimizer sgd").peak_bytes == report.peak_bytes - 2 * PARAMETERS - steps


def test_the_state_of_an_optimizer_counts_before_its_first_step() -> None:
    model, x = Model(), torch.ones(BATCH, WIDTH)
    room = PARAMETERS + ROW + 30 * ROW
    report = failed(room, model, x, optimizer=torch.optim.AdamW(model.parameters()))
    assert "optimizer state" not in report.live_bytes
    assert report.peak_bytes is not None
    steps = 4 * 2 * DEPTH
    assert lever(report, "optimizer sgd").saved_bytes == 2 * PARAMETERS + steps


def lever(report: MemoryReport, name: str) -> Lever:
    (found,) = (lever for lever in report.levers if re.fullmatch(name, lever.name))
    return found


def test_a_plan_and_a_smaller_batch_that_suffice_do_fit() -> None:
    model, x = Model(), torch.ones(BATCH, WIDTH)
    room = 2 * PARAMETERS + 25 * ROW
    report = failed(room, model, x, limit=room)
    recomputation, smaller = lever(report, "recompute"), lever(report, r"batch \d+, \d+ times")
    assert recomputation.fits
    assert smaller.fits
    assert f'checkpointed(model, "{room}B", ...)' in recomputation.how
    planned = checkpointed(model, room, (x,), costs="flops")
    with Limited(room, model, x):
        planned(x).backward()
    model.zero_grad()
    size, count = (int(number) for number in re.findall(r"\d+", smaller.name))
    assert size * count == BATCH
    assert "estimated" in smaller.how
    part = x[:size].clone()
    for _ in range(2):  # the second adds to the gradients of the first
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        with Limited(room, model, part, *gradients):
            model(part).backward()


def test_what_does_not_suffice_is_said_and_comes_last() -> None:
    model, x = Model(), torch.ones(BATCH, WIDTH)
    report = failed(PARAMETERS + 6 * ROW, model, x, limit=PARAMETERS + 6 * ROW)
    fitting = [lever.fits for lever in report.levers]
    assert fitting == sorted(fitting, reverse=True)
    recomputation = lever(report, "recompute")
    assert not recomputation.fits
    assert 'checkpointed(model, "min", ...)' in recomputation.how
    assert re.search(r"^recompute +\S+ KiB .* no +checkpointed", report.summary(), re.MULTILINE)


def test_what_a_step_with_dropout_needs_is_what_it_takes() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), Model()), torch.ones(BATCH, WIDTH)
    resident = resident_tensors(model, x)
    with StorageTracker(resident) as tracker:
        model(x).backward()
    model.zero_grad()
    report = failed(PARAMETERS + 8 * ROW, model, x, limit=PARAMETERS + 8 * ROW)
    assert report.peak_bytes == storage_bytes(resident) + tracker.peak_bytes


def test_without_a_limit_the_capacity_is_what_was_live() -> None:
    model, x = Model(), torch.ones(BATCH, WIDTH)
    report = failed(PARAMETERS + 20 * ROW, model, x)
    assert report.capacity_bytes == sum(report.live_bytes.values())


def test_a_model_that_cannot_be_captured_is_explained_without_levers() -> None:
    class Branching(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x[x > 2].sum()

    model = Branching()
    report = failed(PARAMETERS + 8 * ROW, model, torch.ones(BATCH, WIDTH))
    assert report.live_bytes["parameters"] == PARAMETERS
    assert (report.peak_bytes, report.levers) == (None, ())
    assert re.search("^the step needs +unknown$", report.summary(), re.MULTILINE)
    assert "\n- nothing is predicted: " in report.summary()


def test_other_errors_and_steps_that_fit_pass() -> None:
    model, x = Model(), torch.ones(2, WIDTH)
    with explain_oom(model):
        model(x).backward()
    with pytest.raises(ZeroDivisionError), explain_oom(model):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_error_before_the_model_is_called_is_explained_too() -> None:
    model = Model()
    with pytest.raises(torch.OutOfMemoryError, match="predicted: the model was not called"), explain_oom(model):
        raise torch.OutOfMemoryError("CUDA out of memory.")
