"""The private names of torch that the package uses, each with what is expected of it.

No other module names a private part of torch, so that a new version breaks here or nowhere;
`tests/pytorch/torch_private` says what is expected of each name. What versions of torch do
differently is found out by trying it, not by comparing versions.
"""

from __future__ import annotations

import importlib
import pkgutil
import warnings

import torch

from scheduler.errors import MissingExtraError
from scheduler.pytorch.versions import describe_tested, is_tested

_SLOW = "inductor"
"""Imported only to compile."""


def missing_names() -> list[str]:
    """Return what torch lacks: why modules of this folder cannot be imported, and what else the package needs."""
    found = []
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != _SLOW):
        try:
            importlib.import_module(f"{__name__}.{name}")
        except (ImportError, AttributeError) as error:
            found.append(f"{name}: {error}")
    if not hasattr(torch.autograd.Function, "boxed_grads_call"):  # a backward could not free what it is given
        found.append("autograd.Function has no boxed_grads_call")
    return found


def check_version(version: str) -> None:
    """Warn if a version of torch is not a tested one.

    Raises
    ------
    MissingExtraError
        If it lacks a name that the package needs.
    """
    if is_tested(version):
        return
    if missing := missing_names():
        raise MissingExtraError(
            f"torch {version} lacks what this package needs of torch ({'; '.join(missing)}). Install a tested version,"
            f" {describe_tested()}"
        )
    warnings.warn(
        f"torch {version} is not a tested version: if planning or training fails, install one, {describe_tested()}",
        stacklevel=2,
    )


check_version(torch.__version__)
