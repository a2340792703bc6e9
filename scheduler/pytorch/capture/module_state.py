"""State of modules in addition to parameters and buffers, such as caches, counters and last outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from scheduler.pytorch.torch_private.modules import buffers_of

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Attributes:
    """A snapshot of the attributes of some modules, with the entries of their lists, dicts and sets.

    Parameters
    ----------
    modules : iterable of (str, Module)
        Modules with their names.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = [(name, module, dict(vars(module)), dict(buffers_of(module))) for name, module in modules]
        containers = [x for _, _, own, _ in self._modules for x in own.values() if isinstance(x, (list, dict, set))]
        self._entries = {id(container): (container, copy.copy(container)) for container in containers}

    def restore(self) -> None:
        """Restore all attributes and containers."""
        for container, before in self._entries.values():
            if _entries(container) != _entries(before):
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)
        for _, module, before, _ in self._modules:
            vars(module).clear()
            vars(module).update(before)

    def changed(self) -> dict[str, object]:
        """Return the tensors, numbers and lists that a call changed and the next call would find changed, by name."""
        found: dict[str, object] = {}
        for name, module, before, buffers in self._modules:
            own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
            own |= {key: value for key, value in buffers_of(module).items() if buffers.get(key) is None}
            for key, value in own.items():
                if self._has_changed(before.get(key), value):
                    found[f"{name}.{key}".removeprefix(".")] = value
        return found

    def _has_changed(self, before: object, value: object) -> bool:
        if isinstance(value, Tensor):
            return value is not before
        if isinstance(value, list):
            return value is before and _entries(value) != _entries(self._entries[id(value)][1])
        return is_number(value) and is_number(before) and value != before


def is_number(value: object) -> bool:
    """Return whether a value is a number other than a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _entries(container: list[object] | dict[object, object] | set[object]) -> object:
    """Return what identifies the entries of a container."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [*map(id, container)] if isinstance(container, list) else {*map(id, container)}


def describe_kept(names: Sequence[str]) -> str:
    """Return the error message for a forward that changes these attributes."""
    return (
        f"forward changes {', '.join(names)}, which is neither a parameter nor a buffer: a step would depend on how"
        " often forward ran before, but a plan is for a single step. Pass it as an argument and return it, or make it"
        " a buffer; if it is filled once and then only read, call the model once before planning"
    )
