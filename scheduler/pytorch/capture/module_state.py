"""What modules keep besides parameters and buffers, put back and compared: caches, counters, last outputs."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Attributes:
    """The attributes of some modules, with the entries of their lists, dicts and sets, as they are now.

    Parameters
    ----------
    modules : iterable of (str, Module)
        With the name of each.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._modules = [(name, module, dict(vars(module)), dict(module._buffers)) for name, module in modules]
        containers = [x for _, _, own, _ in self._modules for x in own.values() if isinstance(x, (list, dict, set))]
        self._entries = {id(container): (container, copy.copy(container)) for container in containers}

    def restore(self) -> None:
        """Put everything back."""
        for container, before in self._entries.values():
            if _entries(container) != _entries(before):
                container.clear()
                container.extend(before) if isinstance(container, list) else container.update(before)
        for _, module, before, _ in self._modules:
            vars(module).clear()
            vars(module).update(before)

    def changed(self) -> dict[str, object]:
        """Return the tensors, numbers and lists that one call would find as another one left them.

        They are those that are other ones now, by name.
        """
        found: dict[str, object] = {}
        for name, module, before, buffers in self._modules:
            own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
            own |= {key: value for key, value in module._buffers.items() if buffers.get(key) is None}
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
    """Return whether a value is a number, and not just true or false."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _entries(container: list[object] | dict[object, object] | set[object]) -> object:
    """Return what identifies the entries of a container."""
    if isinstance(container, dict):
        return [(id(key), id(value)) for key, value in container.items()]
    return [*map(id, container)] if isinstance(container, list) else {*map(id, container)}


def describe_kept(names: Sequence[str]) -> str:
    """Return what is wrong with a forward that changes these attributes, and how to mend it."""
    return (
        f"forward changes {', '.join(names)}, which is no parameter and no buffer: a step would depend on how often"
        " forward ran before, and a plan is for one step by itself. Pass it as an argument and return it, or make it a"
        " buffer; if it is filled once and then only read, call the model once before planning"
    )
