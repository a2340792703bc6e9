"""Read one word in the header of many objects in a single call: the version of a dict, the type of an object.

CPython keeps both at fixed places. NumPy gathers thousands of them in a few microseconds, where a
call per object takes fifty nanoseconds, and a tree of guards more memory than fits the cache.
Other versions of Python have other headers, so examples show first whether a word is where it
is expected.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from scheduler.pytorch.torch_private.guards import Check

_WORD = ctypes.sizeof(ctypes.c_uint64)
_TYPE = 1 * _WORD
"""Where an object refers to its type: behind its count of references."""
_VERSION = 3 * _WORD
"""Where a dict has its version: behind the count, its type and its length."""


def versions_check(dicts: Sequence[Mapping[Any, Any]]) -> Check:
    """Return a check that no dict has changed since this call.

    It always fails where Python keeps no versions; the dicts then have to be compared entry by entry.
    """
    return _words_check(dicts, _VERSION) if dicts_have_versions() else lambda: not dicts


def types_check(objects: Sequence[object]) -> Check:
    """Return a check that each object has the class that it has now; an object's `__class__` can be set."""
    if _objects_refer_to_types():
        return _words_check(objects, _TYPE)
    types = list(map(type, objects))
    return lambda: list(map(type, objects)) == types


def _words_check(objects: Sequence[object], offset: int) -> Check:
    """Return a check that the words at this offset, in bytes, are as now. It keeps the objects alive."""
    kept = [*objects]
    if not kept:
        return lambda: True
    addresses = np.array([id(value) + offset for value in kept], dtype=np.uint64)
    first, last = int(addresses.min()), int(addresses.max())
    # Only the words of the objects are read, all of which are alive.
    memory = (ctypes.c_uint64 * ((last - first) // _WORD + 1)).from_address(first)
    words = np.ctypeslib.as_array(memory)
    places = ((addresses - np.uint64(first)) // np.uint64(_WORD)).astype(np.intp)
    then: bytes = words.take(places).tobytes()

    def check(_kept: list[object] = kept) -> bool:
        now: bytes = words.take(places).tobytes()
        return now == then

    return check


@functools.cache
def dicts_have_versions() -> bool:
    """Return whether each kind of change gives a dict another word at that place, and reading it does not.

    On Python 3.13 an attribute that is set changes the dict of its object, and nothing in the header.
    """
    sample: dict[str, object] = {}
    owner = _Owner()
    changes: list[tuple[Mapping[str, object], Callable[[], object]]] = [
        (sample, lambda: sample.update(a=1, b=2, c=3)),
        (sample, lambda: sample.__setitem__("a", object())),
        (sample, lambda: sample.setdefault("d", 4)),
        (sample, lambda: sample.__delitem__("b")),
        (sample, lambda: sample.pop("c")),
        (sample, sample.clear),
        (vars(owner), lambda: setattr(owner, "entry", object())),
        (vars(owner), owner.change),
        (vars(owner), lambda: delattr(owner, "entry")),
    ]
    return all(_is_seen(held, change) for _ in range(_WARM) for held, change in changes)


class _Owner:
    """An object with a dict of attributes."""

    def change(self) -> None:
        """Set an attribute, as code of a class does."""
        self.entry = object()


_WARM = 20
"""Python stores an attribute in another way once the code has done so some times."""


def _is_seen(held: Mapping[str, object], change: Callable[[], object]) -> bool:
    is_unchanged = _words_check([held], _VERSION)
    held.get("a")
    return is_unchanged() and (change(), not is_unchanged())[1]


@functools.cache
def _objects_refer_to_types() -> bool:
    """Return whether examples have the address of their type at that place."""
    examples = [1, "text", {}, [], object(), _words_check]
    return all(ctypes.c_uint64.from_address(id(value) + _TYPE).value == id(type(value)) for value in examples)
