"""The answer to whether a model fits a device, as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from scheduler.export.page import html_page
from scheduler.planning.fit_answers import Fit, fit_rows, lever_rows, part_rows, reach_rows
from scheduler.planning.peak_contents import KINDS, total_by_kind
from scheduler.units import html_table

_STYLE = """body { overflow-wrap: break-word; }
h1 { margin-bottom: 1rem; }
td:first-child { white-space: pre-wrap; }
.legend { list-style: none; padding: 0; font-size: 0.9rem; }
.legend li { display: inline-block; margin-right: 1.2rem; }
.legend span { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; }
@media (max-width: 40rem) { table { display: block; overflow-x: auto; } }
"""
_COLORS = ("#0072b2", "#56b4e9", "#009e73", "#f0e442", "#e69f00", "#d55e00", "#cc79a7", "#999999")


def fit_html(fit: Fit) -> str:
    """Return an answer as an HTML page that loads nothing from elsewhere and runs no scripts.

    Parameters
    ----------
    fit : Fit
    """
    title = f"{fit.model} on {fit.device.title}"
    facts = html_table([("question", "answer"), *fit_rows(fit)])
    parts = html_table([("part", "bytes", "share"), *(row[:3] for row in part_rows(fit))])
    reaches = [*reach_rows(fit)]
    notes = "".join(f"<li>{escape(text)}</li>" for text in (*fit.assumptions, *fit.notes))
    body = f"""{facts}
<h2>What fills the memory at the plain peak</h2>
{"".join(_bar(fit))}
{_legend(fit)}
{parts}
<h2>What fits</h2>
{html_table([("", "plainly", "with a plan", "proof"), *reaches]) if reaches else "<p>Not looked at.</p>"}
<h2>What each change saves and costs</h2>
{html_table([("change", "saves", "peak", "time", "fits", "how"), *lever_rows(fit.levers)])}
<ul>{notes}</ul>"""
    return html_page(title, _STYLE, body)


def _bar(fit: Fit) -> Iterator[str]:
    """Yield a bar of the device's memory, with a mark at what it has for tensors."""
    totals = total_by_kind(fit.parts)
    usable = fit.plain.usable_bytes
    scale = 100 / max(usable, sum(totals.values()))
    yield '<svg viewBox="0 0 100 6" width="100%" role="img"><title>memory at the peak</title>'
    left = 0.0
    for number, (kind, size) in enumerate(totals.items()):
        width = size * scale
        color = _COLORS[number % len(_COLORS)]
        place = f'x="{left:.4f}" y="1" width="{width:.4f}" height="4" fill="{color}"'
        yield f"<rect {place}><title>{KINDS[kind]}</title></rect>"
        left += width
    yield f'<line x1="{usable * scale:.4f}" x2="{usable * scale:.4f}" y1="0" y2="6" stroke="#222" stroke-width="0.3"/>'
    yield "</svg>"


def _legend(fit: Fit) -> str:
    """Return which color of the bar is what."""
    entries = "".join(
        f'<li><span style="background: {_COLORS[number % len(_COLORS)]}"></span>{KINDS[kind]}</li>'
        for number, kind in enumerate(total_by_kind(fit.parts))
    )
    return f'<ul class="legend">{entries}<li>black line: what the device has for tensors</li></ul>'
