"""The command that says whether a model fits a device."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import TYPE_CHECKING

from scheduler.cli.answers import DONE, NO_ANSWER, PROVEN_NO, say
from scheduler.cli.arguments import Commands, add_command, positive
from scheduler.cli.training import require_torch
from scheduler.errors import InvalidOptionError, MissingExtraError
from scheduler.export.fit_page import fit_html
from scheduler.files import write_text

if TYPE_CHECKING:
    from scheduler.planning.fit_answers import Fit
    from scheduler.pytorch.models.sized_models import SizedModel

_DTYPES = ("float32", "bfloat16", "float16")


def add_fit(commands: Commands) -> None:
    """Add `scheduler fit`."""
    command = add_command(
        commands, "fit", _fit, "say whether a model trains on a device, what fills the memory, and what helps"
    )
    command.add_argument(
        "model",
        metavar="MODEL",
        help='a name from "scheduler models", package.module:factory, or a config.json of transformers',
    )
    command.add_argument(
        "--device",
        required=True,
        help='such as "h100-80gb", or "this machine"; neither it nor memory for the model need be there',
    )
    command.add_argument("--batch", type=positive, help="batch size (default 1, or that of the named model)")
    command.add_argument("--length", type=positive, help="length of the sequences")
    command.add_argument("--task", help="for a config.json: causal-lm, image-classification, speech-to-text, ...")
    command.add_argument(
        "--optimizer", default="adamw", help="adamw, adam, adafactor, sgd-momentum or sgd (default adamw)"
    )
    command.add_argument("--dtype", choices=_DTYPES, help="dtype of parameters and inputs (default that of the model)")
    command.add_argument("--autocast", choices=_DTYPES[1:], help="train under autocast to this dtype")
    command.add_argument(
        "--time-limit", type=float, default=45.0, help="seconds, after which nothing is begun (default 45)"
    )
    command.add_argument("--html", metavar="FILE", help="write the answer as an HTML page")
    command.add_argument("-o", "--output", metavar="PLAN", help="plan file to write, if a plan makes the model fit")


def _fit(options: argparse.Namespace) -> int:
    require_torch()
    from scheduler.pytorch.fitting import fit

    given = _read_model(options)
    found = fit(
        given.make_model,
        given.make_batch,
        options.device,
        batch_size=given.batch_size,
        length=given.length,
        longest=given.longest,
        loss=given.loss,
        optimizer=options.optimizer,
        dtype=options.dtype,
        autocast=options.autocast,
        name=given.name,
        time_limit=options.time_limit,
        progress=say,
    )
    if options.output and found.plan is not None:
        found.plan.save(options.output)
    if options.html:
        write_text(options.html, fit_html(found))
    print(json.dumps(found.to_dict()) if options.json else found.summary())
    return _exit_code(found)


def _exit_code(found: Fit) -> int:
    if found.fits or found.fits_with_a_plan:
        return DONE
    return PROVEN_NO if found.is_proven_not_to_fit else NO_ANSWER


def _read_model(options: argparse.Namespace) -> SizedModel:
    if not options.model.endswith(".json"):
        from scheduler.pytorch.models.sized_models import catalog_model

        if options.task is not None:
            raise InvalidOptionError(f"--task is for a configuration file, config.json, got the model {options.model}")
        return catalog_model(options.model, batch_size=options.batch, length=options.length)
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError('a config.json needs transformers: pip install "checkpoint-scheduler[models]"')
    from scheduler.pytorch.models.configurations import TASKS, read_configuration

    if options.task is None:
        raise InvalidOptionError(f"a configuration file needs --task, one of {', '.join(TASKS)}")
    return read_configuration(options.model, options.task, batch_size=options.batch or 1, length=options.length)
