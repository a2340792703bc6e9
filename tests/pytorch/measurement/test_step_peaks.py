"""The peak of a step on an accelerator, from statistics that belong to the user."""

from __future__ import annotations

import pytest
import torch

from scheduler.pytorch.measurement.step_peaks import AllocatorPeak


@pytest.mark.parametrize(("peak", "expected"), [(500, []), (700, [600])])
def test_a_step_is_reported_once_if_its_peak_is_the_largest(peak: int, expected: list[int]) -> None:
    statistics, found = (100, 500), []
    step = AllocatorPeak(torch.device("cpu"), found.append, lambda _: statistics)
    x = torch.ones(2, requires_grad=True)
    outputs = {"loss": (x * 2).sum(), "other": x * 3, "number": 1}
    step.watch(outputs)
    statistics = (300, peak)
    assert found == []
    (outputs["loss"] + outputs["other"].sum()).backward()
    assert found == expected
    assert x.grad.tolist() == [5, 5]
