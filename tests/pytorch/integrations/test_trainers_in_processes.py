"""Trainers in the environment of torchrun: two processes follow one plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.pytorch.processes import run_on_processes

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")

from scheduler.plan import Plan
from scheduler.pytorch.integrations.hf_trainer import TransformersCallback
from scheduler.pytorch.integrations.lightning import LightningCallback
from scheduler.pytorch.integrations.planned_forward import PlannedForward
from scheduler.pytorch.measurement.memory import storage_bytes
from tests.support.pytorch import lightning_training, transformers_training

pytestmark = pytest.mark.long(50)
STEPS = 3


def transformers_trainer(rank: int, folder: Path) -> dict[str, object]:
    """Train a tiny GPT-2 with a plan and without."""
    callback = TransformersCallback("60%", **transformers_training.OPTIONS)
    planned, plain = (
        transformers_training.train(folder, *callbacks, steps=STEPS, ddp_backend="gloo")
        for callbacks in ([callback], [])
    )
    assert isinstance(planned.model_wrapped, DistributedDataParallel)
    return outcome_of(callback.forward, planned, plain) | {"weights": same_weights(planned.model, plain.model)}


def lightning_trainer(rank: int, folder: Path) -> dict[str, object]:
    """Train a small ResNet with a plan and without."""
    callback = LightningCallback("60%", costs="flops", solver="greedy", time_limit=2.0, reserve="64KiB")
    planned, plain = lightning_training.Classifier(), lightning_training.Classifier()
    for model, callbacks in ((planned, [callback]), (plain, [])):
        lightning_training.train(folder, model, *callbacks, steps=STEPS, strategy="ddp", devices=2)
        assert isinstance(model.trainer.strategy, lightning_training.lightning.strategies.DDPStrategy)
    return outcome_of(callback.forward, planned, plain) | {"weights": same_weights(planned, plain)}


def outcome_of(forward: PlannedForward, planned: object, plain: object) -> dict[str, object]:
    plan = forward.planned.plan
    assert isinstance(plan, Plan)
    buckets = storage_bytes(p for p in forward.module.parameters() if p.requires_grad)
    return {
        "digest": plan.digest,
        "losses": (planned.losses, plain.losses),
        "peak": max(planned.peaks[1:]),
        "budget": plan.budget_bytes,
        "reserve": sum(plan.graph.tensor(name).size_bytes for name in plan.graph.resident if name == "reserve"),
        "buckets": buckets,
    }


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


WORK = (transformers_trainer, lightning_trainer)


def do_all(rank: int, folder: str) -> dict[str, dict[str, object]]:
    return {work.__name__: work(rank, Path(folder)) for work in WORK}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Callable[[Callable[..., object]], list[dict[str, object]]]:
    """The answers of each process; the processes start once for all tests."""
    found = run_on_processes(do_all, str(tmp_path_factory.mktemp("out")))
    return lambda work: [answers[work.__name__] for answers in found]


@pytest.mark.parametrize("work", WORK)
def test_a_trainer_on_two_processes_trains_as_without_a_plan(outcomes, work):
    one, other = outcomes(work)
    assert one["digest"] == other["digest"]
    assert one["losses"][0] != other["losses"][0]  # each has its own rows
    for found in (one, other):
        planned, plain = found["losses"]
        assert len(planned) == STEPS
        assert planned == plain
        assert found["weights"]


@pytest.mark.parametrize("work", WORK)
def test_the_buckets_of_a_trainer_count_in_addition_to_the_gradients(outcomes, work):
    extra = {transformers_trainer: 0, lightning_trainer: 64 * 1024}[work]
    for found in outcomes(work):
        assert found["reserve"] == found["buckets"] + extra
        assert found["peak"] <= found["budget"]
