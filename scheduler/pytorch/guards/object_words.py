"""Read words in many objects in a single call: the versions of dicts, the types of objects, the properties of tensors.

CPython keeps versions and types at fixed places, and torch properties. NumPy gathers thousands of words in a few
microseconds, where a call per object takes fifty nanoseconds, and a tree of guards more memory than fits the cache.
Other versions of Python and torch have other places, so examples show first whether a word is
where it is expected.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from scheduler.pytorch.torch_private.guards import Check, tensors_check
from scheduler.pytorch.torch_private.tensor_words import tensor_words

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


def properties_check(tensors: Sequence[Tensor]) -> Check:
    """Return a check that no tensor has another type, shape, dtype, device or requires_grad than now.

    It may also fail where only strides are others.
    """
    found = [(tensor, tensor_words(tensor)) for tensor in tensors]
    known = [(tensor, words) for tensor, words in found if words is not None]
    kept = [tensor for tensor, _ in known]
    # In this order: the words of each stage say where those of the next are.
    stages = zip(*(words for _, words in known), strict=True)
    checks = [types_check(kept), *(_addresses_check(kept, [*chain.from_iterable(stage)]) for stage in stages)]
    if others := [tensor for tensor, words in found if words is None]:
        checks.append(tensors_check(others))

    def check() -> bool:
        return all(is_unchanged() for is_unchanged in checks)

    return check


def _words_check(objects: Sequence[object], offset: int) -> Check:
    """Return a check that the words at this offset, in bytes, are as now. It keeps the objects alive."""
    kept = [*objects]
    return _addresses_check(kept, [id(value) + offset for value in kept])


def _addresses_check(objects: Sequence[object], at: Sequence[int]) -> Check:
    """Return a check that the words at these addresses are as now. It keeps the objects alive."""
    if not at:
        return lambda: True
    addresses = np.array(at, dtype=np.uint64)
    first, last = int(addresses.min()), int(addresses.max())
    # Only these words are read, all of which are in memory of the objects.
    memory = (ctypes.c_uint64 * ((last - first) // _WORD + 1)).from_address(first)
    words = np.ctypeslib.as_array(memory)
    places = ((addresses - np.uint64(first)) // np.uint64(_WORD)).astype(np.intp)
    then: bytes = words.take(places).tobytes()

    def check(_kept: Sequence[object] = objects) -> bool:
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
