"""The other methods in the comparison train the same model: their gradients are those of eager PyTorch."""

from __future__ import annotations

import argparse
from collections import OrderedDict

import pytest
import torch
from torch import nn

from scheduler.pytorch.models.catalog import ModelCase
from tests.benchmarks import peers

LAYERS, WIDTH, BATCH = 8, 16, 64


@pytest.fixture(scope="module")
def case() -> ModelCase:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)]
    module = nn.Sequential(OrderedDict(features=nn.Sequential(*blocks)))
    return ModelCase(module, (torch.randn(BATCH, WIDTH),), loss=lambda y: y.square().sum())


@pytest.fixture(scope="module")
def model():
    return peers.Model("", {}, ("features",), "features")


def gradients(case, step):
    step()
    return {name: parameter.grad.clone() for name, parameter in case.module.named_parameters()}


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_every_peer_gives_the_gradients_of_eager(model, case):
    expected = gradients(case, peers.eager_step(case))
    wanted = {"memory budget 0.5", "memory budget 0", peers.EACH_BLOCK, "checkpoint_sequential 4"}
    seen = set()
    for name, step, owner in peers.peer_steps(model, case, wanted.__contains__):
        found = gradients(owner, step)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, msg=lambda text, where=(name, key): f"{where}: {text}")
        seen.add(name)
    assert seen == {peers.EVERYTHING, *wanted}


def test_blocks_and_all_segments_but_the_last_are_recomputed(model, case):
    product = 2 * BATCH * WIDTH * WIDTH
    # Forward, and gradients of weights and inputs without the batch.
    plain = (3 * LAYERS - 1) * product
    steps = {plain: case, plain + LAYERS * product: peers.blockwise(model, case)}
    steps[plain + LAYERS * 3 // 4 * product] = peers.segmented(model, case, 4)
    for flops, changed in steps.items():
        assert peers.measured(peers.eager_step(changed), changed).flops == flops


def test_peers_of_equal_peak_and_flops_are_one_point():
    use = peers.Use(live_bytes=10, allocator_bytes=11, flops=5)
    found = {"memory budget 1": use, "memory budget 0.9": use, "other": peers.Use(10, 11, 6)}
    assert peers.merged(found) == {"memory budget 1": "memory budget 1, 0.9", "other": "other"}


def test_the_time_is_the_shortest_and_its_noise_is_from_odd_and_even_rounds(monkeypatch):
    rounds = {"0": [1.0, 2.0, 3.0, 1.5], "1": [4.0, 4.0, 5.0, 5.0]}
    monkeypatch.setattr(peers, "measure_times", lambda steps, repeats, clock: rounds)
    one, other = (lambda: 1), (lambda: 2)
    times = peers.timed([one, other, one], repeats=4)
    assert times.seconds == {one: 1.0, other: 4.0}
    assert times.noise == 0.5


@pytest.mark.filterwarnings("ignore")  # of torch.compile
def test_a_plan_for_the_peak_of_a_peer_needs_no_more_than_the_peer(model, case, monkeypatch):
    monkeypatch.setattr(peers.Model, "make", lambda self: case)
    monkeypatch.setitem(peers.MODELS, "tiny", model)
    options = argparse.Namespace(points=[peers.EACH_BLOCK], budgets=2, seconds=2.0, repeats=2)
    rows = {row["point"]: row for row in peers.compare("tiny", options)}
    assert rows.keys() >= {peers.EVERYTHING, peers.EACH_BLOCK, "ours 2"}
    for point in (peers.EVERYTHING, peers.EACH_BLOCK):
        row = {name: float(value) for name, value in rows[point].items() if name not in ("model", "point")}
        assert row["our peak"] <= row["peak"]
        assert row["our FLOPs"] <= row["FLOPs"]
        assert row["our allocator peak"] <= row["allocator peak"]
        assert row["time"] > 0 < row["our time"]
    assert rows[peers.EVERYTHING]["peak"] == "1.0000"
    assert 0 < float(rows["ours 2"]["our peak"]) < 1
