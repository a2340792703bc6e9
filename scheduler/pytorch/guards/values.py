"""Describe values that code reads from Python, so that later values can be compared with earlier ones.

A description follows the parts that code can read: entries of containers, and attributes
whose names it mentions. Tensors may have other values later, and the same shape, dtype and
device; everything else must stay equal.
"""

from __future__ import annotations

import argparse
import array
import copy
import ctypes
import enum
import functools
import threading
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import is_
from types import FunctionType, MappingProxyType, MethodType, ModuleType, SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

from scheduler.pytorch.guards.read_names import MOST_ENTRIES, is_library, mentioned, read_globals, slots_of, vars_of
from scheduler.pytorch.torch_private import dict_versions

_SCALARS = (
    int, float, complex, str, bytes, type(None), range, slice, frozenset, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
MOST_BYTES_COMPARED = 2**20
"""Largest NumPy array or other buffer that is compared at every call; a larger one that may be written is refused."""

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", "_compiled_call_impl"}
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


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that is compared as a whole: by value, or by identity where equality says little."""

    value: object
    by_value: bool

    def difference(self, now: object, path: str) -> str:
        """Return how a later value differs, "" if it does not."""
        if now is self.value or (self.by_value and _are_equal(self.value, now)):
            return ""
        return f"{path} was {show(self.value)} when the plan was made, is {show(now)}"


@dataclass(frozen=True, slots=True)
class Content:
    """A buffer of numbers or bytes, which is compared by what it holds."""

    kind: type
    shown: str
    content: object

    def difference(self, now: object, path: str) -> str:
        """Return how a later value differs, "" if it does not."""
        if type(now) is self.kind and _content(now) == self.content:
            return ""
        return f"{path} was {self.shown} when the plan was made, is {show(now)}"


@dataclass(frozen=True, slots=True)
class TensorLike:
    """A tensor, of which shape, dtype, device and whether it requires a gradient must stay."""

    key: tuple[object, ...]

    def difference(self, now: object, path: str) -> str:
        """Return how a later value differs, "" if it does not."""
        if isinstance(now, Tensor) and tensor_key(now) == self.key:
            return ""
        return f"{path} was {_show_key(self.key)} when the plan was made, is {show(now)}"


@dataclass(frozen=True, slots=True)
class Parts:
    """A value that is compared part by part."""

    kind: type
    parts: tuple[tuple[Part, Node], ...]
    length: int = -1
    readable: AbstractSet[str] = frozenset()
    """The names that code mentions."""
    keys: AbstractSet[str] = frozenset()
    """Those of them that were attributes of the object."""

    def difference(self, now: object, path: str) -> str:
        """Return how a later value differs, "" if it does not."""
        if type(now) is not self.kind:
            return f"{path} was of type {self.kind.__name__} when the plan was made, is {show(now)}"
        if self.length >= 0 and len(now) != self.length:  # type: ignore[arg-type]
            return f"{path} had {self.length} entries when the plan was made, has {len(now)}"  # type: ignore[arg-type]
        for name in attributes_added(now, self.readable, self.keys):
            return f"{path}.{name} was added after the plan was made"
        return parts_difference(self.parts, now, path)


Node = Whole | Content | TensorLike | Parts


def parts_difference(parts: Collection[tuple[Part, Node]], now: object, path: str) -> str:
    """Return how the parts of a later value differ, "" if they do not."""
    for part, node in parts:
        try:
            value = part.get(now)
        except (LookupError, AttributeError, ValueError):
            return f"{path}{part.text} was set when the plan was made, is missing"
        if found := node.difference(value, path + part.text):
            return found
    return ""


class TooLargeError(Exception):
    """A buffer is too large to be compared at every call.

    Parameters
    ----------
    path : str
    size_bytes : int
    """

    def __init__(self, path: str, size_bytes: int) -> None:
        super().__init__(path, size_bytes)
        self.path, self.size_bytes = path, size_bytes


class Trail:
    """The mutable objects that a description passed, to see quickly that none of them has changed.

    Parameters
    ----------
    known : dict of int to Node, optional
        Descriptions of objects, by identity, that are watched by themselves.

    Attributes
    ----------
    dicts : list of dict
    sequences : list of (collection, list)
        With the entries that they had.
    contents : list of (object, object)
        Buffers, with what they held.
    slots : list of (object, str, object)
        Objects with an attribute in slots, and its value.
    nodes : dict of int to (object, Node)
        Descriptions of the objects that were passed, until the trail is closed.
    """

    def __init__(self, known: Mapping[int, Node] | None = None) -> None:
        self.dicts: list[Mapping[str, object]] = []
        self.sequences: list[tuple[Collection[object], list[object]]] = []
        self.contents: list[tuple[object, object]] = []
        self.slots: list[tuple[object, str, object]] = []
        self.nodes: dict[int, tuple[object, Node]] = {}
        self._known = known or {}
        self._versions: object = ()

    def described(self, value: object) -> Node | None:
        """Return the description of an object that was passed before, or that is watched by itself."""
        if id(value) in self._known:
            return self._known[id(value)]
        return self.nodes[id(value)][1] if id(value) in self.nodes else None

    def add(self, value: object) -> None:
        """Add a value that was passed."""
        if isinstance(value, dict):
            self.dicts.append(value)
        elif isinstance(value, list | deque | set):
            self.sequences.append((value, list(value)))
        elif isinstance(value, MappingProxyType):
            self.sequences.append((value.values(), list(value.values())))
        if isinstance(value, functools.partial | MethodType):
            return
        for base in type(value).__mro__:
            for name in slots_of(base):
                if hasattr(value, name):
                    self.slots.append((value, name, getattr(value, name)))
        if own := vars_of(value):
            self.dicts.append(own)

    def add_content(self, value: object) -> Content:
        """Add a buffer and return its description."""
        size_bytes = value.nbytes if isinstance(value, np.ndarray) else memoryview(value).nbytes  # type: ignore[arg-type]
        if size_bytes > MOST_BYTES_COMPARED:
            raise TooLargeError("", size_bytes)
        content = _content(value)
        self.contents.append((value, content))
        return Content(type(value), show(value), content)

    def extend(self, other: Trail) -> None:
        """Add all that another trail passed."""
        self.dicts += other.dicts
        self.sequences += other.sequences
        self.contents += other.contents
        self.slots += other.slots

    def close(self) -> None:
        """Take the present state as the one to compare with."""
        self.nodes.clear()
        self._versions = dict_versions(self.dicts)

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has changed for certain."""
        return (
            dict_versions(self.dicts) == self._versions
            and all(len(now) == len(then) and all(map(is_, now, then)) for now, then in self.sequences)
            and all(getattr(value, name, None) is then for value, name, then in self.slots)
            and all(_content(value) == then for value, then in self.contents)
        )


def describe(value: object, names: AbstractSet[str], trail: Trail, within: tuple[int, ...] = ()) -> Node:
    """Return what of a value must stay the same for code that mentions `names`.

    Parameters
    ----------
    value : object
    names : set of str
    trail : Trail
        Is extended by the mutable objects that were passed.
    within : tuple of int
        Identities of the objects that hold the value, so that cycles end.
    """
    if isinstance(value, Tensor):
        return TensorLike(tensor_key(value))
    if isinstance(value, _SCALARS):
        return Whole(value, by_value=True)
    if isinstance(value, _BUFFERS) and not _is_constant(value):
        return trail.add_content(value)
    if id(value) in within or not is_followed(value):
        return Whole(value, by_value=False)
    if known := trail.described(value):
        return known
    trail.add(value)
    if isinstance(value, set) or (isinstance(value, _CONTAINERS) and len(value) > MOST_ENTRIES):
        is_flat = not isinstance(value, dict) and all(isinstance(entry, _SCALARS) for entry in value)
        return Whole(copy.copy(value), by_value=True) if is_flat else Whole(value, by_value=False)
    inside = (*within, id(value))
    parts = tuple(describe_parts(value, parts_of(value, names), names, trail, inside))
    length = len(value) if isinstance(value, _CONTAINERS) else -1
    node = Parts(type(value), parts, length, names, vars_of(value).keys() & names)
    trail.nodes[id(value)] = (value, node)
    return node


def describe_parts(
    value: object, parts: Iterable[Part], names: AbstractSet[str], trail: Trail, within: tuple[int, ...] = ()
) -> Iterator[tuple[Part, Node]]:
    """Yield parts of a value, each with its description."""
    for part in parts:
        try:
            yield part, describe(part.get(value), names, trail, within)
        except TooLargeError as error:
            raise TooLargeError(part.text + error.path, error.size_bytes) from None


_CONTAINERS = (list, tuple, dict, deque, MappingProxyType)
_BUFFERS = (np.ndarray, bytearray, memoryview, array.array, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)
HOLDERS: dict[type, tuple[str, ...]] = {
    SimpleNamespace: (), argparse.Namespace: (), threading.local: (),
    UserDict: ("data",), UserList: ("data",), ChainMap: ("maps",),
}  # fmt: skip
"""Classes of the standard library whose objects are looked into, and what their methods read."""


def _is_constant(value: object) -> bool:
    return isinstance(value, np.ndarray) and not value.flags.writeable and value.base is None


def _content(value: object) -> object:
    """Return a copy of what a buffer holds, to compare with."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tolist() if value.dtype.hasobject else value.tobytes())
    return bytes(memoryview(value))  # type: ignore[arg-type]


def is_followed(value: object) -> bool:
    """Return whether the parts of a value are looked at, and not only which object it is."""
    if isinstance(value, (*_CONTAINERS, set, functools.partial, MethodType, nn.Module)):
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
    if isinstance(value, _CONTAINERS):
        yield from map(_item, value if isinstance(value, dict | MappingProxyType) else range(len(value)))
        if not is_library(type(value).__module__):
            yield from attributes_of(value, names)
    elif isinstance(value, MethodType):
        yield Part("", lambda method: method.__self__, _keep)  # type: ignore[attr-defined]
    elif isinstance(value, functools.partial):
        yield from (Part(f".{name}", _getter(name), _put_partial(name)) for name in ("func", "args", "keywords"))
    else:
        if isinstance(value, nn.Module):
            yield from (
                _held(held, key) for held in ("_parameters", "_buffers", "_modules") for key in vars(value)[held]
            )
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


def attributes_added(value: object, readable: AbstractSet[str], keys: AbstractSet[str]) -> list[str]:
    """Return the readable attributes of an object that are new, without properties that were computed since."""
    own = vars_of(value)
    added = (own.keys() & readable) - keys
    return [name for name in sorted(added) if not _was_computed(value, name)]


def _was_computed(value: object, name: str) -> bool:
    """Return whether an attribute is a cached property, with the value that it would get now."""
    cached = getattr(type(value), name, None)
    if not isinstance(cached, functools.cached_property):
        return False
    return describe(cached.func(value), frozenset(), Trail()).difference(vars_of(value)[name], "") == ""


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


def tensor_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what must stay of a tensor while its values change."""
    return (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)


def show(value: object) -> str:
    """Return a value in a few words."""
    if isinstance(value, Tensor):
        return _show_key(tensor_key(value))
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _show_key(key: tuple[object, ...]) -> str:
    shape, dtype, device, requires_grad = key
    gradient = " that requires a gradient" if requires_grad else ""
    return f"a tensor of shape {tuple(shape)}, {dtype}, on {device}{gradient}"  # type: ignore[arg-type]


def _are_equal(then: object, now: object) -> bool:
    if type(then) is not type(now):
        return False
    return bool(then == now) or (then != then and now != now)
