"""The report: a plan as one self-contained HTML page."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from scheduler.export.page import html_page
from scheduler.files import write_text
from scheduler.graph.decisions import call_ranges
from scheduler.plan import Plan
from scheduler.plots import inline_svg, plot_memory, plot_schedule
from scheduler.solution import Status
from scheduler.timeline import Timeline
from scheduler.units import format_bytes

_STYLE = """figure { margin: 1rem 0; }
figcaption { color: #555; font-size: 0.9rem; }
svg { width: 100%; height: auto; overflow: visible; }
thead th { border-bottom: 2px solid #222; overflow-wrap: normal; }
tbody th { font-weight: normal; }
#layers th, #layers td { overflow-wrap: normal; }
#layers ul { overflow-wrap: anywhere; min-width: 8rem; }
@media (max-width: 40rem) { #layers { display: block; overflow-x: auto; } }
tfoot th, tfoot td { border-top: 2px solid #222; font-weight: bold; }
ul { margin: 0.2rem 0; padding-left: 1.2rem; }
code { font-size: 0.9em; }
"""


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What a plan saves and recomputes of one layer.

    Attributes
    ----------
    layer : str
    saved : tuple of (str, int)
        Tensors of its operations that hold data and are live at the end of the forward phase, with
        the bytes that each adds: of several tensors on one storage only the first adds bytes.
    recomputed : tuple of (str, int)
        Recomputed tasks, by the name of their default, with the number of recomputations.
    recomputed_time : float
        Time of the recomputations, in the graph's unit.
    """

    layer: str
    saved: tuple[tuple[str, int], ...]
    recomputed: tuple[tuple[str, int], ...]
    recomputed_time: float

    @property
    def saved_bytes(self) -> int:
        """Sum over `saved`."""
        return sum(size for _, size in self.saved)


def layer_rows(plan: Plan) -> tuple[LayerRow, ...]:
    """Return what a plan saves and recomputes, by layer.

    Parameters
    ----------
    plan : Plan

    Returns
    -------
    tuple of LayerRow
        Every layer that runs in the forward phase or is recomputed, in the order of first
        runs.
    """
    graph, index = plan.graph, plan.graph.index
    timeline = Timeline.of(graph, plan.schedule)
    layers = list(dict.fromkeys(run.layer for run in timeline.runs if run.kind != "backward"))
    saved: dict[str, list[tuple[str, int]]] = {layer: [] for layer in layers}
    recomputed: dict[str, list[str]] = {layer: [] for layer in layers}
    times: dict[str, list[float]] = {layer: [] for layer in layers}
    counted: set[int] = set()
    for holding in timeline.holdings:
        storage = index.storage_of[index.tensor_ids[holding.tensor]]
        if holding.is_saved and index.storage_bytes[storage]:
            size = 0 if storage in counted else index.storage_bytes[storage]
            counted.add(storage)
            saved[holding.layer].append((holding.tensor, size))
    for run in timeline.runs:
        if run.is_recomputation:
            task = index.task_of[index.operation_ids[run.operation.name]]
            recomputed[run.layer].append(graph.operations[index.tasks[task][0]].name)
            times[run.layer].append(run.operation.time)
    return tuple(
        LayerRow(layer, tuple(saved[layer]), tuple(Counter(recomputed[layer]).items()), math.fsum(times[layer]))
        for layer in layers
    )


def report_html(plan: Plan) -> str:
    """Return a plan as an HTML page: memory, schedule, layers, claims and proof.

    The page loads nothing from elsewhere and runs no scripts.

    Parameters
    ----------
    plan : Plan

    Raises
    ------
    PlanClaimError
        If a claim is untrue.
    MissingExtraError
        If matplotlib is not installed.
    """
    plan.verify()
    body = f"""<p>{escape(_in_brief(plan))}</p>
<h2>Memory over the step</h2>
<figure>
{inline_svg(plot_memory, plan, "memory")}
<figcaption>Bytes that the step holds while each operation runs, resident tensors included.</figcaption>
</figure>
<h2>Schedule</h2>
<figure>
{inline_svg(plot_schedule, plan, "schedule")}
<figcaption>Runs of each layer, and the times over which its tensors are live.</figcaption>
</figure>
{_calls(plan)}<h2>Saved and recomputed by layer</h2>
{_layer_table(plan)}
<h2>Claims</h2>
{_table("claims", _claims(plan))}
<h2>Proof</h2>
{_table("proof", _proof(plan))}
<p>The plan was simulated and all claims were confirmed when this page was written;
<code>scheduler verify PLAN</code> simulates it again.</p>"""
    return html_page(f"Plan of {plan.graph.name or 'a graph'}", _STYLE, body)


def write_report(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write the report of a plan.

    Raises
    ------
    OSError
        If the path cannot be written; an existing file is left as it was.
    PlanClaimError
        If a claim is untrue.
    MissingExtraError
        If matplotlib is not installed.
    """
    write_text(path, report_html(plan))


def _in_brief(plan: Plan) -> str:
    recomputed = _counted(sum(plan.simulation.recomputed.values()), "recomputation")
    change = f"{abs(plan.overhead):.2%} {'less' if plan.overhead < 0 else 'more'} time"
    best = (
        f"No schedule in the search space ({plan.search_space}) is faster."
        if plan.status is Status.OPTIMAL
        else f"A schedule in the search space ({plan.search_space}) takes at most {plan.gap:.2%} less time."
    )
    return (
        f"The step fits a budget of {format_bytes(plan.budget_bytes)}: its peak is {format_bytes(plan.peak_bytes)},"
        f" where saving everything takes {format_bytes(plan.baseline_peak_bytes)}. It has {recomputed} and takes"
        f" {change}. {best}"
    )


def _layer_table(plan: Plan) -> str:
    rows = layer_rows(plan)
    head = ("layer", "saved", "tensors saved", "recomputed, of the step's time", "operations recomputed")
    body = [
        _row(
            row.layer,
            format_bytes(row.saved_bytes) if row.saved else "",
            _details(row.saved, "tensor", format_bytes),
            _share(row.recomputed_time, plan) if row.recomputed else "",
            _details(row.recomputed, "operation", "{} x".format),
        )
        for row in rows
    ]
    simulation = plan.simulation
    total = _row(
        "all layers",
        format_bytes(simulation.saved_bytes),
        _counted(sum(len(row.saved) for row in rows), "tensor"),
        _share(math.fsum(row.recomputed_time for row in rows), plan),
        _counted(sum(simulation.recomputed.values()), "run"),
    )
    columns = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    return (
        f'<table id="layers">\n<thead><tr>{columns}</tr></thead>\n<tbody>\n'
        + "\n".join(body)
        + f"\n</tbody>\n<tfoot>{total}</tfoot>\n</table>"
    )


def _calls(plan: Plan) -> str:
    """Return the section on the recomputed calls of a plan by modules, "" for other plans."""
    if plan.granularity != "modules":
        return ""
    ranges = call_ranges(plan.decisions)
    items = "".join(f"<li>{'&emsp;' * found.depth}recompute {escape(str(found))}</li>" for found in ranges)
    return f'<h2>Recomputed modules</h2>\n<p>{plan.parts_text()}.</p>\n<ul id="calls">{items}</ul>\n'


def _row(layer: str, *cells: str) -> str:
    return f'<tr><th scope="row">{escape(layer)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _details(entries: Sequence[tuple[str, int]], noun: str, write: Callable[[int], str]) -> str:
    """Return a count that opens into the list of names."""
    if not entries:
        return ""
    items = "".join(f"<li>{escape(name)}: {write(count)}</li>" for name, count in entries)
    return f"<details><summary>{_counted(len(entries), noun)}</summary><ul>{items}</ul></details>"


def _share(time: float, plan: Plan) -> str:
    """Return a time as percent of that of saving everything."""
    return f"{time / plan.baseline_time if plan.baseline_time else 0.0:.3%}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _claims(plan: Plan) -> dict[str, str]:
    sizes = {
        "budget": plan.budget_bytes,
        "peak": plan.peak_bytes,
        "peak of saving everything": plan.baseline_peak_bytes,
        "resident tensors": plan.graph.resident_bytes,
        "saved at the end of the forward phase": plan.simulation.saved_bytes,
    }
    unit = plan.graph.time_unit
    return {
        **{name: f"{format_bytes(size)} ({size} bytes)" for name, size in sizes.items()},
        "operation at the peak": plan.simulation.peak_operation,
        "time": _exact(plan.time, unit),
        "time of saving everything": _exact(plan.baseline_time, unit),
        "overhead in time": f"{plan.overhead:.4%}",
    }


def _proof(plan: Plan) -> dict[str, str]:
    unit = plan.graph.time_unit
    return {
        "status": f"{plan.status.name} ({plan.status.value})",
        "search space": plan.search_space,
        "lower bound on the time, in the search space": _exact(plan.bound, unit),
        "gap": f"{plan.gap:.4%}",
        "lower bound on the time, over all schedules": _exact(plan.global_bound, unit),
        "gap over all schedules": f"{plan.global_gap:.4%}",
        "solver": plan.solver,
        "solve time": f"{plan.solve_seconds:.3g} s",
        "granularity": plan.granularity,
        "package version": plan.package_version,
        "torch version": plan.torch_version or "not installed",
        "digest of the plan": plan.digest,
        "digest of the graph": plan.graph.digest,
        "digest of the graph's structure": plan.graph.structure_digest,
    }


def _exact(time: float, unit: str) -> str:
    """Return a time with all its digits; a whole number, such as a count of FLOPs, as one."""
    return f"{repr(time).removesuffix('.0')} {unit}"


def _table(name: str, entries: dict[str, str]) -> str:
    rows = "\n".join(_row(key, escape(value)) for key, value in entries.items())
    return f'<table id="{name}">\n<tbody>\n{rows}\n</tbody>\n</table>'
