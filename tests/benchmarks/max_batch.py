"""The largest batch that trains within a budget, and one more: their peaks, predicted and measured.

    python tests/benchmarks/max_batch.py > tests/benchmarks/max_batch.csv

Models of their default size; steps of live storages, with FLOPs as costs so that only memory is measured.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections.abc import Iterator

from scheduler.cli import main

CASES = (("gpt2", "256MiB"), ("resnet50", "1GiB"))
PEAKS = ("peak_bytes", "measured_peak_bytes", "next_peak_bytes", "next_measured_peak_bytes")


def rows() -> Iterator[list[object]]:
    """One row per model, with the answer of `scheduler max-batch`."""
    for model, budget in CASES:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = main(["max-batch", model, "--budget", budget, "--costs", "flops", "--measure", "--json"])
        assert code == 0
        answer = json.loads(printed.getvalue())
        yield [model, budget, answer["budget_bytes"], answer["batch_size"], *(answer[peak] for peak in PEAKS)]


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(
        [
            "model",
            "budget",
            "bytes",
            "largest batch",
            "predicted",
            "measured",
            "one more: predicted",
            "one more: measured",
        ]
    )
    for row in rows():
        writer.writerow(row)
        sys.stdout.flush()
