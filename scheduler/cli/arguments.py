"""Arguments that several commands take, and the checks of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeAlias

from scheduler.api import SolveOptions
from scheduler.errors import InvalidOptionError
from scheduler.solvers.registry import solver_names

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What a command adds itself to."""

GRAPH = 'a graph or chain file; "-" reads standard input; "zoo:unet:batch_size=8" is one of scheduler.zoo'


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    """Add a command that `run` runs, which returns the exit code."""
    command = commands.add_parser(name, help=help)
    command.set_defaults(run=run)
    return command


def add_model(command: argparse.ArgumentParser, *, layers: bool = True) -> None:
    """Add the model and what its costs are; with `layers`, whether it is planned layer by layer."""
    command.add_argument("model", metavar="MODEL", help='a name from "scheduler models", or package.module:factory')
    command.add_argument(
        "--costs",
        choices=("measured", "flops"),
        default="measured",
        help="of operations: times and workspaces, measured, or FLOPs (default measured)",
    )
    if layers:
        command.add_argument(
            "--layers", action="store_true", help="layer by layer, uncaptured: the model is a sequence of layers"
        )


def add_solving(command: argparse.ArgumentParser, time_limit: float) -> None:
    """Add one budget and how to solve for it."""
    command.add_argument("--budget", required=True, help='peak of the whole step: "8GiB", "8GB", bytes, or "60%%"')
    add_solver(command)
    add_searching(command, time_limit)


def add_solver(command: argparse.ArgumentParser) -> None:
    """Add the choice of one solver."""
    command.add_argument("--solver", default="auto", help=f"one of {', '.join(solver_names())} (default auto)")


def add_searching(command: argparse.ArgumentParser, time_limit: float) -> None:
    """Add what every search takes: the time that it has, in seconds, its order and its seed."""
    command.add_argument("--time-limit", type=float, default=time_limit, help=f"seconds (default {time_limit:g})")
    command.add_argument(
        "--reorder",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether tasks may first run in another order than the graph's (default yes)",
    )
    command.add_argument("--seed", type=int, default=0)


def solve_options(options: argparse.Namespace) -> SolveOptions:
    """Return what `add_solver` and `add_searching` have read."""
    return SolveOptions(
        solver=options.solver, time_limit=options.time_limit, reorder=options.reorder, seed=options.seed
    )


def add_files(command: argparse.ArgumentParser) -> None:
    """Add the files that a table is written to."""
    command.add_argument("--csv", metavar="FILE", help="the rows to write")
    command.add_argument("--table", metavar="FILE", help="the overheads to write, in Markdown: a column per solver")
    command.add_argument(
        "--plot",
        metavar="SVG",
        help="the picture to write, one panel per graph; FOLDER/: one picture per graph, and one of solve times",
    )


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"at least 1, not {count}")
    return count


def entries(text: str) -> list[str]:
    """Return the entries of a list with commas."""
    return [entry.strip() for entry in text.split(",")]


def check_writable(path: str | None) -> None:
    """Refuse a file that cannot be written, before the work is done."""
    if path is None:
        return
    why = "it is a folder" if Path(path).is_dir() else None
    try:
        TemporaryFile(dir=Path(path).parent).close()
    except OSError as error:  # what the rights of a file say is not all: a disk may be mounted for reading only
        why = error.strerror
    if why is not None:
        raise InvalidOptionError(
            f"cannot write {path}: {why}; give a file in a folder that exists and can be written to"
        )
