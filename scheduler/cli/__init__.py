"""The command line: the answer goes to stdout, progress to stderr.

Exit codes: 0 done, 1 a proven no, 2 a usage error, 3 no answer (out of time, or none found).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor

from scheduler.cli import doctor, fitting, plans, sweeps, training
from scheduler.cli.answers import NO_ANSWER, PROVEN_NO, USAGE, say
from scheduler.cli.arguments import check_writable
from scheduler.errors import (
    BudgetTooSmallError,
    OutOfTimeError,
    PlanClaimError,
    PlanMismatchError,
    SchedulerError,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Parameters
    ----------
    arguments : sequence of str, optional
        By default the arguments of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        check_writable(getattr(options, "output", None))
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            code: int = options.run(options)
        sys.stdout.flush()
        return code
    except SchedulerError as error:
        say(f"{type(error).__name__}: {error}")
        return _exit_code(error)
    except BrokenExecutor:
        say("a worker process died, perhaps for lack of memory: use fewer --jobs; finished rows are in --output")
        return NO_ANSWER
    except OSError as error:
        say(f"{error.strerror}: {error.filename}" if error.filename else str(error))
        return USAGE


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    say(f"warning: {message}")


def _exit_code(error: SchedulerError) -> int:
    if isinstance(error, BudgetTooSmallError):
        return PROVEN_NO if error.proven else NO_ANSWER
    if isinstance(error, OutOfTimeError):
        return NO_ANSWER
    return PROVEN_NO if isinstance(error, (PlanClaimError, PlanMismatchError)) else USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scheduler", description="Find optimal activation-checkpointing schedules for a memory budget."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        training.add_models,
        training.add_trace,
        plans.add_plan,
        plans.add_show,
        plans.add_report,
        plans.add_export,
        plans.add_verify,
        training.add_train,
        training.add_max_batch,
        fitting.add_fit,
        sweeps.add_frontier,
        sweeps.add_compare,
        doctor.add_doctor,
    ):
        add(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the answer as JSON")
    return parser
