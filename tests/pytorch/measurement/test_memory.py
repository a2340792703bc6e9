from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from scheduler.errors import InvalidOptionError
from scheduler.pytorch import measure
from scheduler.pytorch.measurement.allocator import allocator_peak, allocator_peaks
from scheduler.pytorch.measurement.memory import (
    FlopCounter,
    StorageTracker,
    measure_times,
    resident_tensors,
    storage_bytes,
    training_step,
)

KIB = 1024
"""One float tensor of 16 x 16."""


def test_a_storage_counts_once_while_anything_refers_to_it():
    with StorageTracker() as tracker:
        x = torch.ones(16, 16)
        view = x.t()
        y = x + 1
        assert tracker.live_bytes == 2 * KIB
        del x
        assert tracker.live_bytes == 2 * KIB
        del view
        assert tracker.live_bytes == KIB
        del y
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 2 * KIB


def test_storages_of_ignored_tensors_do_not_count():
    given = torch.ones(16, 16)
    with StorageTracker([given]) as tracker:
        given.t().mul_(2)
        total = given + 1
    assert tracker.peak_bytes == KIB
    del total
    assert tracker.live_bytes == 0


def test_a_resized_storage_counts_with_its_new_size():
    with StorageTracker() as tracker:
        x = torch.empty(0)
        x.resize_(16, 16)
        assert tracker.live_bytes == KIB
        x.untyped_storage().resize_(2 * KIB)
        x.add_(1)
        assert tracker.live_bytes == 2 * KIB


def test_the_tracker_counts_what_autograd_saves():
    x = torch.ones(16, 16, requires_grad=True)
    with StorageTracker([x]) as tracker:
        y = x.exp().exp().sum()
        # The results of both exponentials are kept for the backward.
        assert tracker.live_bytes == 2 * KIB + 4
        y.backward()
        del y
        assert tracker.live_bytes == KIB  # the gradient


def test_a_sum_that_autograd_computes_in_place_takes_no_memory():
    x = torch.ones(16, 16, requires_grad=True)

    def step() -> None:
        y = x.exp()  # used twice, so two gradients of it are added
        x.grad = None
        ((y * 2).sum() + (y * 3).sum()).backward()

    # The peak is at that sum: y, which exp saved, and both gradients. Scalars are a few bytes.
    assert allocator_peak(step) == pytest.approx(3 * KIB, abs=32)
    x.grad = None
    with StorageTracker([x]) as tracker:
        step()
    assert tracker.peak_bytes == pytest.approx(3 * KIB, abs=32)


def test_a_sum_of_gradients_of_which_one_is_held_takes_memory():
    x, held = torch.ones(16, 16, requires_grad=True), []

    def step() -> None:
        held.clear()
        y = x.exp()
        double = (y * 2).sum()
        view = y.view_as(y)
        view.register_hook(held.append)  # the first gradient of y
        x.grad = None
        (double + (view * 3).sum()).backward()

    assert allocator_peak(step) == pytest.approx(4 * KIB, abs=32)
    x.grad = None
    held.clear()
    with StorageTracker([x]) as tracker:
        step()
    assert tracker.peak_bytes == pytest.approx(4 * KIB, abs=32)


def test_the_tracker_works_with_higher_order_operators():
    from torch._prims.rng_prims import run_and_save_rng_state

    with StorageTracker() as tracker:
        state, noise = run_and_save_rng_state(torch.ops.aten.rand.default, [16, 16], device="cpu")
        assert tracker.live_bytes == KIB + state.untyped_storage().nbytes()
        assert noise.shape == (16, 16)


def test_flops_of_a_linear_layer_are_counted_forward_and_backward():
    layer = nn.Linear(16, 8)
    x = torch.ones(4, 16)
    with FlopCounter() as counter:
        layer(x).sum().backward()
    # Forward, and the gradient of the weight; the input needs none.
    assert counter.flops == 2 * (2 * 4 * 16 * 8)


def test_the_allocator_peak_is_the_running_sum_of_allocations():
    def step() -> None:
        x = torch.ones(256, 256)
        y = x + x
        del x
        z = y + y
        del y, z

    assert allocator_peak(step) == 2 * 256 * 256 * 4


def test_the_allocator_peaks_of_several_steps_are_separate(capfd):
    kept = []
    steps = [lambda: kept.append(torch.ones(256, 256)), kept.clear, lambda: torch.ones(64, 64).sum()]
    assert allocator_peaks(steps) == [256 * 256 * 4, 0, 64 * 64 * 4 + 4]
    assert "profiler_start" not in capfd.readouterr().err


def test_the_allocator_peak_is_measured_below_a_dispatch_mode():
    with StorageTracker():
        assert allocator_peak(lambda: torch.ones(16, 16) + 1) >= 2 * KIB


def test_a_measurement_adds_the_resident_bytes_to_those_that_the_step_allocates():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh())
    x = torch.ones(16, 16)
    step = training_step(model, (x,), loss=torch.sum)
    measurement = measure(step, resident=resident_tensors(model, x), repeats=2, baseline=step)
    assert measurement.resident_bytes == 2 * KIB
    # At the peak: the loss and its gradient, the gradient of tanh's input, and either tanh's
    # output or the gradient of the weight.
    assert measurement.live_peak_bytes == 2 * KIB + 8 + 2 * KIB
    assert measurement.flops == 2 * (2 * 16**3)
    assert measurement.overhead == measurement.seconds / measurement.baseline_seconds - 1
    assert measurement.allocator_peak_bytes >= measurement.live_peak_bytes - 64


def test_resident_tensors_that_share_a_storage_count_once():
    x = torch.ones(16, 16)
    assert storage_bytes([x, x.t(), torch.ones(16, 16)]) == 2 * KIB


def test_steps_take_turns_when_they_are_timed():
    order = []
    times = measure_times({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 3)
    assert order == ["a", "b"] * 4
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    ticks = itertools.count(0.0, 0.5)
    assert measure_times({"a": lambda: None}, 2, clock=lambda: next(ticks)) == {"a": [0.5, 0.5]}
    with pytest.raises(InvalidOptionError, match="repeats"):
        measure(lambda: None, repeats=0)


def test_the_parts_of_a_sparse_tensor_count() -> None:
    embedding, words = nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2])
    output = embedding(words)
    tracker = StorageTracker([*embedding.parameters(), words])
    with tracker:
        output.sum().backward()
    assert embedding.weight.grad.is_sparse
    assert tracker.live_bytes >= 2 * 8 + 2 * 4 * 4
