"""Run lots of drawn examples in several processes."""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

LOT = 250
"""Examples drawn from one seed."""

Check = Callable[[st.DataObject], str]
"""Draw one example and check it; return under which name it is counted."""


def run_lot(number: int, check: Check) -> Counter[str]:
    """Check the examples that are drawn from a seed, and count them by name."""
    counts: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=LOT, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def check_one(data: st.DataObject) -> None:
        counts[check(data)] += 1

    check_one()
    return counts


def run_lots(description: str, check: Check) -> None:
    """Run as many lots as the command line asks for, and print the counts after each."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("graphs", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first lot")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    lots = range(options.seed, options.seed + -(-options.graphs // LOT))
    total: Counter[str] = Counter()
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for counts in pool.imap_unordered(partial(run_lot, check=check), lots):
            total += counts
            print(f"{total.total()} graphs, 0 violations, {time.monotonic() - started:.0f} s", flush=True)
    print(", ".join(f"{name} {count}" for name, count in sorted(total.items())))
