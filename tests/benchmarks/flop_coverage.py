"""Operators with a call that takes over 1 % of a training step, and whether their FLOPs are counted.

    python tests/benchmarks/flop_coverage.py > tests/benchmarks/flop_coverage.csv

The models of the catalog in their default sizes; shares are of the measured times of all
calls of a step, on one thread. `tests/pytorch/measurement/test_flop_formulas.py` checks that every operator of
the table has a formula or is known to be limited by the bytes that it moves. Names of models as
arguments restrict the table to them.
"""

from __future__ import annotations

import csv
import sys

import torch

from scheduler.pytorch.capture.instructions import Call
from scheduler.pytorch.measurement.flop_formulas import has_formula
from scheduler.pytorch.models.catalog import make_model, model_names
from scheduler.pytorch.tracing import capture

SHARE = 0.01
COLUMNS = ["operator", "counted", "largest share", "model"]


def shares(name: str) -> dict[torch._ops.OpOverload, float]:
    """Return the largest share of one call of each operator in the time of a step."""
    case = make_model(name)
    captured = capture(case.module, case.args, case.kwargs, case.loss, costs="measured", workspaces=False)
    total = sum(operation.time for operation in captured.graph.operations)
    found: dict[torch._ops.OpOverload, float] = {}
    for operation, call in zip(captured.graph.operations, captured.instructions, strict=True):
        if isinstance(call, Call):
            found[call.target] = max(found.get(call.target, 0.0), operation.time / total)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    largest: dict[torch._ops.OpOverload, tuple[float, str]] = {}
    for model in sys.argv[1:] or model_names():
        for operator, share in shares(model).items():
            largest[operator] = max(largest.get(operator, (0.0, "")), (share, model))
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for operator, (share, model) in sorted(largest.items(), key=lambda entry: -entry[1][0]):
        if share > SHARE:
            writer.writerow([operator, "FLOPs" if has_formula(operator) else "bytes", f"{share:.1%}", model])
