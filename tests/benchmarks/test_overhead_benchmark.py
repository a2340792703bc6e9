"""Time of generated code that recomputes nothing, over plain eager PyTorch, on a quiet machine.

    pytest -n 0 tests/benchmarks/test_overhead_benchmark.py

`overhead.py` records the figures at realistic sizes, where they are within 5 %.
"""

from __future__ import annotations

import statistics
import time

from scheduler.pytorch.measurement.memory import measure_times, training_step
from scheduler.pytorch.models.catalog import make_model
from tests.support.pytorch.planning import planned, save_everything


def test_generated_code_costs_little_more_than_autograd() -> None:
    case = make_model("gpt2", batch_size=2, layers=4, width=128, vocabulary=512, length=128)
    module, _, _ = planned(case.module, save_everything, case.args)
    steps = {"eager": training_step(case.module, case.args), "planned": training_step(module, case.args)}
    times = measure_times(steps, 8, clock=time.process_time)
    ratios = [planned / eager for eager, planned in zip(*times.values(), strict=True)]
    assert statistics.median(ratios) < 1.25
