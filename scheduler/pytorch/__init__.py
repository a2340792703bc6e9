"""Plan and train PyTorch models within a memory budget.

>>> from scheduler.pytorch import backend, checkpointed, max_batch, measure, trace

`trace` captures a model's training step as a graph, `profile_layers` measures a model layer
by layer; `checkpointed` returns a module that trains it within a budget; `max_batch` finds the
largest batch that fits one; `backend` does so under `torch.compile`; `measure` says what a step really uses.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from scheduler.errors import MissingExtraError

if TYPE_CHECKING:
    from scheduler.pytorch.checkpointing import checkpointed
    from scheduler.pytorch.compile.backend import backend
    from scheduler.pytorch.largest_batch import max_batch
    from scheduler.pytorch.layerwise.profiling import profile_layers
    from scheduler.pytorch.measurement.memory import measure
    from scheduler.pytorch.tracing import trace

__all__ = ["backend", "checkpointed", "max_batch", "measure", "profile_layers", "trace"]

_HOMES = {
    "backend": "compile.backend",
    "checkpointed": "checkpointing",
    "max_batch": "largest_batch",
    "measure": "measurement.memory",
    "profile_layers": "layerwise.profiling",
    "trace": "tracing",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("PyTorch is not installed: pip install checkpoint-scheduler[torch]")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
