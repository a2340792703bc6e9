"""Random graphs through the programs of `ilp`, against the exhaustive oracle: as many as are asked for.

    python tests/abuse/many_bounds.py 100000 [--seed 0] [--processes 2]

Each graph gets a budget and, for each of the two orders, three chains of up to three cuts, all drawn. The count is
printed as the run goes on. Of a bound that is not one, the graph is printed too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.contract import SMALL_STEPS
from tests.support.cut_bounds import check_cut_bounds

LOT = 250
"""Graphs drawn from one seed."""


def run_lot(number: int) -> int:
    """Check the bounds of a lot of graphs, and return how many there were."""
    count = 0

    @seed(number)
    @settings(
        max_examples=LOT, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        nonlocal count
        check_cut_bounds(data, data.draw(SMALL_STEPS))
        count += 1

    check()
    return count


def main() -> None:
    """Run the lots, and print the count after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("graphs", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first lot")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    lots = range(options.seed, options.seed + -(-options.graphs // LOT))
    total, started = 0, time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for count in pool.imap_unordered(run_lot, lots):
            total += count
            print(f"{total} graphs, 0 violations, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
