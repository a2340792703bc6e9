"""Arguments shared by several commands, and the checks of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import TypeAlias

from scheduler.api import SolveOptions
from scheduler.devices import Device, device
from scheduler.errors import InvalidOptionError, UnknownDeviceError
from scheduler.solvers.registry import solver_names

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The collection of commands that a command is added to."""

GRAPH = 'a graph or chain file, "-" for standard input, or a graph of scheduler.zoo such as "zoo:unet:batch_size=8"'


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    """Add a command; `run` runs it and returns the exit code."""
    command = commands.add_parser(name, help=help)
    command.set_defaults(run=run)
    return command


def add_model(command: argparse.ArgumentParser, *, has_devices: bool = False) -> None:
    """Add the model and its cost model, and devices to estimate for if the command only traces."""
    command.add_argument("model", metavar="MODEL", help='a name from "scheduler models", or package.module:factory')
    costs = command.add_mutually_exclusive_group()
    costs.add_argument(
        "--costs",
        choices=("measured", "flops"),
        default="measured",
        help="cost model of operations: measured time and workspace, or FLOPs (default measured)",
    )
    costs.add_argument(
        "--measure-again",
        dest="costs",
        action="store_const",
        const="measured-again",
        help="measure also what is known from earlier runs on this machine",
    )
    if has_devices:
        costs.add_argument(
            "--device",
            dest="costs",
            type=_device,
            metavar="DEVICE",
            help="estimate times, and trace the attention, of a device that need not be there, such as h100-80gb",
        )


def _device(name: str) -> Device:
    try:
        return device(name)
    except UnknownDeviceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_granularity(command: argparse.ArgumentParser, *choices: str) -> None:
    """Add what a plan divides a step into; the first choice is the default."""
    what = {
        "auto": "operations, or what the model allows if its step cannot be captured",
        "operations": "of the captured step",
        "modules": "calls of modules, nothing captured",
        "layers": "of a sequence, nothing captured",
    }
    texts = [f"{name}: {what[name]}" for name in choices]
    command.add_argument(
        "--granularity",
        choices=choices,
        default=choices[0],
        help=f"what a plan divides a step into; {'; '.join(texts)} (default {choices[0]})",
    )


def add_solving(command: argparse.ArgumentParser, time_limit: float | None, gap: float = 0.0) -> None:
    """Add one budget and the options of the search."""
    command.add_argument(
        "--budget",
        required=True,
        help='largest peak of the whole step: "8GiB", "8GB", bytes, "60%%" of what saving everything adds, "min" or'
        ' "min+10%%"; with a model also "auto", the free memory of its device',
    )
    add_solver(command)
    add_searching(command, time_limit, gap)


def add_solver(command: argparse.ArgumentParser) -> None:
    """Add the choice of a solver."""
    command.add_argument("--solver", default="auto", help=f"one of {', '.join(solver_names())} (default auto)")


def add_searching(command: argparse.ArgumentParser, time_limit: float | None, gap: float = 0.0) -> None:
    """Add the options of every search: its time limit in seconds, the gap at which it ends, the order and the seed.

    Without a time limit, it is that of a model that is about to be trained.
    """
    default = "4, and five steps, at most 20" if time_limit is None else f"{time_limit:g}"
    command.add_argument("--time-limit", type=float, default=time_limit, help=f"seconds to search (default {default})")
    command.add_argument(
        "--gap",
        type=float,
        default=gap,
        help=f"end the search once the answer is proven to be within this share of the optimum (default {gap:g})",
    )
    command.add_argument(
        "--reorder",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also consider schedules that change the order of the operations (default), or keep the captured order",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of random searches (default 0)")


def solve_options(options: argparse.Namespace) -> SolveOptions:
    """Return the options of `solve` from the arguments of `add_solver` and `add_searching`."""
    chosen = SolveOptions(solver=options.solver, gap=options.gap, reorder=options.reorder, seed=options.seed)
    if options.time_limit is not None:
        chosen["time_limit"] = options.time_limit
    return chosen


def add_files(command: argparse.ArgumentParser) -> None:
    """Add the files to write a table to."""
    command.add_argument("--csv", metavar="FILE", help="write the results as CSV")
    command.add_argument(
        "--table", metavar="FILE", help="write a Markdown table of overheads, with one column per solver"
    )
    command.add_argument(
        "--plot",
        metavar="FILE",
        help="write one picture with a panel per graph, as .svg, .png or .pdf; with FOLDER/, one SVG per graph and one"
        " of solve times",
    )


def positive(text: str) -> int:
    """Parse an int of at least 1."""
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def entries(text: str) -> list[str]:
    """Parse a comma-separated list."""
    return [entry.strip() for entry in text.split(",")]


def check_writable(path: str | None) -> None:
    """Raise an error if a file cannot be written, before any work is done."""
    if path is None:
        return
    why = "it is a folder" if Path(path).is_dir() else None
    try:
        TemporaryFile(dir=Path(path).parent).close()
    except OSError as error:  # permissions do not tell everything: a disk may be mounted read-only
        why = error.strerror
    if why is not None:
        raise InvalidOptionError(f"cannot write {path}: {why}; give a file in an existing, writable folder")
