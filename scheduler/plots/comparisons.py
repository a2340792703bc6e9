"""Plots that compare solvers: overheads against budgets, and solve times."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Protocol

from scheduler.comparisons.table import Row
from scheduler.errors import InvalidOptionError
from scheduler.files import write_text
from scheduler.plots.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    byte_scale,
    closed_svg,
    figure_of,
    finish,
    new_axes,
    new_figure,
    shortened,
)
from scheduler.solution import TOLERANCE, Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SERIES = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
_MARKERS = "osD^vPX*<>h"
_MIN_SECONDS = 1e-6
"""Shortest time shown on the logarithmic axis: the clock may measure 0."""


class Answer(Protocol):
    """The attributes that `plot_frontier` reads, of a `Solution` or a `Row` of a comparison."""

    @property
    def budget_bytes(self) -> int:
        """Largest peak, resident tensors included."""

    @property
    def baseline_time(self) -> float:
        """Time of the save-everything schedule."""

    @property
    def baseline_peak_bytes(self) -> int:
        """Peak of the save-everything schedule."""

    @property
    def overhead(self) -> float | None:
        """Time / baseline - 1; None or infinite without a schedule."""

    @property
    def bound(self) -> float | None:
        """Proven lower bound on the time within the search space."""

    @property
    def global_bound(self) -> float | None:
        """Proven lower bound on the time over all schedules."""


def plot_frontier(frontiers: Mapping[str, Iterable[Answer]], *, ax: Axes | None = None) -> Axes:
    """Plot overhead against budget for several solvers, together with the proven lower bounds.

    Lines are steps, because a schedule fits every larger budget, and a lower bound holds for
    every smaller one.

    Parameters
    ----------
    frontiers : mapping of str to Frontier, or to rows of a comparison
        Keys are the names to show. All frontiers must be of the same graph.
    ax : matplotlib.axes.Axes, optional
        By default the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        x: budget in bytes, resident tensors included; y: overhead in percent of the time of
        the save-everything schedule. Points are schedules. Dashes are lower bounds: black for
        all schedules, and in a solver's color within its own search space, if that bound is
        higher. If an overhead is above 100 %, the scale is logarithmic above 1 %.

    Raises
    ------
    InvalidOptionError
        If there is no answer, or the answers are of different graphs.
    MissingExtraError
        If matplotlib is not installed.
    """
    rows_of = {name: sorted(rows, key=lambda row: row.budget_bytes) for name, rows in frontiers.items()}
    rows = [row for answers in rows_of.values() for row in answers]
    baseline = _common_baseline(rows)
    ax = ax or new_axes(3.6)
    unit, scale = byte_scale(max(row.budget_bytes for row in rows))
    proven = _draw_global_bounds(ax, rows, baseline, scale)
    for number, (name, answers) in enumerate(rows_of.items()):
        _draw_solver(ax, number, name, answers, proven, baseline, scale)
    if any(row.overhead is not None and 1 < row.overhead < math.inf for row in rows):
        ax.set_yscale("symlog", linthresh=1)
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylim(bottom=0)
    ax.set_xlabel(f"budget ({unit})")
    ax.set_ylabel("overhead in time (%)")
    finish(ax, columns=3)
    return ax


def _common_baseline(rows: Sequence[Answer]) -> float:
    """Return the baseline time of all rows, which must be of one graph."""
    baselines = sorted({(row.baseline_time, row.baseline_peak_bytes) for row in rows})
    if not baselines:
        raise InvalidOptionError("no frontier to plot: give at least one with an answer")
    if len(baselines) > 1:
        raise InvalidOptionError(
            f"the frontiers must be of one graph, got different baselines {baselines}: plot each graph separately"
        )
    return baselines[0][0]


def _draw_global_bounds(ax: Axes, rows: Sequence[Answer], baseline: float, scale: int) -> dict[int, float]:
    """Draw the highest lower bound over all schedules for each budget, and return it."""
    budgets = sorted({row.budget_bytes for row in rows})
    proven = {budget: max(row.global_bound or 0.0 for row in rows if row.budget_bytes >= budget) for budget in budgets}
    places = [budget / scale for budget in budgets]
    overheads = [_overhead(bound, baseline) for bound in proven.values()]
    ax.fill_between(places, overheads, step="pre", color=LIGHT, linewidth=0, label="proven: no schedule here")
    ax.plot(places, overheads, "_", color=BLACK, markersize=12, label="bound proven at that budget")
    return proven


def _draw_solver(
    ax: Axes,
    number: int,
    name: str,
    answers: Sequence[Answer],
    proven: Mapping[int, float],
    baseline: float,
    scale: int,
) -> None:
    """Draw the schedules of one solver, and its bounds that are above those over all schedules."""
    color, marker, style = _look(number)
    found = [row for row in answers if row.overhead is not None and math.isfinite(row.overhead)]
    places = [row.budget_bytes / scale for row in found]
    overheads = [100 * (row.overhead or 0.0) for row in found]
    (line,) = ax.plot(places, overheads, color=color, marker=marker, drawstyle="steps-post", label=name)
    line.set(markersize=6, markerfacecolor="none", linewidth=1.3, linestyle=style)
    own = [row for row in found if (row.bound or 0.0) > proven[row.budget_bytes] * (1 + TOLERANCE)]
    places = [row.budget_bytes / scale for row in own]
    ax.plot(places, [_overhead(row.bound or 0.0, baseline) for row in own], "_", color=color, markersize=12)


def plot_comparison(rows: Iterable[Row]) -> Figure:
    """Plot the frontiers of all solvers in a comparison, with one `plot_frontier` panel per graph.

    Parameters
    ----------
    rows : Comparison or iterable of Row
        Rows without an answer of the solver are left out.

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
        Rows without an answer of the solver are left out.
    ax : matplotlib.axes.Axes, optional
        By default the axes of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        x: operations; y: seconds; both logarithmic. Each point is a case, filled if its
        answer is proven (OPTIMAL, INFEASIBLE). Lines join the medians of each size.

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
    ax = ax or new_axes(3.6)
    from matplotlib.ticker import LogFormatter

    ax.set_xscale("log")
    ax.set_yscale("log")
    for number, (solver, answers) in enumerate(by_solver.items()):
        color, marker, style = _look(number)
        seconds: dict[int, list[float]] = {}
        for row in sorted(answers, key=lambda row: row.operations):
            # matplotlib finds no limits for a value within rounding of a power of ten.
            second = max(float(f"{row.seconds:.6g}"), _MIN_SECONDS)
            seconds.setdefault(row.operations, []).append(second)
            fill = color if row.status in (Status.OPTIMAL.name, Status.INFEASIBLE.name) else "white"
            ax.plot(row.operations, second, marker, markersize=5, markeredgecolor=color, markerfacecolor=fill)
        medians = [median(times) for times in seconds.values()]
        ax.plot(list(seconds), medians, color=color, linestyle=style, linewidth=1.3)
        ax.plot([], [], color=color, linestyle=style, marker=marker, markersize=5, label=solver)
    for formatted in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        formatted(LogFormatter())
    ax.set_xlabel("size of the graph (operations)")
    ax.plot([], [], "o", markersize=5, markeredgecolor=GREY, markerfacecolor="white", label="hollow: not proven")
    ax.set_ylabel("solve time (s)")
    finish(ax, columns=4)
    return ax


def write_comparison(rows: Iterable[Row], folder: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Write the frontiers of each graph, and the solve times on all graphs, as SVG files.

    Parameters
    ----------
    rows : Comparison or iterable of Row
        Rows without an answer of the solver are left out.
    folder : path
        Created if it is missing.

    Returns
    -------
    tuple of Path
        `solve_time.svg`, and one file per graph with its name, in which characters that some
        file systems reject are replaced.

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
    drawn: dict[str, Callable[[], Figure]] = {"solve_time": lambda: figure_of(plot_solve_time(rows))}
    for name, by_solver in _by_graph(rows):
        stem = re.sub(r"[^\w.-]+", "_", name).strip("._") or "graph"
        numbered = (f"{stem}-{number}" for number in count(2))
        drawn[next(free for free in chain([stem], numbered) if free not in drawn)] = partial(
            _panels, [(name, by_solver)]
        )
    Path(folder).mkdir(exist_ok=True)
    for stem, draw in drawn.items():
        write_text(Path(folder, f"{stem}.svg"), closed_svg(draw()))
    return tuple(Path(folder, f"{stem}.svg") for stem in drawn)


def _by_graph(rows: Iterable[Row]) -> list[tuple[str, dict[str, list[Row]]]]:
    """Return the name of each graph with its rows by solver.

    Every graph has an entry for every solver, so that a solver has the same color everywhere.
    """
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
    panels = new_figure(1.0 + 3.0 * len(graphs)).subplots(len(graphs), squeeze=False)[:, 0]
    for panel, (name, by_solver) in zip(panels, graphs, strict=True):
        plot_frontier(by_solver, ax=panel)
        panel.set_ylabel(f"{shortened(name)}\noverhead in time (%)", parse_math=False)
    for panel in panels[1:]:
        panel.get_legend().remove()
    for line in panels[0].get_lines() if len(graphs) == 1 else ():
        if not len(line.get_xdata()):
            line.set_label("_")  # a series without points in the only panel needs no entry in the legend
    finish(panels[0], columns=3)
    return figure_of(panels[0])


def _look(number: int) -> tuple[str, str, str]:
    """Return the color, marker and line style of a series."""
    colors, markers = len(_SERIES), len(_MARKERS)
    return _SERIES[number % colors], _MARKERS[number % markers], "-" if number < colors else "--"


def _overhead(time: float, baseline: float) -> float:
    return 100 * (time / baseline - 1) if baseline else 0.0
