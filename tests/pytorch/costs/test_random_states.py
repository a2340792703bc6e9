"""A recomputed random call holds the state of its generator, which the allocator's peak includes."""

from __future__ import annotations

import torch
from torch import nn

from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
from scheduler.pytorch.tracing import capture
from scheduler.simulator import simulate
from tests.support.pytorch.planning import recompute_most


def test_the_allocator_stays_below_the_peak_where_dropout_is_recomputed() -> None:
    layers = (nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.Tanh()) for _ in range(4))
    model, x = nn.Sequential(*layers), torch.randn(8, 16)
    captured = capture(model, (x,), {}, torch.sum, workspaces=True)
    schedule = recompute_most(captured.graph)
    step = training_step(build(model, captured, schedule, (x,), loss=torch.sum), (x,))
    measured = measure(step, resident=resident_tensors(model, (x,)), repeats=1)
    simulation = simulate(captured.graph, schedule)
    assert measured.live_peak_bytes == simulation.live_peak_bytes
    assert measured.allocator_peak_bytes <= simulation.peak_bytes
