"""Plan and train PyTorch models within a memory budget.

>>> from scheduler.pytorch import backend, checkpointed, explain_oom, max_batch, measure, plan_step, trace

- `trace` captures a model's training step as a graph of operations; `profile_layers` measures a
  model layer by layer.
- `checkpointed` returns a module that trains a model within a budget; `plan_step` returns its
  plan alone; `backend` does the same under `torch.compile`; `max_batch` finds the largest batch
  that fits a budget; `plan_lengths` makes the plans of further lengths before training.
- `fit` says whether a model trains on a device, which need not be there, and what helps if not.
- `measure` measures the memory, FLOPs and time of a step; `training_step` makes a step to
  measure, and `resident_tensors` lists the tensors that it holds throughout.
- `explain_oom` says what filled the memory of a step that ran out of it, and what suffices.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

from scheduler.errors import MissingExtraError

if TYPE_CHECKING:
    from scheduler.pytorch.checkpointing import checkpointed, plan_step
    from scheduler.pytorch.compile.backend import backend
    from scheduler.pytorch.execute.lengths import plan_lengths
    from scheduler.pytorch.fitting import fit
    from scheduler.pytorch.largest_batch import max_batch
    from scheduler.pytorch.layerwise.profiling import profile_layers
    from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
    from scheduler.pytorch.out_of_memory import explain_oom
    from scheduler.pytorch.tracing import trace

__all__ = [
    "backend",
    "checkpointed",
    "explain_oom",
    "fit",
    "max_batch",
    "measure",
    "plan_lengths",
    "plan_step",
    "profile_layers",
    "resident_tensors",
    "trace",
    "training_step",
]

_MODULES = {
    "backend": "compile.backend",
    "checkpointed": "checkpointing",
    "explain_oom": "out_of_memory",
    "fit": "fitting",
    "max_batch": "largest_batch",
    "measure": "measurement.memory",
    "plan_lengths": "execute.lengths",
    "plan_step": "checkpointing",
    "profile_layers": "layerwise.profiling",
    "resident_tensors": "measurement.memory",
    "trace": "tracing",
    "training_step": "measurement.memory",
}
"""The module of each public name, imported on first use: `import scheduler.pytorch` needs no torch."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("PyTorch is not installed: run pip install checkpoint-scheduler[torch]")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
