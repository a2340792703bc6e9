"""Tensors that a step reads besides parameters, buffers and arguments.

They are unregistered attributes of modules, and tensors that the loss function finds in its
closure or among its globals: `loss=lambda outputs: cross_entropy(outputs, targets)`.
Each is read again in every step, so `targets` may be another tensor by then.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CellType

from torch import Tensor, nn


@dataclass(frozen=True)
class Holder:
    """A place that holds a tensor: an attribute, a closure's cell, a global variable."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], None]


def find_constants(core: nn.Module, loss: object) -> Iterator[tuple[str, tuple[str, ...], Holder]]:
    """Yield the constants of a model and its loss: name, path in `core` if it has one, holder.

    Parameters
    ----------
    core : nn.Module
        Model (`module`) and loss (`loss`), or the module that TorchDynamo captured of both.
    loss : callable or None
    """
    for path, owner in core.named_modules():
        for key, value in list(vars(owner).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                full = f"{path}.{key}".removeprefix(".")
                is_attribute = full.startswith(("module.", "loss."))
                yield full.removeprefix("module."), (full,) if is_attribute else (), _entry(vars(owner), key)
    function = loss.forward if isinstance(loss, nn.Module) else loss
    function = getattr(function, "__func__", function)
    if inspect.isfunction(function):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if _holds_tensor(cell):
                yield f"loss:{name}", (), _cell(cell)
        for name in function.__code__.co_names:
            if isinstance(function.__globals__.get(name), Tensor):
                yield f"loss:{name}", (), _entry(function.__globals__, name)


def _holds_tensor(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, Tensor)
    except ValueError:  # an empty cell
        return False


def _entry(entries: dict[str, object], key: str) -> Holder:
    def read() -> Tensor:
        value = entries[key]
        assert isinstance(value, Tensor)
        return value

    return Holder(read, lambda tensor: entries.__setitem__(key, tensor))


def _cell(cell: CellType) -> Holder:
    def write(tensor: Tensor) -> None:
        cell.cell_contents = tensor

    return Holder(lambda: cell.cell_contents, write)
