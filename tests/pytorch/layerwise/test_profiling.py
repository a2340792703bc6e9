from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from scheduler.errors import CaptureError, ExecutionError, InvalidOptionError
from scheduler.graph.layers import Layer
from scheduler.pytorch import profile_layers
from scheduler.pytorch.layerwise import link_costs
from scheduler.pytorch.layerwise.survey import Survey
from scheduler.pytorch.measurement.memory import StorageTracker, resident_tensors, training_step
from tests.support.pytorch.layered import Perceptron, mixed_loss, mixed_stack, mixed_state
from tests.support.pytorch.regression import mean_square


def sizes(layer: Layer) -> tuple[int, int, bool, bool]:
    return layer.output_bytes, layer.saved_bytes, layer.keeps_input, layer.keeps_output


def test_bytes_of_a_perceptron_are_those_counted_by_hand():
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    chain = profile_layers(model, (torch.ones(8, 16),), loss=mean_square)
    assert [layer.name for layer in chain.layers] == ["0.Linear", "1.Tanh", "2.Linear", "loss"]
    assert chain.input_bytes == 8 * 16 * 4
    assert not chain.input_needs_gradient
    first, tanh, second, loss = chain.layers
    # The first input is the batch, which is resident; a product keeps its input, tanh its output.
    assert sizes(first) == (8 * 32 * 4, 0, False, False)
    assert sizes(tanh) == (8 * 32 * 4, 0, False, True)
    assert sizes(second) == (8 * 8 * 4, 0, True, False)
    assert sizes(loss) == (4, 0, True, False)
    assert [layer.gradient_bytes for layer in chain.layers] == [8 * 32 * 4, 8 * 32 * 4, 8 * 8 * 4, 4]
    assert first.parameter_bytes == first.parameter_gradient_bytes == (16 * 32 + 32) * 4
    assert second.parameter_bytes == second.parameter_gradient_bytes == (32 * 8 + 8) * 4
    # The squares exist only until their mean is taken.
    assert loss.forward_with_saving_workspace_bytes == loss.forward_without_saving_workspace_bytes == 8 * 8 * 4
    assert first.forward_with_saving_workspace_bytes == 0


def test_dropout_saves_its_noise_and_batch_norm_its_statistics():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.BatchNorm1d(16))
    chain = profile_layers(model, (torch.ones(8, 16),), loss=mean_square)
    _, dropout, norm, _ = chain.layers
    assert sizes(dropout) == (8 * 16 * 4, 8 * 16 * 4, False, False)
    assert sizes(norm) == (8 * 16 * 4, 2 * 16 * 4, True, False)


def test_integer_state_has_no_gradient_and_arguments_passed_on_cost_nothing():
    class Count(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            x, count, batch = state
            return self.linear(x), count + 1, batch

    state = (torch.ones(8, 16), torch.zeros(8, dtype=torch.long), torch.ones(100))
    chain = profile_layers([Count(), Count()], (state,), loss=lambda final: mean_square(final[0]))
    for layer in chain.layers[:2]:
        assert layer.output_bytes == 8 * 16 * 4 + 8 * 8
        assert layer.gradient_bytes == 8 * 16 * 4


def test_the_gradient_of_a_sum_is_one_number():
    chain = profile_layers([nn.Linear(16, 16)], (torch.ones(8, 16),), loss=torch.sum)
    assert chain.layers[0].gradient_bytes == 4


def test_autocast_halves_what_is_passed_on():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        chain = profile_layers(model, (torch.ones(8, 16),), loss=mean_square)
    first, second, _ = chain.layers
    # For its weight's gradient each keeps its input as bfloat16, for its input's the weight.
    assert sizes(first) == (8 * 32 * 2, 8 * 16 * 2, False, False)
    assert sizes(second) == (8 * 32 * 2, 32 * 32 * 2, True, False)


def test_layers_that_share_a_storage_are_merged():
    layers = [nn.Linear(16, 16), nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 16), nn.ReLU(inplace=True), lambda x: x[:4]]
    chain = profile_layers(layers, (torch.ones(8, 16),), loss=mean_square)
    names = [layer.name for layer in chain.layers]
    assert names == ["0.Linear", "1.Sigmoid+2.Flatten", "3.Linear+4.ReLU+5.<lambda>", "loss"]


def test_a_gradient_of_the_input_is_part_of_the_step():
    x = torch.ones(8, 16, requires_grad=True)
    chain = profile_layers([nn.Linear(16, 4)], (x,), loss=mean_square)
    assert chain.input_needs_gradient
    assert x.grad is None


class Watch:
    """A clock that advances by a second between two readings."""

    seconds = 0

    def now(self) -> float:
        self.seconds += 1
        return float(self.seconds)


class Slow(nn.Module):
    """Takes 20 seconds forward and 60 backward, on the watch."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def forward(self, x: Tensor) -> Tensor:
        self.watch.seconds += 20
        y = x * 1.0
        if y.requires_grad:
            y.register_hook(lambda gradient: setattr(self.watch, "seconds", self.watch.seconds + 60))
        return y


def test_times_are_those_of_forward_and_backward(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(link_costs, "now", watch.now)
    chain = profile_layers([nn.Linear(4, 4), Slow(watch)], (torch.ones(2, 4),), loss=mean_square)
    slow = chain.layers[1]
    assert chain.time_unit == "s"
    assert slow.forward_time == slow.forward_without_saving_time == 20 + 1
    assert slow.backward_time == 60 + 1
    for layer in (chain.layers[0], chain.layers[2]):
        assert layer.forward_time == layer.forward_without_saving_time == layer.backward_time == 1


def test_profiling_leaves_no_trace():
    model, state = mixed_stack(8), mixed_state()
    model(state)[0].sum().backward()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    objects = [id(buffer) for buffer in model.buffers()]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    profile_layers(model, (state,), loss=mixed_loss)
    assert [id(buffer) for buffer in model.buffers()] == objects
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert torch.equal(torch.get_rng_state(), random)


def test_profiling_needs_less_memory_than_a_step():
    torch.manual_seed(0)
    model, state = nn.Sequential(*(Perceptron(16) for _ in range(12))), mixed_state()
    resident = resident_tensors(model, state)
    peaks = []
    for run in (
        lambda: profile_layers(model, (state,), loss=mixed_loss),
        training_step(model, (state,), loss=mixed_loss),
    ):
        with StorageTracker(resident) as tracker:
            run()
        peaks.append(tracker.peak_bytes)
    # A step saves eleven times a state per layer: profiling holds the states, and one layer.
    assert peaks[0] < peaks[1] / 3


def test_the_same_layers_give_the_same_graph():
    digests = {
        profile_layers(mixed_stack(8), (mixed_state(seed=seed),), loss=mixed_loss).graph.structure_digest
        for seed in (1, 2)
    }
    assert len(digests) == 1


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Opaque, 'layer "1.Opaque" returns an object of type Opaque, which cannot be detached'),
        (lambda x: x.to_sparse(), "a tensor of layout torch.sparse_coo"),
    ],
    ids=["an object", "a sparse tensor"],
)
def test_state_that_cannot_be_detached_is_refused(layer, message):
    with pytest.raises(ExecutionError, match=message):
        profile_layers([nn.Linear(16, 16), layer], (torch.ones(8, 16),))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "there are no layers"),
        (nn.Sequential(), "there are no layers"),
        ([nn.Linear(16, 16), 3], 'layer "1" must be callable, got int'),
        (nn.Linear(16, 16), "must be an nn.Sequential or a list of layers, got Linear"),
        ("model", "must be an nn.Sequential or a list of layers, got str"),
    ],
    ids=["an empty list", "an empty sequential", "a number", "a module", "text"],
)
def test_anything_but_a_sequence_of_layers_is_rejected(layers, message):
    with pytest.raises(InvalidOptionError, match=message):
        profile_layers(layers, (torch.ones(8, 16),))


def test_a_sequential_that_does_more_than_call_its_layers_is_refused():
    class Residual(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    hooked = nn.Sequential(OrderedDict(linear=nn.Linear(16, 16)))
    hooked.register_forward_hook(lambda module, arguments, output: output * 2)
    for model in (Residual(nn.Linear(16, 16)), hooked):
        with pytest.raises(InvalidOptionError, match="does more than call its layers in turn"):
            profile_layers(model, (torch.ones(8, 16),))


def test_arguments_changed_in_place_are_refused():
    with pytest.raises(ExecutionError, match=r'"1\.mul_" changes the arguments of the call in place'):
        profile_layers([nn.Identity(), Doubling.mul_, nn.Linear(16, 16)], (torch.ones(8, 16),))


class Doubling:
    @staticmethod
    def mul_(x: Tensor) -> Tensor:
        return x.mul_(2)


def test_layers_with_nothing_to_train_are_refused():
    with pytest.raises(CaptureError, match="requires no gradient"):
        profile_layers([nn.Tanh()], (torch.ones(8, 16),))
    with pytest.raises(CaptureError, match="requires no gradient"):
        profile_layers([nn.Linear(16, 16), Tensor.detach], (torch.ones(8, 16),), loss=torch.sum)


def test_a_recurrent_layer_that_draws_dropout_by_itself_is_refused():
    recurrent = nn.LSTM(16, 16, num_layers=2, dropout=0.1, device="meta")  # any device but the CPU
    with pytest.raises(CaptureError, match=r'layer "0" has a recurrent network of 2 layers with dropout 0\.1'):
        Survey([("0", recurrent)], (torch.ones(3, 8, 16, device="meta"),))
