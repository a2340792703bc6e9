"""The segment and slot methods on random chains, against the exhaustive oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler as sc
from tests.support.contract import check_answer, draw_case
from tests.support.examples import examples

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


@settings(max_examples=examples(15))
@given(chain=chains(), data=st.data())
def test_every_answer_on_a_chain_is_true_against_the_oracle(chain: sc.Chain, data: st.DataObject) -> None:
    case = draw_case(data, chain)
    for solver in SOLVERS:
        solution = check_answer(case, solver, reorder=True)
        if solution is None:
            assert solver in ("revolve", "mixed")
            assert len({str(layer).replace(layer.name, "") for layer in chain.layers}) > 1
            continue
        # Times are small integers: no tolerance.
        if case.any_order is not None:
            assert solution.global_bound <= case.any_order
        if solution.schedule is not None:
            assert case.any_order <= solution.time
