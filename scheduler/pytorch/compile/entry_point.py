"""The backend by name: `torch.compile(model, backend="scheduler", options={"budget": "8GiB"})`.

pyproject.toml registers `compile_graph` in the group `torch_dynamo_backends`, so TorchDynamo
finds it wherever the package is installed, without an import of ours.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from scheduler.api import SolveOptions
from scheduler.errors import InvalidOptionError, SchedulerError
from scheduler.pytorch.compile.backend import Backend, Code, backend

BACKENDS: weakref.WeakKeyDictionary[Backend, tuple[Mapping[str, object], dict[str, object]]] = (
    weakref.WeakKeyDictionary()
)
"""The options from which each backend was constructed: the object itself, and a copy of it.

The graphs that a backend has compiled keep it alive.
"""


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Code:
    """Compile a graph within a memory budget; called by TorchDynamo.

    All graphs of one `torch.compile` share a budget as those of one `backend(...)` do.

    Parameters
    ----------
    module, inputs
        The graph and its arguments.
    options : dict
        The arguments of `backend` by name; "budget" is required.
    mode : None
        Other backends have modes.

    Returns
    -------
    callable
        The compiled code. If the options are wrong, it raises `InvalidOptionError` or
        `InvalidBudgetError` when it is called: TorchDynamo would wrap an error raised here.

    Raises
    ------
    CaptureError
        If the graph cannot be planned.
    """
    try:
        planned = _backend_for(options or {}, mode)
    except SchedulerError as error:
        return _raising(error)
    return planned(module, inputs)


def _backend_for(options: Mapping[str, Any], mode: str | None) -> Backend:
    """Return the backend of these options; `torch.compile` passes the same object for each of its graphs."""
    for known, (given, copy) in BACKENDS.items():
        if given is options and copy == options:
            return known
    _check_options(options, mode)
    planned = backend(**options)
    BACKENDS[planned] = options, dict(options)
    return planned


def _check_options(options: Mapping[str, object], mode: str | None) -> None:
    if mode is not None:
        raise InvalidOptionError(f'the backend "scheduler" has no modes, got mode={mode!r}: pass options instead')
    own_names = [name for name in inspect.signature(backend).parameters if name != "options"]
    names = [*own_names, *SolveOptions.__annotations__]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise InvalidOptionError(
            f'the backend "scheduler" has no option {", ".join(unknown)}: its options are {", ".join(names)}'
        )
    if "budget" not in options:
        raise InvalidOptionError(
            'the backend "scheduler" needs a budget: pass options={"budget": "8GiB"}; its options are'
            f" {', '.join(names)}"
        )


def _raising(error: SchedulerError) -> Code:
    def run(*args: object) -> Sequence[object]:
        raise error

    return run
