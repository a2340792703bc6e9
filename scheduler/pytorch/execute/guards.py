"""What a call, a module and a backward must have in common with those of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scheduler.errors import ExecutionError
from scheduler.pytorch.capture.arguments import Position, Signature, leaf_paths, tensor_paths
from scheduler.pytorch.guards.values import ADVICE
from scheduler.pytorch.torch_private.autograd import is_graph_kept


class TensorKey(NamedTuple):
    """What must be equal between a tensor in the arguments and that of the planned call."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class CallKey:
    """What must be equal between a call and the planned one.

    Attributes
    ----------
    signature : Signature
    tensors : tuple of TensorKey
        Of each distinct tensor in the arguments.
    """

    signature: Signature
    tensors: tuple[TensorKey, ...]

    def difference(self, planned: CallKey) -> str:
        """Return the first difference from the planned call, "" if there is none."""
        if self == planned:
            return ""
        if self.signature.spec != planned.signature.spec:
            return _structure_difference(self.signature, planned.signature)
        if self.signature.leaves != planned.signature.leaves:
            paths = leaf_paths(planned.signature)
            found = zip(paths, self.signature.leaves, planned.signature.leaves, strict=True)
            path, now, then = next(row for row in found if row[1] != row[2])
            advice = f" ({ADVICE})" if isinstance(now, float) and isinstance(then, float) else ""
            return f"{path} is {_show(now)}, but the plan has {_show(then)}{advice}"
        for number, (now, then) in enumerate(zip(self.tensors, planned.tensors, strict=True)):
            for name, a, b in zip(TensorKey._fields, now, then, strict=True):
                if a != b:
                    path = tensor_paths(planned.signature)[number]
                    return f"{name} of input tensor {path} is {a}, but the plan has {b}"
        return "its number of tensors differs"


def _structure_difference(now: Signature, planned: Signature) -> str:
    """Return the first entry that only one of two calls has; their structures, if both have the same entries."""
    paths, before = leaf_paths(now), leaf_paths(planned)
    for path in (path for path in paths if path not in before):
        return f"{path} is new: the plan has {', '.join(before)}. Leave out what the step does not read"
    for path in (path for path in before if path not in paths):
        return f"{path} is missing, but the plan has it"
    return f"its arguments are {now.spec}, but the plan has {planned.spec}"


def _show(leaf: object) -> str:
    """Return a leaf of a signature for a reader."""
    return f"input tensor {leaf.number}" if isinstance(leaf, Position) else repr(leaf)


def call_key(signature: Signature, tensors: Sequence[Tensor]) -> CallKey:
    """Return the key of a call from the signature and the distinct tensors of its arguments."""
    return CallKey(
        signature,
        tuple(
            TensorKey(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in tensors
        ),
    )


class Modes:
    """Autocast, and whether the module trained, when the plan was made.

    Attributes
    ----------
    root_trains : bool
        Whether the module itself was in training mode.
    device_types : list of str
        Device types whose autocast state affects the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.root_trains = module.training
        types = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} | {"cpu"}
        self.device_types = sorted(types - {"meta"})
        self._autocast = self.autocast()

    def difference(self) -> str:
        """Return the first difference between now and then, "" if there is none."""
        autocast = self.autocast()
        if autocast != self._autocast:
            return f"autocast of {self.device_types} is {autocast}, but the plan has {self._autocast}"
        return ""

    def autocast(self) -> list[torch.dtype | None]:
        """Return the dtype of autocast on each of the device types, None where it is off."""
        return [torch.get_autocast_dtype(t) if torch.is_autocast_enabled(t) else None for t in self.device_types]


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return the properties of a parameter, buffer or constant that must not change, although its values may."""
    return (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


def check_single_backward() -> None:
    """Raise an `ExecutionError` if the backward that runs now is to be differentiated or repeated."""
    if torch.is_grad_enabled():
        raise ExecutionError("a planned step has no second derivative: call backward without create_graph=True")
    if is_graph_kept():
        raise ExecutionError(
            "the backward of a planned step runs once, because it frees saved tensors as it goes:"
            " call backward without retain_graph=True, or run the plain module"
        )
