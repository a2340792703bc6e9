"""The timeline: spans that agree with the simulator, and layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import scheduler as sc
from scheduler.errors import InvalidScheduleError
from scheduler.problem import save_everything
from scheduler.timeline import Timeline
from tests.support.plans import TWICE
from tests.support.strategies import action_sequences, chains, graphs, joint_graphs
from tests.support.training_graphs import uniform_chain


def test_runs_and_holdings_of_a_recomputed_layer_counted_by_hand() -> None:
    timeline = Timeline.of(uniform_chain(2), TWICE)
    assert [(run.operation.name, run.start, run.kind) for run in timeline.runs] == [
        ("f0", 0.0, "forward"),
        ("f1", 1.0, "forward"),
        ("loss", 2.0, "backward"),
        ("f0", 2.0, "recomputation"),
        ("b1", 3.0, "backward"),
        ("b0", 5.0, "backward"),
    ]
    # Batch of 4 bytes; x1; x1, x2; x2, g2; g2, x1; g2, x1, g1; g1, g0: 4 bytes each.
    assert [run.memory_bytes for run in timeline.runs] == [8, 12, 12, 12, 16, 12]
    assert (timeline.boundary, timeline.end) == (2.0, 7.0)
    assert [(h.tensor, h.producer, h.start, h.end, h.is_freed, h.is_saved) for h in timeline.holdings] == [
        ("x1", "f0", 0.0, 2.0, True, False),
        ("x2", "f1", 1.0, 2.0, True, True),
        ("g2", "loss", 2.0, 5.0, True, False),
        ("x1", "f0", 2.0, 5.0, True, False),
        ("g1", "b1", 3.0, 7.0, True, False),
        ("g0", "b0", 5.0, 7.0, False, False),
    ]


@given(graph=st.one_of(graphs(), joint_graphs(), chains().map(lambda chain: chain.graph)), data=st.data())
def test_the_timeline_agrees_with_the_simulator(graph: sc.Graph, data: st.DataObject) -> None:
    schedule = data.draw(st.one_of(st.just(save_everything(graph)), action_sequences(graph)))
    try:
        simulated = sc.simulate(graph, schedule)
    except InvalidScheduleError:
        with pytest.raises(InvalidScheduleError):
            Timeline.of(graph, schedule)
        return
    timeline = Timeline.of(graph, schedule)
    assert timeline.end == simulated.time  # times are whole numbers
    assert sum(run.is_recomputation for run in timeline.runs) == sum(simulated.recomputed.values())
    assert max((run.memory_bytes for run in timeline.runs), default=graph.resident_bytes) == simulated.peak_bytes
    assert sorted(h.tensor for h in timeline.holdings if h.is_saved) == sorted(simulated.saved)
    assert sum(h.is_freed for h in timeline.holdings) == sum(isinstance(action, sc.Free) for action in schedule)


def test_runs_and_holdings_belong_to_the_layer_that_the_operation_states_or_to_the_operation_itself() -> None:
    operations = [
        sc.Operation("h.0/f", [], ["x"], 1.0, layer="block"),
        sc.Operation("g.forward", ["x"], ["y"], 1.0),
        sc.Operation("b", ["y"], ["g"], 1.0, phase="backward", layer="block"),
    ]
    graph = sc.Graph(operations, [sc.Tensor(name, 1) for name in "xyg"], results=["g"])
    timeline = Timeline.of(graph, save_everything(graph))
    assert [run.layer for run in timeline.runs] == ["block", "g.forward", "block"]
    assert [(holding.tensor, holding.layer) for holding in timeline.holdings] == [
        ("x", "block"),
        ("y", "g.forward"),
        ("g", "block"),
    ]
