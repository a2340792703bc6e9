"""Tables as text and as HTML, for summaries, the command line and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines whose columns are aligned, two spaces apart.

    Examples
    --------
    >>> print(text_table([("status", "OPTIMAL"), ("peak", "16 B")]))
    status  OPTIMAL
    peak    16 B
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the header, as an HTML table.

    Examples
    --------
    >>> html_table([("solver",), ("a < b",)])
    '<table><tr><th>solver</th></tr><tr><td>a &lt; b</td></tr></table>'
    """
    tags = ["th"] + ["td"] * (len(rows) - 1)
    lines = (
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)
    )
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
