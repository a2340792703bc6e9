"""What the attributes of modules hold, which is put back where a call has changed it."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, MutableMapping
from functools import lru_cache
from operator import is_
from typing import cast

from torch import Tensor, nn

from scheduler.pytorch.guards.parts import OF_EVERY_MODULE
from scheduler.pytorch.guards.read_names import is_installed, is_library, vars_of
from scheduler.pytorch.torch_private.modules import COMPILED_CALL

_Holder = list[object] | dict[object, object] | set[object] | deque[object]


class Attributes:
    """The attributes of a module at one time.

    Parameters
    ----------
    module : nn.Module

    Attributes
    ----------
    holders : list
        The values that may have contents.
    is_plain : bool
        Whether all values are numbers and the like, so that keeping them costs no memory.
    """

    def __init__(self, module: nn.Module) -> None:
        self._values = vars(module).copy()
        others = [v for k, v in self._values.items() if type(v) not in _NUMBERS and k not in _NOT_ATTRIBUTES]
        self.holders = [value for value in others if not isinstance(value, Tensor)]
        self.is_plain = all(isinstance(value, tuple) and _NUMBERS.issuperset(map(type, value)) for value in others)

    def are_those_of(self, module: nn.Module) -> bool:
        """Return whether a module has these attributes, as objects."""
        values, current = self._values, vars(module)
        return values.keys() == current.keys() and all(map(is_, map(values.__getitem__, current), current.values()))

    def put(self, module: nn.Module) -> None:
        """Give a module these attributes, apart from its tensors, submodules and hooks."""
        current = vars(module)
        for key in current.keys() - self._values.keys() - _NOT_ATTRIBUTES:
            del current[key]
        for key, value in self.items():
            if key not in current or current[key] is not value:
                current[key] = value

    def items(self) -> Iterable[tuple[str, object]]:
        """Return the attributes with their names."""
        return ((key, value) for key, value in self._values.items() if key not in _NOT_ATTRIBUTES)


class Contents:
    """The attributes of some modules, and the entries of containers and objects in them, as they are now.

    Parameters
    ----------
    modules : iterable of nn.Module
    known : mapping of nn.Module to Attributes
        What modules were last seen to hold; plain attributes are added.
    """

    def __init__(self, modules: Iterable[nn.Module], known: MutableMapping[nn.Module, Attributes]) -> None:
        self._attributes: dict[nn.Module, Attributes] = {}
        self._held: dict[int, tuple[_Holder, _Holder]] = {}
        for module in modules:
            found = known.get(module)
            if found is None or not found.are_those_of(module):
                found = Attributes(module)
                if found.is_plain:
                    known[module] = found
            self._attributes[module] = found
            for value in found.holders:
                self._visit(value)

    def now(self) -> Contents:
        """Return the present contents of the same modules and containers."""
        found = Contents(self._attributes, {**self._attributes})
        for holder, _ in self._held.values():
            found._visit(holder)
        return found

    def _visit(self, value: object) -> None:
        if type(value) in _PLAIN or id(value) in self._held:
            return
        if isinstance(value, _HOLDERS):
            holder = cast("_Holder", value)
        elif _is_followed(cast("Hashable", type(value))):
            holder = cast("_Holder", vars_of(value))
        else:
            return
        self._held[id(value)] = (holder, holder.copy())
        for part in holder.values() if isinstance(holder, dict) else holder:
            self._visit(part)

    def tensors(self) -> list[Tensor]:
        """Return the tensors among the contents."""
        values = [value for attributes in self._attributes.values() for _, value in attributes.items()]
        for _, content in self._held.values():
            values += content.values() if isinstance(content, dict) else content
        return [value for value in values if isinstance(value, Tensor)]

    def put(self, now: Contents | None = None) -> None:
        """Put the contents back where they differ from the present ones, which need not be read again if given."""
        for module, attributes in self._attributes.items():
            if attributes is not now._attributes[module] if now else not attributes.are_those_of(module):
                attributes.put(module)
        for holder, content in self._held.values():
            if _identity(holder) != _identity(content):
                holder.clear()
                holder.extend(content) if isinstance(holder, list | deque) else holder.update(content)  # type: ignore[arg-type]


_NOT_ATTRIBUTES = OF_EVERY_MODULE | {"forward", COMPILED_CALL}
"""The last two are replaced while a plan is followed."""
_NUMBERS = frozenset((bool, int, float, complex, str, bytes, type(None)))
_PLAIN = _NUMBERS | {Tensor, nn.Parameter}
_HOLDERS = (list, dict, set, deque)


@lru_cache(maxsize=1000)
def _is_followed(cls: type) -> bool:
    """Return whether objects of a class are the user's, and can be changed by a call."""
    if issubclass(cls, nn.Module | Tensor | type) or is_library(cls.__module__) or is_installed(cls):
        return False
    return cls.__dictoffset__ != 0


def _identity(holder: _Holder) -> object:
    """Return what identifies the entries of a container."""
    if isinstance(holder, dict):
        return [(id(key), id(value)) for key, value in holder.items()]
    return {*map(id, holder)} if isinstance(holder, set) else [*map(id, holder)]
