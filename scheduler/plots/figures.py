"""Shared parts of all plots: figures and their colors, scales, legends and files.

The colors are those of Okabe and Ito (Color Universal Design, 2008), which can be told apart
with any color vision. Shape, line style or position always shows the same as color.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.files import write_bytes
from scheduler.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY, LIGHT, SKY, BLUE = "#000000", "#888888", "#DDDDDD", "#56B4E9", "#0072B2"
GREEN, ORANGE, VERMILLION, PURPLE = "#009E73", "#E69F00", "#D55E00", "#CC79A7"
_MAX_LABEL_LENGTH = 28
_METADATA: dict[str, dict[str, None]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
"""The formats of pictures, and what matplotlib would write into them that differs between equal figures."""


def new_figure(height: float) -> Figure:
    """Return a new figure of the width of a page."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtraError('plots need matplotlib: pip install "checkpoint-scheduler[plot]"') from error
    return pyplot.figure(figsize=(7.2, height), layout="constrained")


def new_axes(height: float) -> Axes:
    """Return the axes of a new figure."""
    return new_figure(height).subplots()


def figure_of(ax: Axes) -> Figure:
    """Return the figure of some axes."""
    figure = ax.get_figure(root=True)
    if figure is None:
        raise InvalidOptionError("these axes were removed from their figure")
    return figure


def finish(ax: Axes, *, columns: int) -> None:
    """Remove the frame and put the legend above the plot."""
    ax.spines[["top", "right"]].set_visible(False)
    legend = ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)


def byte_scale(most: int) -> tuple[str, int]:
    """Return the unit in which `format_bytes` writes the largest value, and its size in bytes."""
    unit = format_bytes(most).split()[1]
    return unit, parse_bytes(f"1{unit}")


def shortened(name: str) -> str:
    """Return a name, or its end if it is too long for a label."""
    return name if len(name) <= _MAX_LABEL_LENGTH else f"…{name[1 - _MAX_LABEL_LENGTH :]}"


def write_figure(figure: Figure | Axes, path: str | os.PathLike[str]) -> None:
    """Write a figure, or the figure of some axes, in the format of the path's suffix: svg, png or pdf.

    Raises
    ------
    InvalidOptionError
        If the path has another suffix.
    OSError
        If the path cannot be written; an existing file is left as it was.
    """
    from matplotlib.figure import Figure

    kind = figure_format(path)
    write_bytes(path, _drawn(figure if isinstance(figure, Figure) else figure_of(figure), kind))


def figure_format(path: str | os.PathLike[str]) -> str:
    """Return the format of a picture from the suffix of its file.

    Raises
    ------
    InvalidOptionError
        If there is no such format.
    """
    kind = Path(path).suffix.removeprefix(".").lower()
    if kind not in _METADATA:
        known = ", ".join(f".{name}" for name in _METADATA)
        raise InvalidOptionError(
            f'cannot write a picture to "{path}": the suffix must be {known}, got "{Path(path).suffix}"'
        )
    return kind


def closed_svg(figure: Figure) -> str:
    """Return a figure as SVG, and close it."""
    from matplotlib import pyplot

    try:
        return _drawn(figure, "svg").decode("utf-8")
    finally:
        pyplot.close(figure)


def _drawn(figure: Figure, kind: str) -> bytes:
    """Return a figure as the content of a file, without dates, so that equal figures are equal files."""
    import matplotlib

    content = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scheduler"}), warnings.catch_warnings():
        # Text is kept as text, so it does not matter which glyphs the fonts of matplotlib have.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        figure.savefig(content, format=kind, metadata=_METADATA[kind])
    return content.getvalue()
