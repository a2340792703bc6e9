"""What must be equal between a call and the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scheduler.pytorch.capture.arguments import Signature


@dataclass(frozen=True)
class CallKey:
    """What must be equal between a call and the plan."""

    signature: Signature
    tensors: tuple[tuple[object, ...], ...]


def call_key(signature: Signature, tensors: Sequence[Tensor]) -> CallKey:
    return CallKey(
        signature,
        tuple(
            (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
            for tensor in tensors
        ),
    )


def describe_difference(key: CallKey, planned: CallKey) -> str:
    if key.signature.spec != planned.signature.spec:
        return f"its arguments are {key.signature.spec}, planned were {planned.signature.spec}"
    if key.signature.leaves != planned.signature.leaves:
        return f"its constants are {key.signature.leaves}, planned were {planned.signature.leaves}"
    names = ("shape", "strides", "dtype", "device", "requires_grad")
    for number, (now, then) in enumerate(zip(key.tensors, planned.tensors, strict=True)):
        for name, a, b in zip(names, now, then, strict=True):
            if a != b:
                return f"{name} of input tensor {number} is {a}, planned was {b}"
    return "its tensors differ in number"


class Modes:
    """Training flags and autocast state when the plan was made."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.named_modules())
        self.flags = [part.training for _, part in self.modules]
        self.root_trains = module.training
        kinds = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())} | {"cpu"}
        self.kinds = sorted(kinds - {"meta"})
        self.autocast = self._autocast()

    def _autocast(self) -> list[torch.dtype | None]:
        return [torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in self.kinds]

    def difference(self) -> str:
        """Return what differs now, "" if nothing does."""
        if [part.training for _, part in self.modules] != self.flags:
            name, part = next(
                pair for pair, flag in zip(self.modules, self.flags, strict=True) if pair[1].training != flag
            )
            return f'training of module "{name}" is {part.training}, planned was {not part.training}'
        autocast = self._autocast()
        if autocast != self.autocast:
            return f"autocast of {self.kinds} is {autocast}, planned was {self.autocast}"
        return ""


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what must stay of a parameter, buffer or constant while its values change."""
    return (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
