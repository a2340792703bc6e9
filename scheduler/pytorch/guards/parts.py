"""The parts of values that code can read: entries, attributes, closures; how each is read and replaced."""

from __future__ import annotations

import argparse
import functools
import threading
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace

from torch import nn

from scheduler.pytorch.guards.read_names import is_library, mentioned, read_globals, slots_of, vars_of
from scheduler.pytorch.torch_private.modules import BUFFERS, COMPILED_CALL, MODULES, PARAMETERS

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", COMPILED_CALL}
"""Attributes that every module has: tensors, submodules and hooks are watched by themselves."""


@dataclass(frozen=True, slots=True)
class Part:
    """A value inside another one.

    Attributes
    ----------
    text : str
        How the part is written after the value that holds it: `.tau`, `["y"]`.
    get : callable
        Returns the part of a value. Raises LookupError, AttributeError or ValueError if there is none.
    put : callable
        Replaces the part. Returns the value itself, or a copy of a value that cannot be changed.
    """

    text: str
    get: Callable[[object], object]
    put: Callable[[object, object], object]


CONTAINERS = (list, tuple, dict, deque, MappingProxyType)


HOLDERS: dict[type, tuple[str, ...]] = {
    SimpleNamespace: (), argparse.Namespace: (), threading.local: (),
    UserDict: ("data",), UserList: ("data",), ChainMap: ("maps",),
}  # fmt: skip
"""Classes of the standard library whose objects are looked into, and what their methods read."""


def is_followed(value: object) -> bool:
    """Return whether the parts of a value are looked at, and not only which object it is."""
    if isinstance(value, (*CONTAINERS, set, functools.partial, MethodType, nn.Module)):
        return True
    if isinstance(value, type | FunctionType):
        return False  # what they hold is watched where it is read
    if isinstance(value, ModuleType):
        return not is_library(value.__name__)
    if type(value) in HOLDERS:
        return True
    return not is_library(type(value).__module__) and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__"))


def parts_of(value: object, names: AbstractSet[str]) -> Iterator[Part]:
    """Yield the parts of a value that code which mentions `names` can read."""
    if isinstance(value, CONTAINERS):
        if isinstance(value, dict):
            yield from map(_entry, stored_keys(value))
        else:
            yield from map(_item, value if isinstance(value, MappingProxyType) else range(len(value)))
        if not is_library(type(value).__module__):
            yield from attributes_of(value, names)
    elif isinstance(value, MethodType):
        yield Part("", lambda method: method.__self__, _keep)  # type: ignore[attr-defined]
    elif isinstance(value, functools.partial):
        yield from (Part(f".{name}", _getter(name), _put_partial(name)) for name in ("func", "args", "keywords"))
    else:
        if isinstance(value, nn.Module):
            yield from (_held(held, key) for held in (PARAMETERS, BUFFERS, MODULES) for key in vars(value)[held])
        yield from attributes_of(value, names)


def attributes_of(value: object, names: AbstractSet[str]) -> Iterator[Part]:
    """Yield the attributes of an object that code which mentions `names` can read."""
    own = vars_of(value)
    passed = OF_EVERY_MODULE if isinstance(value, nn.Module) else frozenset()
    for name in sorted(((own.keys() & names) - passed).union(HOLDERS.get(type(value), ()))):
        yield Part(f".{name}", _entry_getter("__dict__", name), _entry_putter("__dict__", name))
    for base in type(value).__mro__:
        for name in slots_of(base):
            if name in names and hasattr(value, name):
                yield Part(f".{name}", _getter(name), _setter(name))


def parts_of_function(function: FunctionType, *, with_globals: bool = True) -> Iterator[Part]:
    """Yield what a function finds in its closure, in its defaults, among its attributes and among its globals."""
    for i, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
        if _is_filled(cell):
            yield _cell(i, name)
    for i in range(len(function.__defaults__ or ())):
        yield _default(i)
    for name in function.__kwdefaults__ or ():
        yield Part(name, _entry_getter("__kwdefaults__", name), _entry_putter("__kwdefaults__", name))
    for name in sorted(vars(function).keys() & mentioned(function.__code__)):
        yield Part(f".{name}", _entry_getter("__dict__", name), _entry_putter("__dict__", name))
    for name in sorted(read_globals(function)) if with_globals else ():
        yield Part(name, _entry_getter("__globals__", name), _entry_putter("__globals__", name))


def _is_filled(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return False
    return True


def stored_keys(value: dict[object, object]) -> tuple[object, ...]:
    """Return the keys of a dict as they are stored: a subclass may do anything where it is asked, such as imports."""
    return (*(OrderedDict.__iter__(value) if isinstance(value, OrderedDict) else dict.__iter__(value)),)


def _entry(key: object) -> Part:
    """Return an entry of a dict as it is stored."""

    def put(value: object, item: object) -> object:
        dict.__setitem__(value, key, item)  # type: ignore[index]
        return value

    return Part(f"[{key!r}]", lambda value: dict.__getitem__(value, key), put)  # type: ignore[index]


def _item(key: object) -> Part:
    def put(value: object, item: object) -> object:
        if isinstance(value, tuple):
            items = [*value[:key], item, *value[key + 1 :]]  # type: ignore[index, operator]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        value[key] = item  # type: ignore[index]
        return value

    return Part(f"[{key!r}]", lambda value: value[key], put)  # type: ignore[index]


def _held(held: str, key: str) -> Part:
    def put(value: object, item: object) -> object:
        vars(value)[held][key] = item
        return value

    return Part(f".{key}", lambda value: vars(value)[held][key], put)


def _cell(i: int, name: str) -> Part:
    def put(function: object, item: object) -> object:
        function.__closure__[i].cell_contents = item  # type: ignore[attr-defined]
        return function

    return Part(name, lambda function: function.__closure__[i].cell_contents, put)  # type: ignore[attr-defined]


def _default(i: int) -> Part:
    def put(function: object, item: object) -> object:
        before = function.__defaults__  # type: ignore[attr-defined]
        function.__defaults__ = (*before[:i], item, *before[i + 1 :])  # type: ignore[attr-defined]
        return function

    return Part(f"default {i}", lambda function: function.__defaults__[i], put)  # type: ignore[attr-defined]


def _entry_getter(held: str, key: str) -> Callable[[object], object]:
    return lambda value: getattr(value, held)[key]


def _entry_putter(held: str, key: str) -> Callable[[object, object], object]:
    def put(value: object, item: object) -> object:
        getattr(value, held)[key] = item  # also where a frozen dataclass refuses setattr
        return value

    return put


def _getter(name: str) -> Callable[[object], object]:
    return lambda value: getattr(value, name)


def _setter(name: str) -> Callable[[object, object], object]:
    def put(value: object, item: object) -> object:
        object.__setattr__(value, name, item)
        return value

    return put


def _put_partial(name: str) -> Callable[[object, object], object]:
    def put(value: object, item: object) -> object:
        assert isinstance(value, functools.partial)
        state = {"func": value.func, "args": value.args, "keywords": value.keywords, name: item}
        value.__setstate__((state["func"], state["args"], state["keywords"], vars(value)))  # type: ignore[attr-defined]
        return value

    return put


def _keep(value: object, item: object) -> object:
    return value
