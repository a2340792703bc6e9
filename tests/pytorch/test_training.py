from __future__ import annotations

from dataclasses import replace

from scheduler.pytorch.training import compare_training
from tests.support.pytorch.small_models import small_model


def test_a_captured_step_slower_than_plain_by_more_than_noise_is_reported():
    report = compare_training(small_model("convnet"), "80%", steps=1, costs="flops", solver="greedy", time_limit=2.0)
    assert report.captured_time_overhead is not None
    assert report.time_noise >= 0
    assert replace(report, captured_time_overhead=0.2, time_noise=0.1).captured_step_is_slower
    assert not replace(report, captured_time_overhead=0.2, time_noise=0.3).captured_step_is_slower
    assert not replace(report, captured_time_overhead=-0.2, time_noise=0.0).captured_step_is_slower
    slower = replace(report, measured_time_overhead=0.2, time_noise=0.05)
    assert slower.time_overhead_text == "20.00% ±5.00%"
    assert replace(slower, time_noise=0.3).time_overhead_text == "noise ±30.00%"
    assert replace(slower, measured_time_overhead=-0.59).time_overhead_text == "noise ±59.00%"
    slowed = report.captured_time_overhead if report.captured_step_is_slower else None
    assert report.plan.captured_overhead == slowed
    assert report.to_dict("plan.json")["captured_time_overhead"] == report.captured_time_overhead


def test_layers_have_no_captured_step():
    case = small_model("convnet")
    report = compare_training(case, "min", steps=1, granularity="layers", time_limit=2.0)
    assert report.captured_time_overhead is None
    assert not report.captured_step_is_slower


def test_modules_are_compared_at_the_peak_of_the_allocator():
    case = small_model("convnet")
    report = compare_training(case, "min", steps=1, granularity="modules", time_limit=2.0)
    assert report.plan.granularity == "modules"
    assert report.captured_time_overhead is None
    assert report.predicted.live_bytes is None
    assert report.predicted.allocator_bytes == report.plan.peak_bytes
    assert report.baseline.allocator_bytes == report.plan.baseline_peak_bytes
    assert report.measured.allocator_bytes is not None
    assert report.plan.peak_bytes >= report.measured.allocator_bytes
    assert report.losses == report.plain_losses
