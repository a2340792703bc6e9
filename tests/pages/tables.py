"""Tables and facts of the pages, made from the recorded measurements."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tests.pages.recordings import read_cells, read_rows
from tests.support.paths import BENCHMARKS

Row = dict[str, str]
PEER_COLUMNS = (
    "peak", "FLOPs", "our peak", "our FLOPs", "allocator peak", "time", "our allocator peak", "our time",
)  # fmt: skip


def table_of(name: str) -> str:
    """Return a table in Markdown: by its own function, or as it is in the file."""
    if not (BENCHMARKS / f"{name}.csv").exists():
        return "This table has not been recorded yet."
    made = _TABLES.get(name)
    if made is not None:
        return made(read_rows(name))
    head, *rows = read_cells(name)
    return _markdown(head, rows)


def fact_of(name: str) -> str:
    """Return a figure that the text of a page states.

    Raises
    ------
    KeyError
        If there is no such fact.
    """
    return _FACTS[name]()


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _deep_networks(rows: list[Row]) -> str:
    head = ["blocks", "operations", "budget", "time lost", "gap", "status", "seconds", "GiB"]
    return _markdown(
        head,
        [
            [
                row["blocks"],
                row["operations"],
                row["budget"],
                f"{float(row['overhead']):.3%}",
                f"{float(row['gap']):.4%}",
                row["status"],
                f"{row['seconds']} of {row['limit']}",
                row["peak_gib"],
            ]
            for row in rows
        ],
    )


def _predictions(rows: list[Row]) -> str:
    """A line per model: the largest deviations of its peaks, and its overheads at two budgets."""
    head = ["model", "budgets", "live storages off by", "allocator off by", "of the budget"]
    head += ["a quarter: predicted", "measured", "half: predicted", "measured"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        cells = [model, str(len(own))]
        for kind in ("live", "allocator"):
            ratios = [int(row[f"{kind}_measured"]) / int(row[f"{kind}_predicted"]) for row in own]
            cells.append(f"{max(abs(ratio - 1) for ratio in ratios):.2%}")
        largest = max(int(row["allocator_measured"]) / int(row["budget_bytes"]) for row in own)
        cells.append(f"{largest:.2%}")
        for row in (own[len(own) // 4 - 1], own[len(own) // 2 - 1]):
            cells += [f"{float(row[f'overhead_{kind}']):.1%}" for kind in ("predicted", "measured")]
        lines.append(cells)
    return _markdown(head, lines)


def _gpu(rows: list[Row]) -> str:
    """A line per way to train a model: GiB, predicted and measured, and time lost against eager PyTorch."""
    head = ["model", "way", "budget", "live", "allocated", "reserved", "reserved, expandable", "seconds", "time lost"]
    lines = []
    for row in rows:
        pairs = [
            _both(_gib(row[f"predicted {name}"]), _gib(row[name])) for name in ("allocated", "reserved", "expandable")
        ]
        sizes = [_gib(row["budget"]), _gib(row["live"]), *pairs]
        lines.append([f"{row['model']}, {row['precision']}", row["way"], *sizes, row["seconds"], _time_lost(row)])
    return _markdown(head, lines)


def _gpu_compiled(rows: list[Row]) -> str:
    """A line per way to train a model under `torch.compile`: GiB, and time lost against eager PyTorch."""
    lines = [
        [row["model"], row["way"], _gib(row["budget"]), _gib(row["allocated"]) or row["live"], _time_lost(row)]
        for row in rows
    ]
    return _markdown(["model", "way", "budget", "allocated", "time lost"], lines)


def _gib(size: str) -> str:
    return f"{int(size) / 2**30:.2f}" if size.isdigit() else ""


def _both(predicted: str, measured: str) -> str:
    return f"{predicted} / {measured}" if predicted else measured


def _time_lost(row: Row) -> str:
    """The time lost, predicted and measured; with its range where that is a quarter of the plain step or more."""
    predicted = f"{float(row['overhead predicted']):.1%}" if row["overhead predicted"] else ""
    if not row["over eager"]:
        return predicted
    median, low, high = map(float, re.findall(r"-?\d+\.\d+", row["over eager"]))
    spread = f" ({low:.0%} to {high:.0%})" if high - low >= 0.25 else ""
    return _both(predicted, f"{median:.1%}{spread}")


def _predicted_times(rows: list[Row]) -> str:
    columns = ("first trace", "second trace", "measured", "noise")
    cells = [[row["model"], row["budget"], *(f"{float(row[column]):.1%}" for column in columns)] for row in rows]
    return _markdown(["model", "budget", *columns], cells)


def _solvers(rows: list[Row], budget: str = "70%") -> str:
    """Percent lost by each solver on each graph: a star for a proven optimum, a dash for no schedule found."""
    rows = [row for row in rows if row["budget"] == budget]
    graphs = sorted({row["graph"] for row in rows})
    cells = {
        (row["solver"], row["graph"]): f"{float(row['overhead']):.2%}{'*' * (row['status'] == 'OPTIMAL')}"
        if row["overhead"]
        else "-"
        for row in rows
        if row["status"] != "unsuitable"
    }
    served = [solver for solver in dict.fromkeys(row["solver"] for row in rows) if any(solver in key for key in cells)]
    lines = [[f"`{solver}`", *(cells.get((solver, graph), "") for graph in graphs)] for solver in served]
    bounds = [
        max(
            float(row["global_bound"]) / float(row["baseline_time"]) - 1
            for row in rows
            if row["graph"] == graph and row["global_bound"]
        )
        for graph in graphs
    ]
    lines.append(["bound, any order", *(f"{bound:.2%}" for bound in bounds)])
    return _markdown(["solver", *graphs], lines)


def _peers(rows: list[Row]) -> str:
    """The points of the peers that no other of theirs is as good as, ours at no more peak, and ours below theirs."""
    points = [row for row in rows if row["peak"]]

    def is_beaten(row: Row) -> bool:
        return any(
            float(other["peak"]) <= float(row["peak"]) and float(other["FLOPs"]) <= float(row["FLOPs"])
            for other in points
            if other["model"] == row["model"] and other is not row
        )

    def line(row: Row, point: str) -> list[str]:
        return [row["model"], point, *(row[name] or "-" for name in PEER_COLUMNS)]

    lines = [line(row, row["point"]) for row in points if not is_beaten(row)]
    for row in rows:
        least = min(float(other["peak"]) for other in points if other["model"] == row["model"])
        if not row["peak"] and row["our peak"] and float(row["our peak"]) < least:
            own = line(row, "-")
            if own not in lines:
                lines.append(own)
    return _markdown(["model", "PyTorch", *PEER_COLUMNS], lines)


def _decompositions(rows: list[Row]) -> str:
    """A line per model: how many decompositions change what."""
    head = ["model", "decompositions", "lower the peak", "lower the floor", "change bits of gradients", "highest peak"]
    lines = []
    for plain in (row for row in rows if row["decomposition"] == "none"):
        own = [row for row in rows if row["model"] == plain["model"] and row is not plain]
        lowered = [sum(float(row[what]) < float(plain[what]) for row in own) for what in ("peak", "floor")]
        changed = sum(row["same gradients"] == "no" for row in own)
        highest = max(own, key=lambda row: float(row["peak"]))
        worst = f"{float(highest['peak']):.4f}, with {highest['decomposition']}"
        lines.append([plain["model"], str(len(own)), *map(str, lowered), str(changed), worst])
    return _markdown(head, lines)


def _first_answer(rows: list[Row]) -> str:
    """A line per case and stage: seconds with empty caches, and once they are filled."""
    seconds = {(row["case"], row["stage"], row["cache"]): row["seconds"] for row in rows}
    cases = dict.fromkeys((case, stage) for case, stage, _ in seconds)
    cells = [
        [f"`{case}`" if case.startswith("scheduler") else case, stage]
        + [seconds.get((case, stage, cache), "-") for cache in ("cold", "warm")]
        for case, stage in cases
    ]
    return _markdown(["what", "stage", "seconds, first time", "seconds, again"], cells)


def _modules(rows: list[Row]) -> str:
    """A line per model: time lost within two budgets, and the smallest peaks, by modules and by operations."""
    head = ["model", "calls", "60%: by modules", "by operations", "40%: by modules", "by operations"]
    head += ["smallest peak by modules over that by operations"]
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = {float(row["share"]): row for row in rows if row["model"] == model}
        cells = [model, own[0.6]["calls"]]
        for share in (0.6, 0.4):
            lost = [own[share][f"{kind}_overhead"] for kind in ("modules", "operations")]
            cells += [f"{float(overhead):.1%}" if overhead else "-" for overhead in lost]
        smallest = [own[0.6][f"{kind}_smallest"] for kind in ("modules", "operations")]
        cells.append(f"{int(smallest[0]) / int(smallest[1]):.2f}" if all(smallest) else "-")
        lines.append(cells)
    return _markdown(head, lines)


def _planning(rows: list[Row]) -> str:
    """A line per model: seconds of tracing and planning, and what the plan costs."""
    stages = ("tracing", "planning", "together")
    lines = []
    for row in rows:
        shares = [f"{float(row[column]):.2%}" for column in ("overhead", "gap")]
        lines.append([row["model"], row["operations"], *(row[stage] for stage in stages), *shares])
    head = ["model", "operations", "seconds of tracing", "seconds of planning", "together", "time lost", "gap"]
    return _markdown(head, lines)


def _planning_times(rows: list[Row]) -> str:
    """A line per model and budget: seconds, what the plan costs, and whether its peak is the measured one."""
    head = ["model", "budget", "operations", "seconds of a step", "seconds of planning", "time lost", "gap"]
    lines = []
    for row in rows:
        shares = [f"{float(row[column]):.2%}" if row[column] else "-" for column in ("overhead", "gap")]
        seconds = [f"{float(row['step_seconds']):.3f}", f"{float(row['planning_seconds']):.1f}"]
        lines.append([row["model"], row["budget"], row["operations"], *seconds, *shares])
    return _markdown(head, lines)


def _small_budgets(rows: list[Row]) -> str:
    """A line per model: the smallest peak known, and time lost at each budget, each with its gap."""
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    cells = {
        (row["model"], row["budget"]): f"{row['smallest'] or row['time lost'] or '-'} ({row['gap'] or '-'})"
        for row in rows
    }
    sizes = {row["model"]: row["operations"] for row in rows}
    lines = [[model, sizes[model], *(cells.get((model, budget), "-") for budget in budgets)] for model in sizes]
    return _markdown(["model", "operations", *budgets], lines)


def _fit(rows: list[Row]) -> str:
    """A line per model and device: peaks, what a plan costs, the largest sizes, and what the answer took."""
    head = ["model", "device", "peak, GiB", "fits", "time lost by a plan", "largest batch, planned"]
    head += ["longest length, planned", "seconds", "MiB"]
    lines = []
    for row in rows:
        plan = f"{float(row['overhead']):.1%}" if row["plan fits"] == "True" and row["fits"] == "False" else "-"
        reached = [
            f"{row[name] or '?'}, {row[f'{name} planned'] or '?'}" if row[name] or row[f"{name} planned"] else "-"
            for name in ("batch", "length")
        ]
        fits = "yes" if row["fits"] == "True" else "with a plan" if row["plan fits"] == "True" else "no"
        peak = f"{int(row['peak']) / 2**30:.2f}"
        lines.append([row["model"], row["device"], peak, fits, plan, *reached, row["seconds"], row["MiB"]])
    return _markdown(head, lines)


def _fit_here(rows: list[Row]) -> str:
    """A line per model: how far the predicted peaks are from the measured ones, and the largest batch."""
    head = [
        "model",
        "batch",
        "peak, MiB",
        "live",
        "allocator",
        "largest batch within 1.5 peaks",
        "its peak, and one more",
    ]
    lines = []
    for row in rows:
        errors = [int(row[f"{kind}: predicted"]) / int(row[f"{kind}: measured"]) - 1 for kind in ("live", "allocator")]
        memory = int(row["memory"] or 0)
        shares = [f"{int(row[name]) / memory:.1%}" for name in ("measured", "measured of one more") if memory]
        peak = f"{int(row['allocator: measured']) / 2**20:.0f}"
        cells = [row["model"], row["batch"], peak, *(f"{error:+.4%}" for error in errors)]
        lines.append([*cells, row["largest batch"] or "-", ", ".join(shares) or "-"])
    return _markdown(head, lines)


def _fit_published(rows: list[Row]) -> str:
    """A line per model: the predicted peak, allocated and as segments of the allocator."""
    lines = [
        [
            *(row["model"], row["dtype"], row["batch"], row["length"] if row["length"] != "0" else "-"),
            *(f"{int(row[name]) / 2**30:.3f}" for name in ("allocated", "reserved", "parameters", "activations")),
        ]
        for row in rows
    ]
    sizes = [f"{name}, GiB" for name in ("allocated", "reserved", "parameters", "activations")]
    return _markdown(["model", "dtype", "batch", "length", *sizes], lines)


_TABLES: dict[str, Callable[[list[Row]], str]] = {
    "decompositions": _decompositions,
    "deep_networks": _deep_networks,
    "first_answer": _first_answer,
    "fit": _fit,
    "fit_here": _fit_here,
    "fit_published": _fit_published,
    "gpu": _gpu,
    "gpu_compiled": _gpu_compiled,
    "modules": _modules,
    "peers": _peers,
    "planning": _planning,
    "planning_times": _planning_times,
    "predicted_times": _predicted_times,
    "predictions": _predictions,
    "small_budgets": _small_budgets,
    "solvers": _solvers,
}


def _largest(name: str, column: str) -> float:
    return max(float(row[column]) for row in read_rows(name))


def _step_share() -> str:
    """The peak of the planned GPT-2, beyond the resident tensors, as a share of PyTorch's."""
    peaks: dict[str, int] = {}
    for row in read_rows("step_memory"):
        peaks[row["series"]] = max(peaks.get(row["series"], 0), int(row["bytes"]))
    return f"{(peaks['plan'] - peaks['resident']) / (peaks['PyTorch'] - peaks['resident']):.0%}"


def _deviation() -> str:
    rows = read_rows("predictions")
    return f"{max(abs(int(row['live_measured']) / int(row['live_predicted']) - 1) for row in rows):.2%}"


def _block_checkpointing(column: str) -> str:
    """FLOPs of GPT-2 with every block recomputed, PyTorch's or ours, over plain PyTorch."""
    (row,) = (r for r in read_rows("peers") if (r["model"], r["point"]) == ("GPT-2", "checkpoint each block"))
    return f"{float(row[column]) - 1:.1%}"


_FACTS: dict[str, Callable[[], str]] = {
    "noise of peers": lambda: f"{_largest('peers', 'noise'):.1%}",
    "guards": lambda: max(row["share of a step"] for row in read_rows("guards")),
    "longest planning": lambda: f"{_largest('planning', 'together'):.0f}",
    "most operations": lambda: f"{_largest('deep_networks', 'operations'):,.0f}",
    "slowest generated code": lambda: f"{_largest('overhead', 'time over eager'):.3f}",
    "share of GPT-2": _step_share,
    "deviation of peaks": _deviation,
    "models predicted": lambda: str(len({row["model"] for row in read_rows("predictions")})),
    "blocks, PyTorch": lambda: _block_checkpointing("FLOPs"),
    "blocks, ours": lambda: _block_checkpointing("our FLOPs"),
    "cold seconds": lambda: _until_training("cold"),
    "warm seconds": lambda: _until_training("warm"),
}


def _until_training(cache: str) -> str:
    (row,) = (r for r in read_rows("first_answer") if (r["stage"], r["cache"]) == ("until training", cache))
    return f"{float(row['seconds']):.0f}"
