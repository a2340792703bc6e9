"""What the segment and slot methods owe on random chains, against the exhaustive oracle."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import UnsuitableProblemError
from tests.support.oracle import least_peak, optimum

SOLVERS = ["segments", "greedy-segments", "revolve", "mixed"]


@st.composite
def chains(draw: st.DrawFn) -> sc.Chain:
    """Two or three layers, all equal or each drawn."""
    count = draw(st.integers(2, 3))
    equal = draw(st.booleans())
    drawn: list[dict[str, object]] = [
        {
            "forward_time": draw(st.integers(0, 3)),
            "backward_time": draw(st.integers(0, 3)),
            "output_bytes": draw(st.integers(0, 4)),
            "saved_bytes": draw(st.integers(0, 4)),
            "keeps_input": draw(st.booleans()),
            "keeps_output": draw(st.booleans()),
            "forward_without_saving_workspace_bytes": draw(st.sampled_from([0, 0, 2])),
            "backward_workspace_bytes": draw(st.sampled_from([0, 0, 3])),
        }
        for _ in range(1 if equal else count)
    ]
    return sc.Chain([sc.Layer(f"l{i}", **drawn[i % len(drawn)]) for i in range(count)], input_bytes=1)


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=15, deadline=None)
@given(chain=chains(), data=st.data())
def test_every_answer_on_a_chain_is_true_against_the_oracle(solver: str, chain: sc.Chain, data: st.DataObject) -> None:
    plain = chain.graph.to_dict()
    least = least_peak(plain, "any")
    peak = sc.solve(chain, 2**40, solver="save-all").peak_bytes
    budget = data.draw(st.integers(max(0, least - 2), max(least, peak)), label="budget")
    try:
        solution = sc.solve(chain, budget, solver=solver)
    except UnsuitableProblemError:
        assert solver in ("revolve", "mixed")
        assert len({str(layer).replace(layer.name, "") for layer in chain.layers}) > 1
        return
    best = optimum(plain, budget, "any")
    if solution.status is sc.Status.INFEASIBLE:
        assert best is None
    if best is not None:
        assert solution.global_bound <= best
    if solution.schedule is not None:
        assert best is not None
        assert best <= solution.time
        assert solution.peak_bytes <= budget
