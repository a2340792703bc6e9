"""Random graphs through every solver, against the exhaustive oracle: as many as are asked for.

    python tests/abuse/many_graphs.py 100000 [--seed 0] [--processes 2]

Each graph gets a budget, an order and one solver, all drawn; graphs and what is checked are those of
`tests/support/contract.py`. The counts are printed as the run goes on. Of an untrue answer, the graph is printed too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import scheduler as sc
from tests.support.contract import SMALL_CHAINS, SMALL_STEPS, check_answer, draw_case

LOT = 250
"""Graphs drawn from one seed."""
STEPS = st.one_of(SMALL_STEPS, SMALL_CHAINS)


def run_lot(number: int) -> Counter[str]:
    """Check the answers to a lot of graphs, and count them by solver."""
    counts: Counter[str] = Counter()

    @seed(number)
    @settings(
        max_examples=LOT, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        solver, reorder = data.draw(st.sampled_from(sc.solver_names())), data.draw(st.booleans())
        check_answer(draw_case(data, data.draw(STEPS)), solver, reorder=reorder)
        counts[solver] += 1

    check()
    return counts


def main() -> None:
    """Run the lots, and print the counts after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("graphs", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first lot")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    lots = range(options.seed, options.seed + -(-options.graphs // LOT))
    total: Counter[str] = Counter()
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for counts in pool.imap_unordered(run_lot, lots):
            total += counts
            print(f"{total.total()} graphs, 0 untrue answers, {time.monotonic() - started:.0f} s", flush=True)
    print(", ".join(f"{solver} {count}" for solver, count in sorted(total.items())))


if __name__ == "__main__":
    main()
