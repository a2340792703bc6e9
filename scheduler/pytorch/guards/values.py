"""Describe values that code reads from Python, so that later values can be compared with earlier ones.

A description follows the parts that code can read: entries of containers, and attributes
whose names it mentions. Tensors may have other values later, and the same shape, dtype and
device; everything else must stay equal.
"""

from __future__ import annotations

import array
import copy
import ctypes
import enum
import functools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType, MethodType

import numpy as np
import torch
from torch import Tensor

from scheduler.pytorch.guards.parts import CONTAINERS, Part, is_followed, parts_of, stored_keys
from scheduler.pytorch.guards.quick_check import Objects, content
from scheduler.pytorch.guards.read_names import MOST_ENTRIES, slots_of, vars_of
from scheduler.units import format_bytes

_SCALARS = (
    int, float, complex, str, bytes, type(None), range, slice, frozenset, enum.Enum, np.generic, np.dtype,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
MOST_BYTES_COMPARED = 2**20
"""Largest NumPy array or other buffer that is compared at every call; a larger one that may be written is refused."""


ADVICE = "a number that changes at every step may be a 0-d tensor, which is read anew each time"


@dataclass(frozen=True, slots=True)
class Whole:
    """A value that is compared as a whole: by value, or by identity where equality says little."""

    value: object
    by_value: bool

    def difference(self, now: object, path: str) -> str:
        """Return how a later value differs, "" if it does not."""
        if now is self.value or (self.by_value and _are_equal(self.value, now)):
            return ""
        advice = f" ({ADVICE})" if isinstance(now, float) and isinstance(self.value, float) else ""
        return f"{path} was {show(self.value)} when the plan was made, is {show(now)}{advice}"


@dataclass(frozen=True, slots=True)
class Content:
    """A buffer of numbers or bytes, which is compared by what it holds."""

    kind: type
    shown: str
    content: object

    def difference(self, now: object, path: str) -> str:
        """Return how a later value differs, "" if it does not."""
        if type(now) is self.kind and content(now) == self.content:
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
    order: tuple[object, ...] = ()
    """The keys of a dict."""

    def difference(self, now: object, path: str) -> str:
        """Return how a later value differs, "" if it does not."""
        if type(now) is not self.kind:
            return f"{path} was of type {self.kind.__name__} when the plan was made, is {show(now)}"
        if self.length >= 0 and len(now) != self.length:  # type: ignore[arg-type]
            return f"{path} had {self.length} entries when the plan was made, has {len(now)}"  # type: ignore[arg-type]
        for name in attributes_added(now, self.readable, self.keys):
            return f"{path}.{name} was added after the plan was made"
        if found := parts_difference(self.parts, now, path):
            return found
        if self.order and stored_keys(now) != self.order:  # type: ignore[arg-type]
            return f"the entries of {path} have another order than when the plan was made"
        return ""


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
    """A buffer or a container is too large to be compared at every call.

    Parameters
    ----------
    path : str
    size, limit : str
        For a reader: "3 MiB", "at most 1 MiB are".
    """

    def __init__(self, path: str, size: str, limit: str) -> None:
        super().__init__(path, size, limit)
        self.path, self.size, self.limit = path, size, limit


class Trail(Objects):
    """The mutable objects that a description passed, to see quickly that none of them has changed.

    Parameters
    ----------
    known : dict of int to Node, optional
        Descriptions of objects, by identity, that are watched by themselves.

    Attributes
    ----------
    nodes : dict of int to (object, Node)
        Descriptions of the objects that were passed.
    """

    def __init__(self, known: Mapping[int, Node] | None = None) -> None:
        super().__init__()
        self.nodes: dict[int, tuple[object, Node]] = {}
        self._known = known or {}

    def described(self, value: object) -> Node | None:
        """Return the description of an object that was passed before, or that is watched by itself."""
        if id(value) in self._known:
            return self._known[id(value)]
        return self.nodes[id(value)][1] if id(value) in self.nodes else None

    def add(self, value: object) -> None:
        """Add a value that was passed."""
        if isinstance(value, dict):
            self.add_dict(value)
        elif isinstance(value, list | deque | set):
            self.sequences.append(value)
        elif isinstance(value, MappingProxyType):
            self.sequences += [value.keys(), value.values()]
        if isinstance(value, functools.partial | MethodType):
            return
        for base in type(value).__mro__:
            self.slots += [(value, name) for name in slots_of(base) if hasattr(value, name)]
        if own := vars_of(value):
            self.dicts.append(own)

    def add_buffer(self, value: object) -> Content:
        """Add a buffer and return its description."""
        size_bytes = value.nbytes if isinstance(value, np.ndarray) else memoryview(value).nbytes  # type: ignore[arg-type]
        if size_bytes > MOST_BYTES_COMPARED:
            raise TooLargeError("", format_bytes(size_bytes), f"at most {format_bytes(MOST_BYTES_COMPARED)} are")
        self.buffers.append(value)
        return Content(type(value), show(value), content(value))


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
        return trail.add_buffer(value)
    if id(value) in within or not is_followed(value):
        return Whole(value, by_value=False)
    if known := trail.described(value):
        return known
    trail.add(value)
    if isinstance(value, set) or is_large_and_flat(value):
        return Whole(copy.copy(value), by_value=True)
    if isinstance(value, CONTAINERS) and len(value) > MOST_ENTRIES:
        raise TooLargeError("", f"{len(value)} entries", f"at most {MOST_ENTRIES} are")
    inside = (*within, id(value))
    parts = tuple(describe_parts(value, parts_of(value, names), names, trail, inside))
    length = len(value) if isinstance(value, CONTAINERS) else -1
    order = stored_keys(value) if isinstance(value, dict) else ()
    node = Parts(type(value), parts, length, names, vars_of(value).keys() & names, order)
    trail.nodes[id(value)] = (value, node)
    return node


_MANY_ENTRIES = 1000


def is_large_and_flat(value: object) -> bool:
    """Return whether a value is a container of many entries, all of them plain values: it is compared as a whole."""
    if not isinstance(value, list | tuple | dict | deque) or len(value) <= _MANY_ENTRIES:
        return False
    return all(isinstance(entry, _SCALARS) for entry in (dict.values(value) if isinstance(value, dict) else value))


def describe_parts(
    value: object, parts: Iterable[Part], names: AbstractSet[str], trail: Trail, within: tuple[int, ...] = ()
) -> Iterator[tuple[Part, Node]]:
    """Yield parts of a value, each with its description."""
    for part in parts:
        try:
            yield part, describe(part.get(value), names, trail, within)
        except TooLargeError as error:
            raise TooLargeError(part.text + error.path, error.size, error.limit) from None


_BUFFERS = (np.ndarray, bytearray, memoryview, array.array, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)


def _is_constant(value: object) -> bool:
    return isinstance(value, np.ndarray) and not value.flags.writeable and value.base is None


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
    if isinstance(then, dict) and isinstance(now, dict) and [*then] != [*now]:
        return False
    return bool(then == now) or (then != then and now != now)


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
