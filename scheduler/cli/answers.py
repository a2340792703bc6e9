"""Output of the commands: the answer on stdout, progress on stderr, the exit code."""

from __future__ import annotations

import json
import math
import sys

from scheduler.plan import Plan
from scheduler.solution import Progress
from scheduler.units import format_bytes, format_peak, format_percent, text_table

DONE, PROVEN_NO, USAGE, NO_ANSWER = 0, 1, 2, 3
"""Exit codes."""


def say(message: str) -> None:
    """Print on stderr, with control characters escaped: names in a file must not control the terminal."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in message)
    print(shown, file=sys.stderr, flush=True)


def show_line(text: str) -> None:
    """Show a line in place of the last one that was shown so, "" for none; only if stderr is a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def show_search(found: Progress) -> None:
    """Show how far a search has come, as `show_line` does."""
    gap = "no schedule yet" if math.isinf(found.time) else f"gap {format_percent(found.gap)}"
    show_line(f"searching: {found.seconds:.1f} s, {gap}")


def print_answer(answer: dict[str, object], as_json: bool) -> None:
    """Print on stdout: as JSON, or as one line per value that is not None, with its unit."""
    if as_json:
        print(json.dumps(answer))
    else:
        print(text_table([(key, _text(key, value, answer)) for key, value in answer.items() if value is not None]))


def _text(key: str, value: object, answer: dict[str, object]) -> str:
    if isinstance(value, float):
        return (
            format_percent(value, 4)
            if key in ("overhead", "captured_overhead", "gap", "global_gap")
            else f"{value:.6g}"
        )
    if key.endswith("_bytes") and isinstance(value, int):
        resident, everything = answer.get("resident_bytes"), answer.get("baseline_peak_bytes")
        if key == "resident_bytes" or not isinstance(resident, int) or not isinstance(everything, int):
            return f"{value} bytes, {format_bytes(value)}"
        return f"{value} bytes, {format_peak(value, resident, everything)}"
    return "; ".join(map(str, value)) if isinstance(value, list) else str(value)


def plan_facts(plan: Plan) -> dict[str, object]:
    """Return the facts that every command prints about a plan."""
    return {
        "model": plan.graph.name or None,
        "granularity": plan.granularity,
        "operations": len(plan.graph.operations),
        "status": plan.status.name,
        "search_space": plan.search_space,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "smallest_peak_bytes": plan.smallest_peak_bytes,
        "resident_bytes": plan.graph.resident_bytes,
        "overhead": plan.overhead,
        "captured_overhead": plan.captured_overhead,
        "time": plan.time,
        "time_unit": plan.graph.time_unit,
        "bound": plan.bound,
        "global_bound": plan.global_bound,
        "gap": plan.gap,
        "global_gap": plan.global_gap,
        "solver": plan.solver,
        "solve_seconds": plan.solve_seconds,
    }
