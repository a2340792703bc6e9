from __future__ import annotations

import pytest
import torch

from scheduler.errors import InvalidOptionError
from tests.support.pytorch.guide_examples import run_example

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from scheduler.pytorch.integrations.hf_trainer import TransformersCallback  # noqa: E402
from tests.support.pytorch.transformers_training import OPTIONS, Trainer, text, tiny_gpt2, train  # noqa: E402

pytestmark = pytest.mark.long(20)

STEPS = 20


def test_a_tiny_gpt2_trains_as_without_a_plan_within_the_budget(tmp_path):
    callback = TransformersCallback("60%", **OPTIONS)
    planned, plain = train(tmp_path, callback, steps=STEPS), train(tmp_path, steps=STEPS)
    assert len(planned.losses) == STEPS
    assert planned.losses == plain.losses
    for one, other in zip(planned.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    plan = callback.forward.planned.plan
    assert "optimizer state" in {plan.graph.tensor(name).role for name in plan.graph.resident}
    assert max(planned.peaks[1:]) <= plan.budget_bytes < max(plain.peaks)
    assert "forward" not in vars(planned.model)


def test_a_plan_by_modules_trains_as_without_a_plan_within_the_budget(tmp_path):
    callback = TransformersCallback("min+20%", granularity="modules", **OPTIONS)
    planned, plain = train(tmp_path, callback, steps=3), train(tmp_path, steps=3)
    assert planned.losses == plain.losses
    plan = callback.forward.planned.plan
    assert plan.granularity == "modules"
    assert plan.overhead > 0
    assert "optimizer state" in {plan.graph.tensor(name).role for name in plan.graph.resident}
    assert max(planned.peaks[1:]) <= plan.budget_bytes < max(plain.peaks)


def test_gradient_accumulation_counts_existing_gradients(tmp_path):
    callback = TransformersCallback("60%", **OPTIONS)
    runs = [train(tmp_path, *callbacks, steps=3, gradient_accumulation_steps=2) for callbacks in ([callback], [])]
    planned, plain = runs
    assert len(planned.losses) == 6
    assert planned.losses == plain.losses
    plan = callback.forward.planned.plan
    assert "gradient" in {plan.graph.tensor(name).role for name in plan.graph.resident}
    assert max(planned.peaks[1:]) <= plan.budget_bytes < max(plain.peaks)


def test_mixed_precision_trains_as_without_a_plan(tmp_path):
    callback = TransformersCallback("60%", **OPTIONS)
    planned, plain = (train(tmp_path, *callbacks, steps=3, bf16=True) for callbacks in ([callback], []))
    assert planned.losses == pytest.approx(plain.losses, rel=1e-3)
    assert planned.peaks[-1] <= callback.forward.planned.plan.budget_bytes


@pytest.mark.parametrize("name", ["activation_checkpointing", "label_smoothing_factor"])
def test_a_trainer_with_options_that_interfere_with_the_plan_is_rejected(tmp_path, name):
    with pytest.raises(InvalidOptionError, match=f"{name} .* turn it off"):
        train(tmp_path, TransformersCallback("60%", **OPTIONS), steps=1, **{name: 1})


def test_a_loss_that_is_not_the_models_own_is_rejected(tmp_path):
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return model(input_ids=inputs["input_ids"]).logits.square().mean()

    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True, dataloader_pin_memory=False
    )
    callback = TransformersCallback("60%", **OPTIONS)
    trainer = OwnLoss(model=tiny_gpt2(), args=settings, train_dataset=[text(0)], callbacks=[callback])
    with pytest.raises(InvalidOptionError, match="without labels"):
        trainer.train()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_the_example_in_the_guide_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example("TransformersCallback", model=tiny_gpt2(), data=[text(seed) for seed in range(16)])
    (callback,) = [c for c in names["trainer"].callback_handler.callbacks if isinstance(c, TransformersCallback)]
    assert names["trainer"].state.global_step == 20
    assert callback.forward.planned.plan.budget_bytes == 8 * 2**30
