"""Find the first operation of a plain step whose result a planned step does not compute.

A planned step runs operations in another order and repeats some, so results are compared by
their bits, wherever they occur. Results inside a module may differ although its output does
not (dropout has more than one way to compute its mask): the first module with a differing
output is looked for first, and then the operation in it, or between it and the module before.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from scheduler.pytorch.source_lines import SourceLine, line_now
from scheduler.pytorch.torch_private import pytree
from scheduler.pytorch.torch_private.autograd import TorchDispatchMode, autograd_node_name, modes_disabled

_UNDEFINED = ("empty", "resize")
"""Operators with these words in their names return values that nothing has written yet."""


@dataclass(frozen=True)
class _Result:
    """What an operation or a module returned."""

    name: str
    digests: frozenset[bytes]
    line: SourceLine | None = None

    def is_in(self, digests: set[bytes]) -> bool:
        return self.digests <= digests


@dataclass(frozen=True)
class _ModuleCall:
    """The call of a module, with the operations from `start` up to `end` inside it."""

    result: _Result
    start: int
    end: int


class Recording(TorchDispatchMode):
    """Notes the results of all operations and modules of a step.

    Parameters
    ----------
    module : nn.Module
        Its parts are reported by their names.
    held : iterable of Tensor
        Tensors that exist before the step.
    """

    def __init__(self, module: nn.Module, held: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.digests = {_digest(tensor) for tensor in held}
        self.operations: list[_Result] = []
        self.calls: list[_ModuleCall] = []
        self.backward = -1
        """Number of operations before the backward."""
        self._names = {id(part): name.removeprefix("module.") for name, part in module.named_modules()}
        self._starts: list[int] = []
        self._hooks = contextlib.ExitStack()

    def begin_backward(self) -> None:
        """Note that what follows is the backward."""
        self.backward = len(self.operations)

    def __enter__(self) -> Recording:
        for handle in (
            register_module_forward_pre_hook(lambda *_: self._starts.append(len(self.operations))),
            register_module_forward_hook(self._leave),
        ):
            self._hooks.callback(handle.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        start = self._starts.pop()
        if name := self._names.get(id(module)):
            with modes_disabled():
                result = _Result(name, _digests(output))
            self.calls.append(_ModuleCall(result, start, len(self.operations)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if not any(word in func.name() for word in _UNDEFINED):
            digests = _digests(result)
            self.digests |= digests
            node = autograd_node_name()
            name = f"{func} in {node}" if node else str(func)
            self.operations.append(_Result(name, digests, None if node else line_now()))
        return result


def first_difference(plain: Recording, planned: Recording) -> str:
    """Return the first operation of a plain step whose result is not among those of a planned step.

    Parameters
    ----------
    plain, planned : Recording

    Returns
    -------
    str
        With its module and the line of the user's code; "" if every result occurs.
    """
    operations, known = plain.operations, planned.digests
    forward = len(operations) if plain.backward < 0 else plain.backward
    wrong = next((call for call in plain.calls if not call.result.is_in(known)), None)
    end = wrong.end if wrong else forward
    right = [call for call in plain.calls if call.end <= end and call.result.is_in(known)]
    inside = {number for call in right for number in range(call.start, call.end)}
    last = max((call.end for call in right), default=0)
    candidates = [number for number in range(end) if number not in inside and not operations[number].is_in(known)]
    if not candidates and wrong is None:
        candidates = [number for number in range(forward, len(operations)) if not operations[number].is_in(known)]
    if not candidates:
        return f'in module "{wrong.result.name}"' if wrong else ""
    found = next((number for number in candidates if number >= last), candidates[0])
    around = [call for call in plain.calls if call.start <= found < call.end]
    place = f' in module "{min(around, key=_length).result.name}"' if around else ""
    line = operations[found].line
    return f"{operations[found].name}{place}" + (f", at {line}" if line else "")


def _length(call: _ModuleCall) -> int:
    return call.end - call.start


def _digests(values: object) -> frozenset[bytes]:
    return frozenset(_digest(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of the values of a tensor, the same for every layout in memory."""
    with torch.no_grad(), modes_disabled():
        dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest = hashlib.blake2b(str((tuple(tensor.shape), tensor.dtype)).encode(), digest_size=16)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
        return digest.digest()
