"""Random graphs through the programs of `ilp`, against the exhaustive oracle: as many as are asked for.

    python tests/abuse/many_bounds.py 100000 [--seed 0] [--processes 2]

Each graph gets a budget and, for each of the two orders, three chains of up to three cuts, all drawn. The count is
printed as the run goes on. Of a bound that is not one, the graph is printed too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import strategies as st

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.abuse.lots import run_lots
from tests.support.contract import SMALL_STEPS
from tests.support.cut_bounds import check_cut_bounds
from tests.support.strategies import thin_graphs


def check(data: st.DataObject) -> str:
    """Check the bounds of a graph."""
    check_cut_bounds(data, data.draw(st.one_of(SMALL_STEPS, thin_graphs())))
    return "ilp"


if __name__ == "__main__":
    run_lots("Check bounds on random graphs.", check)
