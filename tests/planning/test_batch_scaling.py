"""Graphs at other batch sizes: predicted from two, and traced where the prediction is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import scheduler as sc
from scheduler.planning.batch_scaling import Growth
from tests.support.training_graphs import conv_net, uniform_chain


def step(batch: int) -> sc.Graph:
    """Return a step in which one weight and one workspace are constant and all else grows with the batch."""
    tensors = [sc.Tensor("w", 100), sc.Tensor("x", 8 * batch), sc.Tensor("y", 5 + 12 * batch), sc.Tensor("dw", 100)]
    operations = [
        sc.Operation("f", ["w", "x"], ["y"], 3.0 * batch, workspace_bytes=64),
        sc.Operation("b", ["x", "y"], ["dw"], 1.0 + batch, workspace_bytes=7 * batch, phase="backward"),
    ]
    return sc.Graph(operations, tensors, resident=["w", "x"], results=["dw"])


class Traces:
    """Records which batch sizes are traced."""

    def __init__(self, graph: Callable[[int], sc.Graph]) -> None:
        self.graph = graph
        self.asked: list[int] = []

    def __call__(self, batch: int) -> sc.Graph:
        self.asked.append(batch)
        return self.graph(batch)


@pytest.mark.parametrize("known", [(2, 3), (3, 2), (4, 9), (2, 40)])
@pytest.mark.parametrize("batch", [2, 5, 17, 1000])
def test_two_traces_predict_every_other_batch_to_the_byte(known: tuple[int, int], batch: int) -> None:
    traces = Traces(step)
    growth = Growth(traces)
    for size in known:
        growth.confirm(size)
    predicted = growth.at(batch)
    assert traces.asked == list(known)
    assert predicted.digest == step(batch).digest  # bytes, times, workspaces and all else
    assert growth.confirm(batch)


def test_a_batch_of_one_can_be_estimated() -> None:
    traces = Traces(step)
    growth = Growth(traces)
    assert growth.estimate(4) == step(4)  # nothing is known, so it is traced
    growth.at(2)
    assert growth.estimate(1).digest == step(1).digest
    assert traces.asked == [4, 2]


def test_a_batch_of_one_is_always_traced() -> None:
    traces = Traces(step)
    growth = Growth(traces)
    assert [growth.at(size).resident_bytes for size in (2, 3, 4, 1)] == [116, 124, 132, 108]
    assert traces.asked == [2, 3, 1]


def test_a_batch_of_one_predicts_nothing() -> None:
    traces = Traces(step)
    growth = Growth(traces)
    for size in (1, 2, 3):
        growth.at(size)
    assert traces.asked == [1, 2, 3]


def test_if_the_structure_changes_every_batch_is_traced_until_two_agree() -> None:
    traces = Traces(lambda batch: uniform_chain(3 if batch < 8 and batch % 2 else 2, size=batch))
    growth = Growth(traces)
    for size in (2, 3, 4, 6):
        assert growth.at(size).resident_bytes == size
    assert traces.asked == [2, 3, 4]  # 2 and 4 agree, and give 6


def test_bytes_that_are_not_affine_are_noticed_and_predictions_discarded() -> None:
    def padded(batch: int) -> sc.Graph:
        return conv_net(2, width=max(64, 16 * batch))

    growth = Growth(padded)
    assert [growth.at(size).resident_bytes for size in (2, 3, 10)] == [64, 64, 64]
    assert not growth.confirm(8)
    assert growth.at(8).resident_bytes == 128
    assert growth.at(9).resident_bytes == 128 + -(-64 // 5)  # through 3 and 8, rounded up
    assert growth.confirm(9) is False
    assert growth.at(20).resident_bytes == 320  # through 8 and 9


def test_a_predicted_batch_of_another_structure_is_not_confirmed() -> None:
    growth = Growth(lambda batch: uniform_chain(3 if batch == 5 else 2, size=4 * batch))
    for size in (2, 3, 5):
        growth.at(size)
    assert not growth.confirm(5)
    assert len(growth.at(5).operations) == len(uniform_chain(3).operations)


def test_bytes_never_fall_below_zero() -> None:
    def shrinking(batch: int) -> sc.Graph:
        graph = step(batch)
        return replace(graph, tensors=(*graph.tensors[:-1], sc.Tensor("dw", max(0, 40 - 10 * batch))))

    growth = Growth(shrinking)
    assert [growth.at(size).tensor("dw").size_bytes for size in (2, 3, 8)] == [20, 10, 0]
