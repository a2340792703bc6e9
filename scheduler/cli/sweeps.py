"""Commands that fill a table: several budgets of one graph, or several solvers on several graphs."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing import active_children, get_context
from pathlib import Path

from scheduler.api import lower
from scheduler.cli.answers import DONE, NO_ANSWER, PROVEN_NO, say
from scheduler.cli.arguments import (
    GRAPH,
    Commands,
    add_command,
    add_files,
    add_searching,
    add_solver,
    check_writable,
    entries,
    positive,
    solve_options,
)
from scheduler.cli.graphs import read_graphs, read_named_graph
from scheduler.comparisons.sweep import compare
from scheduler.comparisons.table import FAILED, Comparison, Row
from scheduler.errors import MissingExtraError
from scheduler.planning.frontiers import frontier
from scheduler.solution import Status
from scheduler.solvers.registry import solver_names
from scheduler.units import text_table

_SECONDS_TO_DROP = 5.0
"""The most to wait for a pool of processes to drop its cancelled cases; it takes some milliseconds."""


def add_frontier(commands: Commands) -> None:
    """Add `scheduler frontier`."""
    command = add_command(
        commands, "frontier", _frontier, "find the fastest schedule of a graph for each of several budgets"
    )
    command.add_argument("graph", metavar="GRAPH", help=GRAPH)
    command.add_argument(
        "--budgets", type=entries, help='such as "90%%,min+10%%,8GiB" (default: ten, from the smallest known peak up)'
    )
    add_solver(command)
    add_searching(command, 60.0)
    add_files(command)


def _frontier(options: argparse.Namespace) -> int:
    _check_files(options)
    graph = read_named_graph(options.graph)
    say(f"solving {len(options.budgets) if options.budgets else 'ten'} budgets")
    rows = frontier(graph, options.budgets, **solve_options(options))
    table = Comparison.of_frontier(
        rows,
        graph,
        time_limit=options.time_limit,
        gap=options.gap,
        reorder=options.reorder,
        seed=options.seed,
        name=lower(graph)[0].name or Path(options.graph).stem,
    )
    _print_table(
        table, options, ("budget_bytes", "peak_bytes", "overhead", "gap", "global_gap", "status", "search_space")
    )
    if any(row.schedule is not None for row in rows):
        return DONE
    return PROVEN_NO if all(row.status is Status.INFEASIBLE for row in rows) else NO_ANSWER


def add_compare(commands: Commands) -> None:
    """Add `scheduler compare`."""
    sweep = add_command(commands, "compare", _compare, "compare solvers on graphs and budgets")
    sweep.add_argument(
        "graphs",
        nargs="+",
        metavar="GRAPH",
        help="graph or chain files, folders of them, or graphs of scheduler.zoo: zoo:unet:batch_size=8, zoo:all",
    )
    sweep.add_argument(
        "--budgets", type=entries, default=["80%", "60%", "40%"], help="budgets (default 80%%,60%%,40%%)"
    )
    sweep.add_argument(
        "--solvers",
        type=entries,
        default=list(solver_names()),
        help=f"solvers (default all: {','.join(solver_names())})",
    )
    add_searching(sweep, 60.0)
    sweep.add_argument("--jobs", type=positive, default=1, help="number of cases to run at once (default 1)")
    sweep.add_argument(
        "--output", metavar="JSONL", help="append results to this file; cases that it already holds are not run again"
    )
    add_files(sweep)


def _compare(options: argparse.Namespace) -> int:
    _check_files(options)
    graphs = read_graphs(options.graphs)
    with _workers(options.jobs) if options.jobs > 1 else nullcontext() as executor:
        table = compare(
            graphs,
            options.budgets,
            options.solvers,
            time_limit=options.time_limit,
            gap=options.gap,
            reorder=options.reorder,
            seed=options.seed,
            executor=executor,
            path=options.output,
            progress=_progress_bar(),
        )
    _print_table(table, options, ("graph", "budget", "solver", "status", "overhead", "gap", "global_gap", "seconds"))
    for row in table:
        if row.status == FAILED:
            say(f"{row.solver} failed on {row.graph} at {row.budget}: {row.reason}")
    if table.missing:
        say(f"stopped: {table.missing} of {len(table) + table.missing} cases have not run")
        return NO_ANSWER
    return DONE


def _check_files(options: argparse.Namespace) -> None:
    """Raise an error before any work is done if a file of the answer cannot be written."""
    picture = options.plot
    if picture is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingExtraError('--plot needs matplotlib: pip install "checkpoint-scheduler[plot]"')
        from scheduler.plots.figures import figure_format

        if _is_folder(picture):
            Path(picture).mkdir(exist_ok=True)
            picture = os.path.join(picture, "solve_time.svg")
        figure_format(picture)
    for path in (options.csv, options.table, picture):
        check_writable(path)


def _is_folder(path: str) -> bool:
    return path.endswith(("/", os.sep)) or Path(path).is_dir()


def _print_table(table: Comparison, options: argparse.Namespace, columns: Sequence[str]) -> None:
    """Print the table on stdout before its files are written, so that it is not lost if that fails."""
    rows = table.to_dicts()
    if options.json:
        print(json.dumps(rows))
    else:
        print(text_table([list(columns), *([_cell(name, row[name]) for name in columns] for row in rows)]))
    if options.csv:
        table.to_csv(options.csv)
    if options.table:
        table.to_markdown(options.table)
    if options.plot:
        from scheduler.plots import plot_comparison, write_comparison, write_figure

        if _is_folder(options.plot):
            write_comparison(table, options.plot)
        else:
            write_figure(plot_comparison(table), options.plot)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if name == "seconds" else f"{value:.3%}"
    return str(value)


def _progress_bar() -> Callable[[int, int, Row], None] | None:
    """Return a callback that draws a progress bar on stderr; None if that is not a terminal."""
    if not sys.stderr.isatty():
        return None

    def draw(done: int, total: int, row: Row) -> None:
        filled = 30 * done // total
        text = f"[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}  {row.graph} {row.budget} {row.solver}"
        width = shutil.get_terminal_size().columns - 1
        end = "\n" if done == total else ""
        print(f"\r{text[:width]:<{width}}", end=end, file=sys.stderr, flush=True)

    return draw


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield worker processes, and end them when the table is complete or at Ctrl-C, which is ignored meanwhile."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _ignore_interrupt)
    try:
        yield pool
    finally:
        # The pool of Python 3.11 hangs if its workers die before it has dropped the cancelled cases.
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with suppress(BrokenExecutor, CancelledError, TimeoutError):
                last = pool.submit(int)
                pool.shutdown(wait=False, cancel_futures=True)
                last.result(_SECONDS_TO_DROP)
        finally:
            for worker in active_children():
                worker.kill()
            signal.signal(signal.SIGINT, handler)


def _ignore_interrupt() -> None:
    """Leave Ctrl-C to the parent process, which keeps the finished rows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
