from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from scheduler.errors import ExecutionError
from tests.support.pytorch.guide_examples import run_example

pytest.importorskip("lightning.pytorch")

from scheduler.pytorch.integrations.lightning import LightningCallback
from tests.support.pytorch.lightning_training import Classifier, batches, train

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:.*does not have many workers"),
]

STEPS = 20


class CallsItsModel(Classifier):
    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)


def test_a_small_resnet_trains_as_without_a_plan_within_the_budget(tmp_path):
    callback = LightningCallback("60%", costs="flops", time_limit=5.0, reserve="64KiB")
    planned, plain = Classifier(), Classifier()
    train(tmp_path, planned, callback, steps=STEPS)
    train(tmp_path, plain, steps=STEPS)
    assert len(planned.losses) == STEPS
    assert planned.losses == plain.losses
    for (name, one), other in zip(planned.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    plan = callback.forward.planned.plan
    assert "optimizer state" in {plan.graph.tensor(name).role for name in plan.graph.resident}
    assert max(planned.peaks[1:]) <= plan.budget_bytes < max(plain.peaks)
    assert "forward" not in vars(planned)


def test_a_plan_by_modules_trains_as_without_a_plan_within_the_budget(tmp_path):
    callback = LightningCallback("min+20%", granularity="modules", reserve="64KiB")
    planned, plain = Classifier(), Classifier()
    train(tmp_path, planned, callback, steps=3)
    train(tmp_path, plain, steps=3)
    assert planned.losses == plain.losses
    plan = callback.forward.planned.plan
    assert plan.granularity == "modules"
    assert plan.overhead > 0
    assert max(planned.peaks[1:]) <= plan.budget_bytes < max(plain.peaks)


def test_a_submodule_can_be_planned(tmp_path):
    callback = LightningCallback("100%", module="model", costs="flops", time_limit=5.0)
    train(tmp_path, CallsItsModel(), callback, steps=1)
    assert callback.forward.planned is not None


def test_a_forward_that_training_does_not_call_is_an_error(tmp_path):
    model = CallsItsModel()
    with pytest.raises(ExecutionError, match=r"CallsItsModel\.forward was not called in training"):
        train(tmp_path, model, LightningCallback("60%", costs="flops"), steps=1)
    assert "forward" not in vars(model)


@pytest.mark.filterwarnings("ignore::UserWarning:lightning")
def test_the_example_in_the_guide_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_example("LightningCallback", model=Classifier(), batches=batches())
    (callback,) = [c for c in names["trainer"].callbacks if isinstance(c, LightningCallback)]
    assert names["trainer"].global_step == 20
    assert callback.forward.planned.plan.budget_bytes == 8 * 2**30
