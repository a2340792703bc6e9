from __future__ import annotations

import torch
from torch import Tensor, nn

from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
from scheduler.pytorch.models.catalog import make_model
from scheduler.simulator import simulate
from tests.support.pytorch.planning import planned, recompute_most, save_everything
from tests.support.pytorch.watching import Count


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.dropout(self.linear(x + self.shift).sin(), 0.5, True).cos()
        with torch.no_grad():
            self.shift.mul_(0.5)
        return y.sum()


def test_without_recomputation_no_random_state_is_saved_and_no_buffer_copied():
    module, _, _ = planned(Noisy(), save_everything, (torch.ones(4, 8),))
    assert "set_state" not in module.program.forward.source + module.program.backward[0].source
    assert not any(name.startswith("state") for name in module.program.forward.saved)
    assert module.program.forward.resident.count("buffer:shift") == 1
    assert not any(name.startswith("snapshot") for name in module.program.forward.saved)


def test_the_state_of_a_single_draw_is_live_as_long_as_the_plan_says():
    """If memory peaks at the draw, both the predicted and the measured peak include the random state."""
    model = nn.Sequential(nn.Linear(8, 4096), nn.Dropout(0.5))
    batch = torch.ones(64, 8)
    module, captured, schedule = planned(model, save_everything, (batch,), None, Tensor.sum)
    predicted = simulate(captured.graph, schedule)
    assert predicted.peak_operation.endswith("native_dropout")
    step = training_step(module, (batch,))
    measured = measure(step, resident=resident_tensors(model, (batch,)), repeats=1)
    assert measured.live_peak_bytes == predicted.live_peak_bytes


def test_with_recomputation_the_state_and_the_old_buffer_are_saved():
    module, captured, schedule = planned(Noisy(), lambda graph: recompute_most(graph, 100), (torch.ones(4, 8),))
    assert "get_state" in module.program.forward.source
    backward = module.program.backward[0]
    again = simulate(captured.graph, schedule).recomputed["native_dropout"]
    assert again > 0
    assert backward.source.count("set_state") == 2 * again
    assert "state 1" in backward.saved
    assert "snapshot:shift" in backward.saved
    assert "buffer:shift" not in backward.saved


def test_the_backward_is_a_list_of_segments_that_returns_each_gradient_once():
    case = make_model("convnet", batch_size=2, width=4, depth=2, size=8)
    module, captured, _ = planned(case.module, save_everything, case.args)
    returned = [gradient for segment in module.program.backward for gradient in segment.gradients]
    assert sorted(returned) == list(range(len(captured.joint.gradients)))


def test_generated_code_calls_no_more_operators_than_autograd():
    case = make_model("gpt2", batch_size=2, layers=4, width=128, vocabulary=512, length=128)
    module, _, _ = planned(case.module, save_everything, case.args)
    counts = []
    for step in (training_step(module, case.args), training_step(case.module, case.args)):
        with Count() as counter:
            step()
        counts.append(counter.count)
    planned_count, plain_count = counts
    assert 0 < planned_count <= plain_count
