"""Random graphs through every solver, against the exhaustive oracle: as many as are asked for.

    python tests/abuse/many_graphs.py 100000 [--seed 0] [--processes 2]

Each graph gets a budget, an order and one solver, all drawn; graphs and what is checked are those of
`tests/support/contract.py`. The counts are printed as the run goes on. Of an untrue answer, the graph is printed too.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import strategies as st

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import scheduler as sc
from tests.abuse.lots import run_lots
from tests.support.contract import SMALL_CHAINS, SMALL_STEPS, check_answer, draw_case

STEPS = st.one_of(SMALL_STEPS, SMALL_CHAINS)


def check(data: st.DataObject) -> str:
    """Check the answer of a solver to a graph, and return the solver's name."""
    solver, reorder = data.draw(st.sampled_from(sc.solver_names())), data.draw(st.booleans())
    check_answer(draw_case(data, data.draw(STEPS)), solver, reorder=reorder)
    return solver


if __name__ == "__main__":
    run_lots("Check the answers of solvers to random graphs.", check)
