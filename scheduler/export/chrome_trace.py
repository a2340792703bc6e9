"""Plans as Chrome traces."""

from __future__ import annotations

import json
import math
import os

from scheduler.files import write_text
from scheduler.plan import Plan
from scheduler.problem import save_everything
from scheduler.schedule import Schedule
from scheduler.timeline import Run, Timeline

_MICROSECONDS = {"s": 1e6, "ms": 1e3, "us": 1.0}
_THREADS = {"forward": 1, "recomputation": 2, "backward": 3}


def plan_to_chrome_trace(plan: Plan) -> dict[str, object]:
    """Return a plan as a Chrome trace, which Perfetto and chrome://tracing open.

    Process 1 is the plan, process 2 the save-everything schedule. Each has a complete event
    per run of an operation, in a thread for first forward runs, one for recomputations and
    one for the backward phase, and counters of memory and budget.

    Parameters
    ----------
    plan : Plan

    Returns
    -------
    dict
        JSON data in the Trace Event Format's object form. `ts` and `dur` are microseconds.
        If the graph's times are not in seconds, one microsecond represents a power of ten of
        their unit, so that the step lasts some seconds; `otherData` states which.

    References
    ----------
    Trace Event Format, Google, 2016: sections "Complete Events", "Counter Events" and
    "Metadata Events".
    """
    graph, unit = plan.graph, plan.graph.time_unit
    scale = _MICROSECONDS.get(unit.partition(",")[0])  # a remark follows, if times are estimated
    stands_for = "1 us"
    if scale is None:
        exponent = math.floor(math.log10(plan.time)) - 6 if plan.time > 0 else 0
        scale, stands_for = 10.0**-exponent, f"1e{exponent} {unit}"
    return {
        "traceEvents": [
            *_events(1, "plan", plan, plan.schedule, scale),
            *_events(2, "save everything", plan, save_everything(graph), scale),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "graph": graph.name,
            "plan_digest": plan.digest,
            "time_unit": unit,
            "microsecond_stands_for": stands_for,
            "budget_bytes": plan.budget_bytes,
            "peak_bytes": plan.peak_bytes,
            "baseline_peak_bytes": plan.baseline_peak_bytes,
        },
    }


def write_chrome_trace(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the Chrome trace of a plan.

    Raises
    ------
    OSError
        If the path cannot be written; an existing file is left as it was.
    """
    write_text(path, json.dumps(plan_to_chrome_trace(plan), allow_nan=False) + "\n")


def _events(process: int, name: str, plan: Plan, schedule: Schedule, scale: float) -> list[dict[str, object]]:
    timeline = Timeline.of(plan.graph, schedule)
    events = [_metadata("process_name", {"name": name}, process, 0)]
    for thread, number in _THREADS.items():
        events.append(_metadata("thread_name", {"name": thread}, process, number))
        events.append(_metadata("thread_sort_index", {"sort_index": number}, process, number))
    events += [_counter("budget", plan.budget_bytes, process, at * scale) for at in (0.0, timeline.end)]
    for run in timeline.runs:
        events += [_counter("memory", run.memory_bytes, process, run.start * scale), _complete(run, process, scale)]
    return events


def _metadata(name: str, args: dict[str, object], process: int, thread: int) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": args}


def _counter(name: str, count: int, process: int, at: float) -> dict[str, object]:
    return {"ph": "C", "name": name, "pid": process, "tid": 0, "ts": at, "args": {"bytes": count}}


def _complete(run: Run, process: int, scale: float) -> dict[str, object]:
    operation = run.operation
    return {
        "ph": "X",
        "name": operation.name,
        "cat": run.kind,
        "pid": process,
        "tid": _THREADS[run.kind],
        "ts": run.start * scale,
        "dur": operation.time * scale,
        "args": {
            "phase": operation.phase,
            "recomputation": run.is_recomputation,
            "time": operation.time,
            "memory_bytes": run.memory_bytes,
            "workspace_bytes": operation.workspace_bytes,
            "signature": operation.signature,
        },
    }
