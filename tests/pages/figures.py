"""Figures of the pages, made from the recorded measurements."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import cycle

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scheduler.plots.figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    closed_svg,
    finish,
    new_figure,
)
from tests.pages.recordings import read_cells, read_rows

_COLORS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
_MARKERS = "os^Dv<>P"  # one more than colors, so that both together repeat after 56 series
MIB = 2**20
_WIDTH = 5.4
"""Inches: wide enough for a page, and legible when it is as narrow as a phone."""


def figure_names() -> list[str]:
    """Return the names of all figures."""
    return sorted(_FIGURES)


def svg_of(name: str) -> str:
    """Return a figure as SVG, with the digest of its data in a comment."""
    draw, _ = _FIGURES[name]
    with matplotlib.rc_context({"figure.facecolor": "white", "savefig.facecolor": "white"}):
        svg = closed_svg(draw())
    head, opening, rest = svg.partition("<svg ")
    return f"{head}<!-- {digest_of(name)} -->\n{opening}{rest}"


def digest_of(name: str) -> str:
    """Return the tables that a figure shows, with a digest of what they contain."""
    _, tables = _FIGURES[name]
    digest = hashlib.sha256(repr([read_cells(table) for table in tables]).encode()).hexdigest()
    return f"{', '.join(tables)}: {digest[:16]}"


def _new_figure(height: float) -> Figure:
    figure = new_figure(height)
    figure.set_size_inches(_WIDTH, height)
    return figure


def _new_axes(height: float) -> Axes:
    return _new_figure(height).subplots()


def _step_memory() -> Figure:
    """Live bytes over a step of GPT-2."""
    ax = _new_axes(3.2)
    series: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows("step_memory"):
        series.setdefault(row["series"], []).append((int(row["operators"]), int(row["bytes"]) / MIB))
    looks = {"PyTorch": (GREY, "--"), "plan": (BLUE, "-")}
    for name, (color, style) in looks.items():
        places, sizes = zip(*series[name], strict=True)
        label = f"{name}: peak {max(sizes):.0f} MiB"
        ax.plot(places, sizes, color=color, linestyle=style, linewidth=1.6, drawstyle="steps-post", label=label)
        if name == "plan":
            ax.fill_between(places, sizes, color=color, alpha=0.2, linewidth=0, step="post")
    for name, color, style in (("budget", VERMILLION, "-."), ("resident", BLACK, ":")):
        ((_, size),) = series[name]
        label = f"{name}: {size:.0f} MiB"
        ax.axhline(size, color=color, linestyle=style, linewidth=1.4, label=label)
    ax.set_xlim(0, max(place for points in series.values() for place, _ in points))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("operators of the step that have run")
    ax.set_ylabel("live memory (MiB)")
    finish(ax, columns=2)
    return ax.get_figure(root=True)


def _peers() -> Figure:
    """Frontiers of PyTorch and ours, a panel per model."""
    rows = read_rows("peers")
    models = list(dict.fromkeys(row["model"] for row in rows))
    lines = (len(models) + 1) // 2
    figure = _new_figure(1.9 * lines + 0.5)
    grid = figure.subplots(lines, 2, squeeze=False).flat
    for ax, model in zip(grid, models, strict=False):
        own = [row for row in rows if row["model"] == model]
        ours = _staircase([(float(r["our peak"]), float(r["our FLOPs"])) for r in own if r["our peak"]])
        ax.plot(*zip(*ours, strict=True), color=BLUE, drawstyle="steps-post", linewidth=1.6, label="this package")
        for name, marker, color in (("memory budget", "o", VERMILLION), ("checkpoint", "s", GREEN)):
            points = [(float(r["peak"]), float(r["FLOPs"])) for r in own if r["point"].startswith(name)]
            label = f"PyTorch: {name}"
            ax.plot(*zip(*points, strict=True), marker, color=color, markersize=5, fillstyle="none", label=label)
        ax.set_title(model, fontsize=9, loc="left")
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    *_, last = (ax for ax, _ in zip(figure.axes, models, strict=False))
    for ax in figure.axes[len(models) :]:
        ax.set_axis_off()
    figure.supxlabel("peak over that of saving everything, without resident tensors", fontsize=9)
    figure.supylabel("FLOPs over plain PyTorch", fontsize=9)
    handles, labels = last.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def _staircase(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other is as good as, from the smallest peak to that of saving everything."""
    kept: list[tuple[float, float]] = []
    for peak, cost in sorted(points):
        if not kept or cost < kept[-1][1]:
            kept.append((peak, cost))
    return [*kept, (1.0, kept[-1][1])]


def _predictions() -> Figure:
    """Predicted against measured: the allocator's peaks, and the time lost."""
    rows = read_rows("predictions")
    figure = _new_figure(3.2)
    peaks, times = figure.subplots(1, 2)
    for model, color, marker in zip(dict.fromkeys(row["model"] for row in rows), cycle(_COLORS), cycle(_MARKERS)):
        own = [row for row in rows if row["model"] == model]
        for ax, kind, scale in ((peaks, "allocator", MIB), (times, "overhead", 0.01)):
            columns = (
                ("overhead_predicted", "overhead_measured")
                if kind == "overhead"
                else ("allocator_predicted", "allocator_measured")
            )
            points = [tuple(float(row[column]) / scale for column in columns) for row in own]
            ax.plot(*zip(*points, strict=True), marker, color=color, markersize=5, fillstyle="none", label=model)
    for ax, what in ((peaks, "peak of the allocator (MiB)"), (times, "time lost (%)")):
        high = max(*ax.get_xlim(), *ax.get_ylim())
        ax.plot([0, high], [0, high], color=GREY, linewidth=1, linestyle=":", zorder=0)
        ax.set_xlabel(f"predicted {what}")
        ax.set_ylabel("measured")
        ax.spines[["top", "right"]].set_visible(False)
    handles, labels = peaks.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    return figure


def _answers() -> Figure:
    """Seconds to an answer against the size of the step."""
    ax = _new_axes(3.4)
    deep = [row for row in read_rows("deep_networks") if row["budget"] == "50%" and int(row["limit"]) >= 60]
    deep.sort(key=lambda row: int(row["operations"]))
    sizes, seconds = [int(row["operations"]) for row in deep], [float(row["seconds"]) for row in deep]
    ax.plot(sizes, seconds, "o-", color=BLUE, markersize=5, label="deep transformers at 50%: planning")
    models = read_rows("planning")
    for column, marker, color in (("tracing", "s", GREEN), ("planning", "^", VERMILLION)):
        points = [(int(row["operations"]), max(float(row[column]), 0.1)) for row in models]
        label = f"seven models at 60%: {column}"
        ax.plot(*zip(*points, strict=True), marker, color=color, markersize=5, fillstyle="none", label=label)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xlabel("operations of the step")
    ax.set_ylabel("seconds")
    finish(ax, columns=1)
    return ax.get_figure(root=True)


def _gaps() -> Figure:
    """Gaps against budgets on published graphs."""
    ax = _new_axes(3.4)
    rows = [row for row in read_rows("general_graphs") if row["order"] == "any" and row["budget"][0].isdigit()]
    for graph, color, marker in zip(dict.fromkeys(row["graph"] for row in rows), cycle(_COLORS), cycle(_MARKERS)):
        own = [(int(r["budget"].split()[0]), float(r["gap"].rstrip("%"))) for r in rows if r["graph"] == graph]
        ax.plot(
            *zip(*sorted(own), strict=True), marker, color=color, markersize=6, fillstyle="none", linestyle=":",
            linewidth=1, label=graph,
        )  # fmt: skip
    ax.set_xlabel("budget (% of the peak of saving everything)")
    ax.set_ylabel("gap, over all orders (%)")
    ax.set_ylim(bottom=-0.05)
    finish(ax, columns=2)
    return ax.get_figure(root=True)


_FIGURES: dict[str, tuple[Callable[[], Figure], tuple[str, ...]]] = {
    "answers": (_answers, ("deep_networks", "planning")),
    "gaps": (_gaps, ("general_graphs",)),
    "peers": (_peers, ("peers",)),
    "predictions": (_predictions, ("predictions",)),
    "step_memory": (_step_memory, ("step_memory",)),
}
