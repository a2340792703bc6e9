"""How the calls that a plan recomputes are shown."""

from __future__ import annotations

import pytest

from scheduler.errors import InvalidGraphError
from scheduler.graph import Graph, Operation, Tensor
from scheduler.graph.decisions import RECOMPUTES, SPAN_KINDS, Decision, call_ranges, decisions_of


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (["layers.3", "layers.4", "layers.5"], ["layers.3-5"]),
        (["layers.3", "layers.5", "layers.6"], ["layers.3", "layers.5-6"]),
        (["layers.0.mlp", "layers.1.mlp", "layers.1.norm"], ["layers.0-1.mlp", "layers.1.norm"]),
        (["h.0.a", "h.0.b", "h.1.a", "h.1.b"], ["h.0-1.a", "h.0-1.b"]),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0", "a.1.b.1"], ["a.0.b.0-1", "a.1.b.0-1"]),
        (["cell", "cell#1", "cell#2"], ["cell#0-2"]),
        (["cell#2", "cell#4"], ["cell#2", "cell#4"]),
        (["norm", "", "head"], ["  norm", "(model)", "  head"]),
        (["h.0", "h.0.mlp", "h.1", "h.1.mlp", "h.2.mlp"], ["h.0-1", "  h.0-1.mlp", "h.2.mlp"]),
        (["a.b", "a.b.c.d"], ["a.b", "  a.b.c.d"]),
        (["h.9", "h.10"], ["h.9-10"]),
    ],
)
def test_calls_that_follow_each_other_are_shown_as_ranges(calls: list[str], shown: list[str]) -> None:
    decisions = [Decision(name, int(number or 0)) for name, _, number in (call.partition("#") for call in calls)]
    assert ["  " * found.depth + str(found) for found in call_ranges(decisions)] == shown


def test_spans_are_shown_as_slices_around_what_is_in_them() -> None:
    spans = [Decision("f", 0, span=(0, 8)), Decision("f", 0, span=(4, 8)), Decision("f.5", 0), Decision("f.9", 0)]
    assert ["  " * found.depth + str(found) for found in call_ranges(spans)] == ["f[0:8]", "  f[4:8]", "    f.5", "f.9"]
    equal = [Decision(f"h.{i}.mlp", 0, span=(0, 2)) for i in range(3)]
    assert [str(found) for found in call_ranges(equal)] == ["h.0-2.mlp[0:2]"]
    others = [Decision("", 0), Decision("", 0, span=(1, 3)), Decision("", 1, True, span=(1, 3))]
    assert ["  " * found.depth + str(found) for found in call_ranges(others)] == [
        "(model)",
        "  (model)[1:3]",
        "  (model)[1:3]#1 but its expensive results",
    ]


def test_a_span_that_cannot_be_read_is_refused() -> None:
    operations = [Operation("span", [], ["x"], 0.0, signature="features", kind=SPAN_KINDS[RECOMPUTES])]
    graph = Graph(operations, [Tensor("x", 0)], results=["x"])
    with pytest.raises(InvalidGraphError, match='must end like "children 3:7", got "features"'):
        decisions_of(graph, [0])


def test_calls_that_keep_expensive_results_are_ranges_of_their_own() -> None:
    keeping = [Decision(f"h.{i}", 0, True) for i in range(3)]
    assert [str(found) for found in call_ranges([*keeping, Decision("h.3", 0)])] == [
        "h.0-2 but their expensive results",
        "h.3",
    ]
    assert [str(found) for found in call_ranges(keeping[:1])] == ["h.0 but its expensive results"]
