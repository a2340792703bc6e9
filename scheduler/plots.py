"""Pictures of plans and comparisons; each draws on the axes given, or on a figure of its own.

Colours are those of Okabe and Ito (Color Universal Design, 2008), told apart with any
colour vision; what they say is also said by shape, line style or place.
"""

from __future__ import annotations

import io
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress, count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from scheduler.comparison import Row
from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.formats import write_text
from scheduler.graph import Graph
from scheduler.plan import Plan
from scheduler.problem import save_everything
from scheduler.schedule import Schedule
from scheduler.solution import TOLERANCE, Status
from scheduler.timeline import Timeline, layer_of
from scheduler.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY, LIGHT, SKY, BLUE = "#000000", "#888888", "#DDDDDD", "#56B4E9", "#0072B2"
GREEN, ORANGE, VERMILLION, PURPLE = "#009E73", "#E69F00", "#D55E00", "#CC79A7"
_SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
_MARKERS = "osD^vPX*<>h"
_KINDS = (
    ("forward", BLUE, "computed, forward"),
    ("recomputation", VERMILLION, "recomputed"),
    ("backward", GREEN, "computed, backward"),
)
_TIME_UNITS = {
    "s": (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)),
    "FLOP": (("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("kFLOP", 1e3), ("FLOP", 1.0)),
}
_MOST_LABELS, _LONGEST_LABEL = 40, 28
_SHORTEST_SECONDS = 1e-6
"""Shown for a time that the clock could not tell from 0."""

PlanOrSchedule = Plan | tuple[Graph, Schedule]
"""A plan, or a graph with a schedule of it."""


def plot_memory(plan: PlanOrSchedule, *, ax: Axes | None = None) -> Axes:
    """Plot memory over the step: the schedule against saving everything, and the budget as a line.

    Parameters
    ----------
    plan : Plan or (Graph, Schedule)
        Without a plan there is no budget line.
    ax : matplotlib.axes.Axes, optional
        By default those of a new figure.

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
    ax = ax or _new_axes(3.6)
    planned, baseline = Timeline.of(graph, schedule), Timeline.of(graph, save_everything(graph))
    longest = max(planned.end, baseline.end)
    most = max(planned.simulation.peak_bytes, baseline.simulation.peak_bytes, budget or 0)
    time_unit, time_scale = _time_scale(longest, graph.time_unit)
    unit, scale = _byte_scale(most)
    own = "schedule" if budget is None else "plan"
    for timeline, colour, name, style in ((baseline, GREY, "save everything", "--"), (planned, BLUE, own, "-")):
        times = [0.0, *(moment / time_scale for run in timeline.runs for moment in (run.start, run.end))]
        sizes = [graph.resident_bytes / scale, *(run.memory_bytes / scale for run in timeline.runs for _ in range(2))]
        label = f"{name}: peak {format_bytes(timeline.simulation.peak_bytes)}"
        (line,) = ax.plot(times, sizes, color=colour, linestyle=style, linewidth=1.4, label=label)
        line.set(marker="o", markersize=4, markevery=[sizes.index(max(sizes))])
        if timeline is planned:
            ax.fill_between(times, sizes, color=colour, alpha=0.2, linewidth=0)
    levels = (("budget", budget, VERMILLION, "-."), ("resident tensors", graph.resident_bytes, BLACK, ":"))
    for name, level, colour, style in levels:
        if level:
            label = f"{name}: {format_bytes(level)}"
            ax.axhline(level / scale, color=colour, linestyle=style, linewidth=1.4, label=label)
    ax.set_xlim(0, longest / time_scale or 1)
    ax.set_ylim(0, 1.05 * most / scale or 1)
    ax.set_xlabel(f"time ({time_unit})", parse_math=False)
    ax.set_ylabel(f"memory ({unit})")
    _finish(ax, columns=2)
    return ax


def plot_schedule(plan: PlanOrSchedule, *, ax: Axes | None = None) -> Axes:
    """Plot the schedule by layer: what is computed, saved, freed and computed again, and when.

    Parameters
    ----------
    plan : Plan or (Graph, Schedule)
    ax : matplotlib.axes.Axes, optional
        By default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        x: time in the graph's unit; y: layers (`timeline.layer_of`), in order of their first
        run from the top. Results (loss, gradients of parameters) are held to the end of every
        step, and not drawn.

    Raises
    ------
    InvalidOptionError
        If there is no schedule to draw.
    MissingExtraError
        If matplotlib is not installed.
    """
    graph, schedule, _ = _parts(plan)
    timeline = Timeline.of(graph, schedule)
    names = list(dict.fromkeys(layer_of(run.operation.name) for run in timeline.runs))
    rows = {name: row for row, name in enumerate(names)}
    ax = ax or _new_axes(min(9.0, max(3.0, 1.4 + 0.2 * len(names))))
    time_unit, scale = _time_scale(timeline.end, graph.time_unit)
    index = graph.index
    tensors = [index.tensor_ids[holding.tensor] for holding in timeline.holdings]
    costs = [index.storage_bytes[index.storage_of[t]] > 0 and not index.is_result[t] for t in tensors]
    held = list(compress(timeline.holdings, costs))
    for is_saved, colour, label in ((False, LIGHT, "held for a while"), (True, SKY, "saved for the backward phase")):
        spans = [(rows[layer_of(h.maker)], h.start / scale, h.end / scale) for h in held if h.is_saved is is_saved]
        _draw_spans(ax, spans, 0.9, colour, label, least_points=0.0)
    for kind, colour, label in _KINDS:
        runs = [run for run in timeline.runs if run.kind == kind]
        spans = [(rows[layer_of(run.operation.name)], run.start / scale, run.end / scale) for run in runs]
        _draw_spans(ax, spans, 0.5, colour, label, least_points=1.5)
    freed = [holding for holding in held if holding.is_freed]
    moments = [holding.end / scale for holding in freed]
    places = [rows[layer_of(holding.maker)] for holding in freed]
    ax.plot(moments, places, "|", color=BLACK, markersize=6, markeredgewidth=0.8, zorder=1.5, label="freed")
    shown = range(0, len(names), 1 + len(names) // (_MOST_LABELS + 1))
    ax.set_yticks(shown, [_shortened(names[row]) for row in shown], fontsize=8, parse_math=False)
    ax.set_xlim(0, timeline.end / scale or 1)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlabel(f"time ({time_unit})", parse_math=False)
    ax.set_ylabel("layer")
    _finish(ax, columns=3)
    return ax


class Answer(Protocol):
    """What `plot_frontier` reads: a `Solution`, or a `Row` of a comparison."""

    @property
    def budget_bytes(self) -> int:
        """Resident tensors included."""

    @property
    def baseline_time(self) -> float:
        """Of the save-everything schedule."""

    @property
    def baseline_peak_bytes(self) -> int:
        """Of the save-everything schedule."""

    @property
    def overhead(self) -> float | None:
        """Time / baseline - 1; None or infinite without a schedule."""

    @property
    def bound(self) -> float | None:
        """Proven lower bound on the time within the search space."""

    @property
    def bound_any(self) -> float | None:
        """Proven lower bound on the time over all schedules."""


def plot_frontier(frontiers: Mapping[str, Iterable[Answer]], *, ax: Axes | None = None) -> Axes:
    """Plot overhead against budget for several solvers, above what is proven impossible.

    A schedule serves every larger budget, and a lower bound every smaller one: so the lines
    are steps.

    Parameters
    ----------
    frontiers : mapping of str to Frontier, or to rows of a comparison
        By the name to show; all of one graph.
    ax : matplotlib.axes.Axes, optional
        By default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        x: budget in bytes, resident tensors included; y: overhead in per cent of the time of
        saving everything. Points are schedules. Dashes are lower bounds: black over all
        schedules, and in a solver's colour within its own search space, where that is higher.
        Where an overhead is above 100 %, the scale is logarithmic above 1 %.

    Raises
    ------
    InvalidOptionError
        If there is no answer, or they are of different graphs.
    MissingExtraError
        If matplotlib is not installed.
    """
    rows_of = {name: sorted(rows, key=lambda row: row.budget_bytes) for name, rows in frontiers.items()}
    rows = [row for answers in rows_of.values() for row in answers]
    baselines = sorted({(row.baseline_time, row.baseline_peak_bytes) for row in rows})
    if not baselines:
        raise InvalidOptionError("no frontier to plot: give at least one with an answer")
    if len(baselines) > 1:
        raise InvalidOptionError(f"these frontiers are of graphs with different baselines {baselines}: plot each alone")
    baseline = baselines[0][0]
    ax = ax or _new_axes(3.6)
    unit, scale = _byte_scale(max(row.budget_bytes for row in rows))
    budgets = sorted({row.budget_bytes for row in rows})
    proven = {budget: max(row.bound_any or 0.0 for row in rows if row.budget_bytes >= budget) for budget in budgets}
    places = [budget / scale for budget in budgets]
    floor = [_overhead(bound, baseline) for bound in proven.values()]
    ax.fill_between(places, floor, step="pre", color=LIGHT, linewidth=0, label="proven: no schedule here")
    ax.plot(places, floor, "_", color=BLACK, markersize=12, label="bound proven at that budget")
    for number, (name, answers) in enumerate(rows_of.items()):
        colour, marker, style = _look(number)
        found = [row for row in answers if row.overhead is not None and math.isfinite(row.overhead)]
        places = [row.budget_bytes / scale for row in found]
        overheads = [100 * (row.overhead or 0.0) for row in found]
        (line,) = ax.plot(places, overheads, color=colour, marker=marker, drawstyle="steps-post", label=name)
        line.set(markersize=6, markerfacecolor="none", linewidth=1.3, linestyle=style)
        own = [row for row in found if (row.bound or 0.0) > proven[row.budget_bytes] * (1 + TOLERANCE)]
        places = [row.budget_bytes / scale for row in own]
        ax.plot(places, [_overhead(row.bound or 0.0, baseline) for row in own], "_", color=colour, markersize=12)
    if any(row.overhead is not None and 1 < row.overhead < math.inf for row in rows):
        ax.set_yscale("symlog", linthresh=1)
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"budget ({unit})")
    ax.set_ylabel("overhead in time (%)")
    _finish(ax, columns=3)
    return ax


def plot_comparison(rows: Iterable[Row]) -> Figure:
    """Plot the frontiers of all solvers in a comparison, one panel of `plot_frontier` per graph.

    Parameters
    ----------
    rows : Comparison or iterable of Row
        Rows in which the solver gave no answer are left out.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InvalidOptionError
        If there is no row with an answer.
    MissingExtraError
        If matplotlib is not installed.
    """
    return _panels(_by_graph(rows))


def plot_solve_time(rows: Iterable[Row], *, ax: Axes | None = None) -> Axes:
    """Plot solve time against the size of the graph, for several solvers.

    Parameters
    ----------
    rows : Comparison or iterable of Row
        Rows in which the solver gave no answer are left out.
    ax : matplotlib.axes.Axes, optional
        By default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        x: operations; y: seconds; both logarithmic. A point is a case, filled where its
        answer is proven (OPTIMAL, INFEASIBLE); lines join the medians of each size.

    Raises
    ------
    InvalidOptionError
        If there is no row with an answer.
    MissingExtraError
        If matplotlib is not installed.
    """
    by_solver: dict[str, list[Row]] = {}
    for row in rows:
        if row.status in Status.__members__:
            by_solver.setdefault(row.solver, []).append(row)
    if not by_solver:
        raise InvalidOptionError("no solve times to plot: give at least one row with an answer")
    ax = ax or _new_axes(3.6)
    from matplotlib.ticker import LogFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    for number, (solver, answers) in enumerate(by_solver.items()):
        colour, marker, style = _look(number)
        seconds: dict[int, list[float]] = {}
        for row in sorted(answers, key=lambda row: row.operations):
            second = max(row.seconds, _SHORTEST_SECONDS)
            seconds.setdefault(row.operations, []).append(second)
            fill = colour if row.status in (Status.OPTIMAL.name, Status.INFEASIBLE.name) else "white"
            ax.plot(row.operations, second, marker, markersize=5, markeredgecolor=colour, markerfacecolor=fill)
        medians = [median(times) for times in seconds.values()]
        ax.plot(list(seconds), medians, color=colour, linestyle=style, linewidth=1.3)
        ax.plot([], [], color=colour, linestyle=style, marker=marker, markersize=5, label=solver)
    for formatted in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        formatted(LogFormatter())
    ax.set_xlabel("size of the graph (operations)")
    ax.plot([], [], "o", markersize=5, markeredgecolor=GREY, markerfacecolor="white", label="hollow: not proven")
    ax.set_ylabel("solve time (s)")
    _finish(ax, columns=4)
    return ax


def write_figure(figure: Figure | Axes, path: str | os.PathLike[str]) -> None:
    """Write a figure, or the one that axes stand on, as SVG.

    Raises
    ------
    OSError
        If the path cannot be written; an existing file is left as it was.
    """
    from matplotlib.figure import Figure

    write_text(path, _svg(figure if isinstance(figure, Figure) else _figure(figure)))


def write_comparison(rows: Iterable[Row], folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the frontiers on each graph, and the solve times on all, as SVG files in a folder.

    Parameters
    ----------
    rows : Comparison or iterable of Row
        Rows in which the solver gave no answer are left out.
    folder : path
        Made if it is missing.

    Returns
    -------
    tuple of Path
        `solve_time.svg`, and one file per graph, named as it is but for characters that a file
        name cannot hold everywhere.

    Raises
    ------
    InvalidOptionError
        If there is no row with an answer.
    MissingExtraError
        If matplotlib is not installed.
    OSError
        If a file cannot be written; an existing one is left as it was.
    """
    rows = tuple(rows)
    drawn: dict[str, Callable[[], Figure]] = {"solve_time": lambda: _figure(plot_solve_time(rows))}
    for name, by_solver in _by_graph(rows):
        stem = re.sub(r"[^\w.-]+", "_", name).strip("._") or "graph"
        numbered = (f"{stem}-{number}" for number in count(2))
        drawn[next(free for free in chain([stem], numbered) if free not in drawn)] = partial(
            _panels, [(name, by_solver)]
        )
    Path(folder).mkdir(exist_ok=True)
    for stem, draw in drawn.items():
        write_text(Path(folder, f"{stem}.svg"), _closed_svg(draw()))
    return tuple(Path(folder, f"{stem}.svg") for stem in drawn)


def inline_svg(draw: Callable[..., Axes], plan: PlanOrSchedule, name: str) -> str:
    """Return a picture of a plan as an SVG element to stand in a page.

    The text of the picture stays text. Equal plans give equal elements.

    Parameters
    ----------
    draw : callable
        `plot_memory` or `plot_schedule`.
    plan : Plan or (Graph, Schedule)
    name : str
        Told before every id in the element, so that several stand in one page.
    """
    svg = _closed_svg(_figure(draw(plan)))
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)


def _by_graph(rows: Iterable[Row]) -> list[tuple[str, dict[str, list[Row]]]]:
    """Return the name of each graph with its rows by solver; of all solvers, so that each looks the same everywhere."""
    answers = [row for row in rows if row.status in Status.__members__]
    if not answers:
        raise InvalidOptionError("no comparison to plot: give at least one row with an answer")
    solvers = dict.fromkeys(row.solver for row in answers)
    graphs: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in answers:
        by_solver = graphs.setdefault((row.graph, row.graph_digest), {solver: [] for solver in solvers})
        by_solver[row.solver].append(row)
    return [(name, by_solver) for (name, _), by_solver in graphs.items()]


def _panels(graphs: Sequence[tuple[str, Mapping[str, Iterable[Answer]]]]) -> Figure:
    panels = _new_figure(1.0 + 3.0 * len(graphs)).subplots(len(graphs), squeeze=False)[:, 0]
    for panel, (name, by_solver) in zip(panels, graphs, strict=True):
        plot_frontier(by_solver, ax=panel)
        panel.set_ylabel(f"{_shortened(name)}\noverhead in time (%)", parse_math=False)
    for panel in panels[1:]:
        panel.get_legend().remove()
    for line in panels[0].get_lines() if len(graphs) == 1 else ():
        if not len(line.get_xdata()):
            line.set_label("_")  # what has no point in the only panel needs no entry in the legend
    _finish(panels[0], columns=3)
    return _figure(panels[0])


def _closed_svg(figure: Figure) -> str:
    """Return a figure that nobody else has as SVG, and close it."""
    from matplotlib import pyplot

    try:
        return _svg(figure)
    finally:
        pyplot.close(figure)


def _svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scheduler"}), warnings.catch_warnings():
        # Text stays text: the reader's fonts count, not those of matplotlib.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    if figure is None:
        raise InvalidOptionError("these axes were removed from their figure")
    return figure


def _new_figure(height: float) -> Figure:
    """Return a new figure, as wide as a README shows it."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError('pictures need matplotlib: pip install "checkpoint-scheduler[plot]"') from error
    return pyplot.figure(figsize=(7.2, height), layout="constrained")


def _new_axes(height: float) -> Axes:
    return _new_figure(height).subplots()


def _parts(plan: PlanOrSchedule) -> tuple[Graph, Schedule, int | None]:
    if isinstance(plan, Plan):
        return plan.graph, plan.schedule, plan.budget_bytes
    if isinstance(plan, tuple) and len(plan) == 2 and isinstance(plan[0], Graph) and isinstance(plan[1], Schedule):
        return *plan, None
    given = ", ".join(type(part).__name__ for part in plan) if isinstance(plan, tuple) else type(plan).__name__
    raise InvalidOptionError(f"give a Plan, or a Graph and a Schedule of it, not {given}: there is nothing to draw")


def _draw_spans(
    ax: Axes,
    spans: Iterable[tuple[int, float, float]],
    height: float,
    colour: str,
    label: str,
    *,
    least_points: float,
) -> None:
    """Draw (row, start, end) as bars of some least width; those of a row that meet are one."""
    from matplotlib.collections import PolyCollection

    merged: list[tuple[int, float, float]] = []
    for row, start, end in sorted(spans):
        if merged and merged[-1][0] == row and start <= merged[-1][2]:
            merged[-1] = (row, merged[-1][1], max(end, merged[-1][2]))
        else:
            merged.append((row, start, end))
    half = height / 2
    corners = [((a, row - half), (b, row - half), (b, row + half), (a, row + half)) for row, a, b in merged]
    zorder = 2 if least_points else 1
    bars = PolyCollection(corners, facecolor=colour, edgecolor=colour, linewidth=least_points, zorder=zorder)
    bars.set_label(label)
    ax.add_collection(bars)


def _look(number: int) -> tuple[str, str, str]:
    """Return colour, marker and line style of the series of that number."""
    colours, markers = len(_SERIES), len(_MARKERS)
    return _SERIES[number % colours], _MARKERS[number % markers], "-" if number < colours else "--"


def _overhead(time: float, baseline: float) -> float:
    return 100 * (time / baseline - 1) if baseline else 0.0


def _byte_scale(most: int) -> tuple[str, int]:
    """Return the unit in which `format_bytes` would write the largest value, and its bytes."""
    unit = format_bytes(most).split()[1]
    return unit, parse_bytes(f"1{unit}")


def _time_scale(longest: float, unit: str) -> tuple[str, float]:
    scales = _TIME_UNITS.get(unit, ((unit, 1.0),))
    return next((scale for scale in scales if longest >= scale[1]), scales[-1])


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST_LABEL else f"…{name[1 - _LONGEST_LABEL :]}"


def _finish(ax: Axes, *, columns: int) -> None:
    """Take away what says nothing, and put the legend where no data is."""
    ax.spines[["top", "right"]].set_visible(False)
    legend = ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)
