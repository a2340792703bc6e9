"""Tensors that a step reads besides its registered parameters and buffers, and its arguments.

They are unregistered attributes of modules, and what forward and the loss find in closures,
globals, containers and objects: `loss=lambda outputs: cross_entropy(outputs, batch["labels"])`.
Each is read again in every step, so it may be another tensor by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scheduler.pytorch.guards.tensors import TensorPlace


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor and the places that hold it, all of which must hold one tensor in later steps, too."""

    tensor: Tensor
    places: tuple[TensorPlace, ...]


@contextlib.contextmanager
def kept_separate(places: Sequence[TensorPlace], module: nn.Module, loss: object) -> Iterator[list[HeldTensor]]:
    """Put a tensor of its own on the same memory into every place, so that a trace shows which places the code reads.

    `batch["input_ids"]` and `batch["labels"]` may be one tensor in the first step and two in the next. Only
    tensors that are registered or require a gradient stay one tensor wherever they are. Afterwards, everything
    is as it was.
    """
    core = [module, loss] if isinstance(loss, nn.Module) else [module]
    registered = {id(tensor) for part in core for tensor in (*part.parameters(), *part.buffers())}
    found: dict[int, tuple[Tensor, list[TensorPlace]]] = {}
    with contextlib.ExitStack() as stack:
        for place in places:
            tensor = place.get()
            if not tensor.requires_grad and id(tensor) not in registered:
                with contextlib.suppress(TypeError):  # a place that cannot be changed
                    stack.callback(place.put(_on_same_memory(tensor)))
        for place in places:
            tensor = place.get()
            found.setdefault(id(tensor), (tensor, []))[1].append(place)
        yield [HeldTensor(tensor, tuple(group)) for tensor, group in found.values()]


def _on_same_memory(tensor: Tensor) -> Tensor:
    """Return another tensor of the same kind that shares the memory of one without a gradient."""
    with torch.no_grad():
        alias = tensor.detach()
    return nn.Parameter(alias, requires_grad=False) if isinstance(tensor, nn.Parameter) else alias
