"""Exports: the trace agrees with the simulator."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import scheduler as sc
from scheduler.export.chrome_trace import plan_to_chrome_trace, write_chrome_trace
from tests.support.plans import oddly_named_plan, plan_of_schedule, twice_plan


@pytest.fixture(scope="module")
def plan() -> sc.Plan:
    return twice_plan()


def events(plan: sc.Plan, kind: str, process: int = 1) -> list[dict[str, Any]]:
    trace: Any = plan_to_chrome_trace(plan)
    return [event for event in trace["traceEvents"] if event["ph"] == kind and event["pid"] == process]


def test_every_run_is_a_complete_event_in_the_order_of_the_schedule(plan: sc.Plan) -> None:
    computed = [action.operation for action in plan.schedule if isinstance(action, sc.Compute)]
    assert [event["name"] for event in events(plan, "X")] == computed


def test_runs_follow_each_other_and_last_as_long_as_the_step(plan: sc.Plan) -> None:
    runs = events(plan, "X")
    ends = [run["ts"] + run["dur"] for run in runs]
    assert [run["ts"] for run in runs[1:]] == pytest.approx(ends[:-1])
    assert ends[-1] == pytest.approx(1e6 * plan.time)  # the graph's times are seconds


def test_recomputations_are_marked_and_phases_are_separate(plan: sc.Plan) -> None:
    runs = events(plan, "X")
    again = Counter(run["name"] for run in runs if run["args"]["recomputation"])
    assert again == {name: count for name, count in plan.simulation.recomputed.items() if count}
    assert again
    for run in runs:
        phase = plan.graph.operation(run["name"]).phase
        assert run["args"]["phase"] == phase
        assert run["cat"] == ("recomputation" if run["args"]["recomputation"] else phase)


def test_the_memory_counter_has_the_simulated_peak_in_plan_and_baseline(plan: sc.Plan) -> None:
    for process, peak in ((1, plan.peak_bytes), (2, plan.baseline_peak_bytes)):
        memory = [e for e in events(plan, "C", process) if e["name"] == "memory"]
        assert max(event["args"]["bytes"] for event in memory) == peak
    budget = [e["args"]["bytes"] for e in events(plan, "C") if e["name"] == "budget"]
    assert set(budget) == {plan.budget_bytes}


def test_the_trace_of_a_chain_counted_by_hand(plan: sc.Plan) -> None:
    assert [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events(plan, "X")] == [
        ("f0", 0, 1e6, 1),
        ("f1", 1e6, 1e6, 1),
        ("loss", 2e6, 0, 3),
        ("f0", 2e6, 1e6, 2),
        ("b1", 3e6, 2e6, 3),
        ("b0", 5e6, 2e6, 3),
    ]
    # The batch; x1; x1, x2; x2, g2; g2, x1; g2, x1, g1; g1, g0: 4 bytes each.
    memory = [(e["ts"], e["args"]["bytes"]) for e in events(plan, "C") if e["name"] == "memory"]
    assert memory == [(0, 8), (1e6, 12), (2e6, 12), (2e6, 12), (3e6, 16), (5e6, 12)]


def test_threads_are_named_and_stand_in_the_order_of_a_step(plan: sc.Plan) -> None:
    for process, name in ((1, "plan"), (2, "save everything")):
        told = events(plan, "M", process)
        assert [event["args"] for event in told if event["name"] == "process_name"] == [{"name": name}]
        names = {event["tid"]: event["args"]["name"] for event in told if event["name"] == "thread_name"}
        order = {event["tid"]: event["args"]["sort_index"] for event in told if event["name"] == "thread_sort_index"}
        assert [names[thread] for thread in sorted(order, key=order.__getitem__)] == [
            "forward",
            "recomputation",
            "backward",
        ]
        assert {event["cat"] for event in events(plan, "X", process)} <= set(names.values())


@pytest.mark.parametrize(("time", "stands_for"), [(5e15, "1e9 FLOP"), (3e-9, "1e-15 FLOP"), (0.0, "1e0 FLOP")])
def test_times_that_are_not_in_seconds_are_scaled_to_some_seconds(time: float, stands_for: str) -> None:
    operations = [sc.Operation("f", [], ["y"], time / 2), sc.Operation("g", ["y"], ["z"], time / 2)]
    graph = sc.Graph(operations, [sc.Tensor("y", 1), sc.Tensor("z", 1)], results=["z"], time_unit="FLOP")
    plan = plan_of_schedule(graph, sc.Schedule.from_text("+f\n+g\n-y"), 2)
    trace: Any = plan_to_chrome_trace(plan)
    assert trace["otherData"]["microsecond_stands_for"] == stands_for
    assert trace["otherData"]["time_unit"] == "FLOP"
    runs = events(plan, "X")
    assert [run["args"]["time"] for run in runs] == [time / 2] * 2
    seconds = (runs[1]["ts"] + runs[1]["dur"]) / 1e6
    assert 1 <= seconds < 10 or time == 0


def test_estimated_seconds_are_seconds() -> None:
    unit = sc.device("t4").time_unit
    graph = sc.Graph([sc.Operation("f", [], ["y"], 2.0)], [sc.Tensor("y", 1)], results=["y"], time_unit=unit)
    plan = plan_of_schedule(graph, sc.Schedule.from_text("+f"), 1)
    assert [run["dur"] for run in events(plan, "X")] == [2e6]
    trace: Any = plan_to_chrome_trace(plan)
    assert (trace["otherData"]["microsecond_stands_for"], trace["otherData"]["time_unit"]) == ("1 us", unit)


def test_the_file_holds_the_trace_and_names_of_any_kind(tmp_path: Path) -> None:
    plan = oddly_named_plan()
    write_chrome_trace(plan, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace == plan_to_chrome_trace(plan)
    assert plan.graph.operations[0].name in {event["name"] for event in trace["traceEvents"]}


def test_a_path_that_cannot_be_written_loses_nothing(plan: sc.Plan, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_chrome_trace(plan, tmp_path / "none" / "trace.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_chrome_trace(plan, tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
