"""Plots of a plan: its memory and its schedule over the step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import compress
from typing import TYPE_CHECKING

from scheduler.errors import InvalidOptionError
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.plots.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    SKY,
    VERMILLION,
    byte_scale,
    closed_svg,
    figure_of,
    finish,
    new_axes,
    shortened,
)
from scheduler.problem import save_everything
from scheduler.schedule import Schedule
from scheduler.timeline import Timeline
from scheduler.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = (
    ("forward", BLUE, "computed, forward"),
    ("recomputation", VERMILLION, "recomputed"),
    ("backward", GREEN, "computed, backward"),
)
_TIME_UNITS = {
    "s": (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)),
    "FLOP": (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1.0)),
}
_MAX_LABELS = 40
"""Of more layers than this, only every second, third, ... is named."""

PlanOrSchedule = Plan | tuple[Graph, Schedule]
"""A plan, or a graph with a schedule of it."""


def plot_memory(plan: PlanOrSchedule, *, ax: Axes | None = None) -> Axes:
    """Plot the memory of a schedule over the step, next to that of the save-everything schedule.

    Parameters
    ----------
    plan : Plan or (Graph, Schedule)
        The budget is drawn only for a plan.
    ax : matplotlib.axes.Axes, optional
        By default the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        x: time in the graph's unit; y: bytes, resident tensors included.

    Raises
    ------
    InvalidOptionError
        If there is no schedule to draw.
    MissingExtraError
        If matplotlib is not installed.
    """
    graph, schedule, budget = _parts(plan)
    ax = ax or new_axes(3.6)
    planned, baseline = Timeline.of(graph, schedule), Timeline.of(graph, save_everything(graph))
    longest = max(planned.end, baseline.end)
    most = max(planned.simulation.peak_bytes, baseline.simulation.peak_bytes, budget or 0)
    time_unit, time_scale = _time_scale(longest, graph.time_unit)
    unit, scale = byte_scale(most)
    own = "schedule" if budget is None else "plan"
    for timeline, color, name, style in ((baseline, GREY, "save everything", "--"), (planned, BLUE, own, "-")):
        times = [0.0, *(moment / time_scale for run in timeline.runs for moment in (run.start, run.end))]
        sizes = [graph.resident_bytes / scale, *(run.memory_bytes / scale for run in timeline.runs for _ in range(2))]
        label = f"{name}: peak {format_bytes(timeline.simulation.peak_bytes)}"
        (line,) = ax.plot(times, sizes, color=color, linestyle=style, linewidth=1.4, label=label)
        line.set(marker="o", markersize=4, markevery=[sizes.index(max(sizes))])
        if timeline is planned:
            ax.fill_between(times, sizes, color=color, alpha=0.2, linewidth=0)
    levels = (("budget", budget, VERMILLION, "-."), ("resident tensors", graph.resident_bytes, BLACK, ":"))
    for name, level, color, style in levels:
        if level:
            label = f"{name}: {format_bytes(level)}"
            ax.axhline(level / scale, color=color, linestyle=style, linewidth=1.4, label=label)
    ax.set_xlim(0, longest / time_scale or 1)
    ax.set_ylim(0, 1.05 * most / scale or 1)
    ax.set_xlabel(f"time ({time_unit})", parse_math=False)
    ax.set_ylabel(f"memory ({unit})")
    finish(ax, columns=2)
    return ax


def plot_schedule(plan: PlanOrSchedule, *, ax: Axes | None = None) -> Axes:
    """Plot a schedule by layer: what it computes, saves, frees and recomputes, and when.

    Parameters
    ----------
    plan : Plan or (Graph, Schedule)
    ax : matplotlib.axes.Axes, optional
        By default the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        x: time in the graph's unit; y: layers, from the top in the order of their first runs.
        Results (loss, gradients of parameters) are not drawn: every schedule holds them to
        the end.

    Raises
    ------
    InvalidOptionError
        If there is no schedule to draw.
    MissingExtraError
        If matplotlib is not installed.
    """
    graph, schedule, _ = _parts(plan)
    timeline = Timeline.of(graph, schedule)
    names = list(dict.fromkeys(run.layer for run in timeline.runs))
    rows = {name: row for row, name in enumerate(names)}
    ax = ax or new_axes(min(9.0, max(3.0, 1.4 + 0.2 * len(names))))
    time_unit, scale = _time_scale(timeline.end, graph.time_unit)
    index = graph.index
    tensors = [index.tensor_ids[holding.tensor] for holding in timeline.holdings]
    costs = [index.storage_bytes[index.storage_of[t]] > 0 and not index.is_result[t] for t in tensors]
    held = list(compress(timeline.holdings, costs))
    for is_saved, color, label in ((False, LIGHT, "held for a while"), (True, SKY, "saved for the backward phase")):
        spans = [(rows[h.layer], h.start / scale, h.end / scale) for h in held if h.is_saved is is_saved]
        _draw_spans(ax, spans, 0.9, color, label, min_points=0.0)
    for kind, color, label in _KINDS:
        runs = [run for run in timeline.runs if run.kind == kind]
        spans = [(rows[run.layer], run.start / scale, run.end / scale) for run in runs]
        _draw_spans(ax, spans, 0.5, color, label, min_points=1.5)
    freed = [holding for holding in held if holding.is_freed]
    moments = [holding.end / scale for holding in freed]
    places = [rows[holding.layer] for holding in freed]
    ax.plot(moments, places, "|", color=BLACK, markersize=6, markeredgewidth=0.8, zorder=1.5, label="freed")
    shown = range(0, len(names), 1 + len(names) // (_MAX_LABELS + 1))
    ax.set_yticks(shown, [shortened(names[row]) for row in shown], fontsize=8, parse_math=False)
    ax.set_xlim(0, timeline.end / scale or 1)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel(f"time ({time_unit})", parse_math=False)
    ax.set_ylabel("layer")
    finish(ax, columns=3)
    return ax


def inline_svg(draw: Callable[..., Axes], plan: PlanOrSchedule, name: str) -> str:
    """Return a plot of a plan as an SVG element to embed in a page.

    Text is kept as text. Equal plans give equal elements.

    Parameters
    ----------
    draw : callable
        `plot_memory` or `plot_schedule`.
    plan : Plan or (Graph, Schedule)
    name : str
        Prefix of every id in the element, which keeps the ids in a page unique.
    """
    svg = closed_svg(figure_of(draw(plan)))
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def _parts(plan: PlanOrSchedule) -> tuple[Graph, Schedule, int | None]:
    if isinstance(plan, Plan):
        return plan.graph, plan.schedule, plan.budget_bytes
    if isinstance(plan, tuple) and len(plan) == 2 and isinstance(plan[0], Graph) and isinstance(plan[1], Schedule):
        return *plan, None
    given = ", ".join(type(part).__name__ for part in plan) if isinstance(plan, tuple) else type(plan).__name__
    raise InvalidOptionError(f"the plan must be a Plan, or a tuple of a Graph and its Schedule, got {given}")


def _draw_spans(
    ax: Axes,
    spans: Iterable[tuple[int, float, float]],
    height: float,
    color: str,
    label: str,
    *,
    min_points: float,
) -> None:
    """Draw spans (row, start, end) as bars of some minimum width; touching bars of a row are merged."""
    from matplotlib.collections import PolyCollection

    merged: list[tuple[int, float, float]] = []
    for row, start, end in sorted(spans):
        if merged and merged[-1][0] == row and start <= merged[-1][2]:
            merged[-1] = (row, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((row, start, end))
    half = height / 2
    corners = [((a, row - half), (b, row - half), (b, row + half), (a, row + half)) for row, a, b in merged]
    zorder = 2 if min_points else 1
    bars = PolyCollection(corners, facecolor=color, edgecolor=color, linewidth=min_points, zorder=zorder)
    bars.set_label(label)
    ax.add_collection(bars)


def _time_scale(longest: float, unit: str) -> tuple[str, float]:
    """Return a unit in which times are easy to read; a remark after a comma, as of estimates, is kept."""
    base, comma, remark = unit.partition(",")
    scales = _TIME_UNITS.get(base, ((base, 1.0),))
    name, scale = next((scale for scale in scales if longest >= scale[1]), scales[-1])
    return name + comma + remark, scale
