"""Whether a model fits a device: against arithmetic that anyone can redo, and against training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from scheduler.cli import main
from scheduler.devices import Device
from scheduler.errors import InvalidOptionError
from scheduler.planning.fit_answers import Fit, Need
from scheduler.planning.graph_variants import with_resident
from scheduler.planning.levers import LINK_EFFICIENCY
from scheduler.planning.peak_contents import total_by_kind
from scheduler.problem import Problem
from scheduler.pytorch import checkpointed, fit, trace
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, storage_bytes, training_step
from scheduler.pytorch.measurement.optimizer_memory import optimizer_memory
from scheduler.pytorch.models.catalog import Arguments
from tests.support.fake_clock import FakeClock

WIDTH, DEPTH = 64, 6
FLOAT_BYTES, COUNTER_BYTES = 4, 4
PEER_RATE = 1e6


def _mlp() -> nn.Module:
    return nn.Sequential(*(part for _ in range(DEPTH) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))


def _batch(size: int) -> Arguments:
    return (torch.zeros(size, WIDTH),), {}


def _own(memory_bytes: int, platform: str = "cpu") -> Device:
    return Device(
        name="own",
        memory_bytes=memory_bytes,
        flops_per_second={"float32": 1e12},
        bytes_per_second=1e11,
        platform=platform,  # type: ignore[arg-type]
        context_bytes=0,
        peer_bytes_per_second=PEER_RATE,
    )


WEIGHTS = DEPTH * WIDTH * WIDTH * FLOAT_BYTES
STATE = 2 * WEIGHTS + DEPTH * COUNTER_BYTES


def _peak(batch: int) -> int:
    """Return the peak of the step, which is in the first backward operations of the last layer.

    In memory are the weights, AdamW's state, the input, the output of each tanh, the scalar, the
    gradient of the output and that of the last product.
    """
    activation = batch * WIDTH * FLOAT_BYTES
    return WEIGHTS + STATE + activation * (1 + DEPTH) + activation + 2 * FLOAT_BYTES


def _fit(memory_bytes: int, batch_size: int = 256, seconds: float = 0.0, **options: object) -> Fit:
    """Return the answer for the layers; without seconds, other sizes and plans are not looked at for long."""
    device = _own(memory_bytes)
    with FakeClock(seconds_per_look=0.02):
        return fit(_mlp, _batch, device, batch_size=batch_size, loss=torch.sum, time_limit=seconds, **options)  # type: ignore[arg-type]


def test_parts_are_those_of_the_architecture_and_add_up_to_the_byte() -> None:
    found = _fit(2**30)
    totals = total_by_kind(found.parts)
    assert (found.fits, found.plan) == (True, None)
    assert sum(totals.values()) == found.plain.peak_bytes
    assert (totals["parameter"], totals["optimizer state"]) == (WEIGHTS, STATE)
    assert totals["input"] == 256 * WIDTH * FLOAT_BYTES
    assert found.plain.peak_bytes == pytest.approx(_peak(256), rel=0.02)


def test_the_largest_batch_is_the_largest_whose_step_fits() -> None:
    found = _fit(_peak(1000) + 2000, batch_size=4, seconds=5.0)
    assert found.batches is not None
    for size, fits in ((found.batches.plain, True), (found.batches.plain + 1, False)):
        assert _fit(_peak(1000) + 2000, batch_size=size).fits == fits
    assert found.batches.planned > found.batches.plain


def test_a_plan_for_the_device_trains_the_real_model_within_it() -> None:
    memory = WEIGHTS + STATE + int(0.75 * (_peak(1024) - WEIGHTS - STATE))
    found = _fit(memory, batch_size=1024)
    assert (found.fits, found.fits_with_a_plan) == (False, True)
    assert found.plan is not None
    model, (x,) = _mlp(), (torch.rand(1024, WIDTH),)
    # The state of the optimizer is a part of the plan.
    trained = checkpointed(model, found.plan, (x,), loss=torch.sum)
    step = training_step(trained, (x,))
    resident = resident_tensors(model, x)
    with StorageTracker(resident) as tracker:
        step()
    assert storage_bytes(resident) + tracker.peak_bytes + STATE == found.plan.peak_bytes <= memory


def test_on_a_cpu_the_plain_peak_is_that_of_eager_pytorch() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    with FakeClock(seconds_per_look=0.02):
        found = fit(model, _batch, _own(2**30), batch_size=256, loss=torch.sum, optimizer="sgd", time_limit=0.0)
    real, (x,) = model(), (torch.rand(256, WIDTH),)
    step = training_step(real, (x,), loss=torch.sum)
    resident = resident_tensors(real, x)
    with StorageTracker(resident) as tracker:
        step()
    assert found.plain.live_bytes == storage_bytes(resident) + tracker.peak_bytes
    # Kept are the mask, with a number for each element where a plan keeps a byte, and the output of tanh.
    assert total_by_kind(found.parts)["activation"] == 2 * 256 * WIDTH * FLOAT_BYTES


def test_other_sizes_of_a_deep_model_are_those_of_a_trace_of_its_own() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(9)))

    def batch(size: int) -> Arguments:
        return (torch.zeros(size, 8),), {}

    device = _own(20_000)
    with FakeClock(seconds_per_look=0.02):
        found = fit(deep, batch, device, batch_size=4, loss=torch.sum, time_limit=5)
    assert found.batches is not None
    for size, fits in ((found.batches.plain, True), (found.batches.plain + 1, False)):
        graph = trace(deep(), batch(size)[0], loss=torch.sum, costs=device)
        memory = optimizer_memory(deep().parameters(), "adamw", "cpu")
        held = with_resident(graph, "optimizer", memory.state_bytes, "optimizer state")
        assert Need.of(held, Problem(held, 0).save_everything, device, memory.temporary_bytes).fits == fits


def test_a_model_that_cannot_fit_is_proven_not_to() -> None:
    found = _fit(WEIGHTS)
    assert (found.fits, found.fits_with_a_plan, found.is_proven_not_to_fit) == (False, False, True)
    assert "proven not to fit" in found.summary()


def test_levers_save_what_they_say() -> None:
    found = _fit(2**30, seconds=20.0)
    levers = {lever.name: lever for lever in found.levers}
    assert levers["optimizer sgd"].saved_bytes == STATE
    assert levers["optimizer sgd-momentum"].saved_bytes == WEIGHTS + DEPTH * COUNTER_BYTES
    assert 1.9 < found.plain.peak_bytes / levers["bfloat16"].peak_bytes < 2.1
    halved = _fit(2**30, batch_size=128)
    assert levers["batch 128, 2 times"].peak_bytes == pytest.approx(halved.plain.peak_bytes + WEIGHTS, rel=0.03)
    assert list(found.levers) == sorted(found.levers, key=lambda lever: -lever.saved_bytes)
    # Of two devices, each receives half of the weights twice, and half of the gradients; while it waits for
    # the first layer and sends the last one, there is nothing to compute.
    seconds = (3 * WEIGHTS / 2 + 2 * WEIGHTS / DEPTH / 2) / (LINK_EFFICIENCY * PEER_RATE)
    assert seconds > 100 * found.plain.time
    assert levers["FSDP over 2"].time_factor == pytest.approx(seconds / found.plain.time, rel=1e-4)


def test_the_step_of_the_optimizer_may_need_most() -> None:
    found = fit(_mlp, _batch, _own(2**30, "cuda"), batch_size=1, loss=torch.sum, time_limit=0.0)
    # All parameters are updated at once, with temporaries as large as they are.
    assert found.plain.is_optimizer_bound
    state = STATE - DEPTH * COUNTER_BYTES
    assert total_by_kind(found.parts) == {
        "parameter": WEIGHTS,
        "optimizer state": state,
        "gradient": WEIGHTS + FLOAT_BYTES,
        "input": WIDTH * FLOAT_BYTES,
        "optimizer step": WEIGHTS,
    }


def test_the_model_is_never_allocated() -> None:
    def huge() -> nn.Module:
        return nn.Sequential(nn.Linear(2**17, 2**17, bias=False), nn.Tanh())

    def batch(size: int) -> Arguments:
        return (torch.zeros(size, 2**17),), {}

    found = fit(huge, batch, "h100-80gb", dtype="bfloat16", loss=torch.sum, optimizer="sgd", time_limit=0.0)
    assert total_by_kind(found.parts)["parameter"] == 2 * 2**34


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an int >= 1, got 0"),
        ({"dtype": "int8"}, "a dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"optimizer": "lion"}, 'optimizer must be one of adamw, .*got "lion"'),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        _fit(2**30, **options)


def test_the_answer_is_plain_data_and_one_page() -> None:
    found = _fit(2**30, batch_size=2)
    data = json.loads(json.dumps(found.to_dict()))
    assert sum(part["bytes"] for part in data["parts"]) == data["plain"]["peak_bytes"]
    page = found.summary()
    assert "What fills the memory" in page
    assert f"{found.plain.peak_bytes} bytes" in page


LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 896,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
}


def test_a_configuration_file_gives_the_memory_of_its_architecture(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from scheduler.pytorch.models.configurations import read_configuration

    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    given = read_configuration(str(path), "causal-lm", batch_size=2, length=None)
    assert (given.length, given.longest) == (512, 512)
    found = fit(
        given.make_model,
        given.make_batch,
        "h100-80gb",
        batch_size=2,
        length=given.length,
        longest=given.longest,
        loss=given.loss,
        dtype="bfloat16",
        time_limit=0.0,
    )
    layers, d, f, v, heads, tokens = 2, 256, 896, 2048, 8, 2 * 512
    shared = d // 4  # width of keys and of values, which four heads share
    weights = 2 * v * d + d + layers * (2 * d * d + 2 * d * shared + 3 * d * f + 2 * d)
    totals = total_by_kind(found.parts)
    assert totals["parameter"] == 2 * weights
    assert totals["optimizer state"] == 4 * weights
    # Saved per token and layer, 2 bytes a number unless in float32: in the MLP gate, its activation, up and
    # their product; for each norm its input and a factor in float32, the normalized values and the result;
    # queries, keys and values with their positions, the output of attention, and a sum per head in float32.
    norm = (4 + 2 + 2) * d + 4
    per_layer = 4 * 2 * f + 2 * norm + 2 * (2 * d + 2 * shared) + 4 * heads
    blocks = sum(part.size_bytes for part in found.parts if ".layers." in part.layer and part.kind == "activation")
    assert blocks == pytest.approx(layers * tokens * per_layer, rel=0.02)


def _factory(batch_size: int = 8) -> tuple[nn.Module, tuple[object, ...], dict[str, object], object]:
    return _mlp(), *_batch(batch_size), torch.sum


def test_the_command_answers_for_a_factory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["fit", "tests.pytorch.test_fitting:_factory", "--device", "t4", "--time-limit", "0"]
    page = tmp_path / "fit.html"
    assert main([*arguments, "--json", "--html", str(page)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["fits"], data["batch_size"], data["device"]) == (True, 8, "t4")
    text = page.read_text()
    assert "What fills the memory" in text
    assert text.count("<rect ") == text.count('<li><span style="background: #') > 2
    assert all(f"</span>{name}</li>" in text for name in ("parameters", "inputs"))


def test_the_command_wants_a_task_for_a_configuration_only(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["fit", "config.json", "--device", "t4"]) == 2
    assert "a configuration file needs --task, one of causal-lm" in capsys.readouterr().err
    assert main(["fit", "convnet", "--device", "t4", "--task", "causal-lm"]) == 2


def _raises() -> None:
    raise FileNotFoundError("no such data")


class _Reading(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if x.sum().item() > 0 else 1.0)


def _reads(batch_size: int = 2) -> tuple[nn.Module, tuple[object, ...], None, object]:
    return _Reading(4, 4), (torch.zeros(batch_size, 4),), None, torch.sum


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tests.pytorch.test_fitting:_raises", "failed, called with {}: FileNotFoundError: no such data"),
        ("tests.pytorch.test_fitting:_reads", "_Reading reads the value of a tensor, at "),
        ("no_such_module:make", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_factory_that_fails_is_named_with_its_error(
    model: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", model, "--device", "t4", "--time-limit", "0"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: Expecting property name"),
        ("[1]", 'a JSON object with a "model_type" such as "gpt2", and has none'),
        ('{"n_layer": 1}', 'a JSON object with a "model_type" such as "gpt2", and has none'),
        ('{"model_type": "lama"}', "did you mean llama"),
        ('{"model_type": "xyzzy", "auto_map": {}}', "code of its own, which is not run: write a factory"),
        ('{"model_type": "gpt2", "n_embd": "x"}', "which refuses its values: "),
        ('{"model_type": "gpt2", "n_embd": 32, "n_head": 3}', "no model can be built from "),
        ('{"model_type": "gpt2", "n_positions": 8}', "length must be at most 8, as max_position_embeddings"),
    ],
)
def test_a_configuration_that_is_wrong_says_what_to_change(
    text: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(text)
    arguments = ["--task", "causal-lm", "--device", "t4", "--length", "16", "--time-limit", "0"]
    assert main(["fit", str(path), *arguments]) == 2
    assert message in capsys.readouterr().err
