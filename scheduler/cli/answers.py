"""What commands say: the answer on stdout, progress on stderr, the exit code."""

from __future__ import annotations

import json
import sys

from scheduler.plan import Plan
from scheduler.units import format_bytes

DONE, PROVEN_NO, USAGE, NO_ANSWER = 0, 1, 2, 3
"""Exit codes."""


def say(message: str) -> None:
    """Print on stderr; what a hostile file would have the terminal do is spelled out."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in message)
    print(shown, file=sys.stderr, flush=True)


def print_answer(answer: dict[str, object], as_json: bool) -> None:
    """Print on stdout, as JSON or as lines of a name and a value with its unit."""
    if as_json:
        print(json.dumps(answer))
        return
    width = max(map(len, answer))
    for key, value in answer.items():
        if value is None:
            continue
        text = str(value)
        if isinstance(value, float):
            text = f"{value:.4%}" if key in ("overhead", "gap", "global_gap") else f"{value:.6g}"
        elif key.endswith("_bytes") and isinstance(value, int):
            text = f"{value} ({format_bytes(value)})"
        print(f"{key:<{width}}  {text}")


def summary(plan: Plan) -> dict[str, object]:
    """Return what every command says of a plan."""
    return {
        "status": plan.status.name,
        "search_space": plan.search_space,
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "overhead": plan.overhead,
        "time": plan.time,
        "time_unit": plan.graph.time_unit,
        "bound": plan.bound,
        "global_bound": plan.global_bound,
        "gap": plan.gap,
        "global_gap": plan.global_gap,
        "solver": plan.solver,
        "solve_seconds": plan.solve_seconds,
    }
