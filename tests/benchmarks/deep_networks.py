"""Transformers of 9 to 1000 blocks, planned by `auto`: time against the number of blocks, and gaps.

    python tests/benchmarks/deep_networks.py > tests/benchmarks/deep_networks.csv

Give numbers of blocks to run only these.
"""

from __future__ import annotations

import csv
import resource
import sys

import scheduler as sc
from scheduler import zoo

CASES = [
    *((9 * 2**k, "50%", 60.0) for k in range(8)),
    (1000, "50%", 300.0),
    (72, "90%", 10.0),
    (72, "70%", 10.0),
    (72, "50%", 10.0),
    (72, "30%", 60.0),
    (72, "10%", 60.0),
]


def main() -> None:
    wanted = {int(argument) for argument in sys.argv[1:]}
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["blocks", "operations", "budget", "overhead", "gap", "status", "seconds", "limit", "peak_gib"])
    for blocks, budget, limit in CASES:
        if wanted and blocks not in wanted:
            continue
        graph = zoo.transformer(blocks, heads=16, separate_heads=True, batch_size=16)
        solution = sc.solve(graph, budget, time_limit=limit)
        row = [blocks, len(graph.operations), budget, f"{solution.overhead:.6f}", f"{solution.gap:.6f}"]
        status = solution.status.name + (f" in {solution.search_space}" if solution.gap <= 1e-6 else "")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        writer.writerow([*row, status, f"{solution.solve_seconds:.1f}", f"{limit:.0f}", f"{peak:.1f}"])
        sys.stdout.flush()


if __name__ == "__main__":
    main()
