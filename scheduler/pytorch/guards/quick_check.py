"""See in few calls, each over a whole list, that many mutable objects have not changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from itertools import repeat
from operator import attrgetter, getitem, is_
from types import FunctionType
from typing import Any

import numpy as np

from scheduler.pytorch.guards.object_words import versions_check
from scheduler.pytorch.torch_private.guards import Check


class Objects:
    """Mutable objects that a description passed.

    Attributes
    ----------
    dicts, empty_dicts : list of dict
    sequences : list of collection
        Lists, deques, sets and views.
    slots : list of (object, str)
        Objects with the name of an attribute in slots.
    buffers : list
        Arrays of numbers or bytes.
    entries : list of (mapping, str)
        Globals and members of classes.
    cells, functions, classes : list
        Of these, the contents, the code and defaults, and the number of members count.
    """

    def __init__(self) -> None:
        self.dicts: list[Mapping[Any, Any]] = []
        self.empty_dicts: list[Mapping[Any, Any]] = []
        self.sequences: list[Collection[object]] = []
        self.slots: list[tuple[object, str]] = []
        self.buffers: list[object] = []
        self.entries: list[tuple[Mapping[str, object], str]] = []
        self.cells: list[object] = []
        self.functions: list[FunctionType] = []
        self.classes: list[type] = []

    def extend(self, other: Objects) -> None:
        """Add all that another one has."""
        for name in _LISTS:
            vars(self)[name] += vars(other)[name]

    def add_dict(self, value: Mapping[Any, Any]) -> None:
        """Add a dict; to move an entry of an `OrderedDict` does not change its version."""
        if type(value) is dict and not value:
            self.empty_dicts.append(value)
            return
        self.dicts.append(value)
        if isinstance(value, OrderedDict):
            self.sequences.append(OrderedDict.keys(value))  # a subclass may make its own, and import modules for that

    def check(self) -> Check:
        """Return a check that nothing has changed since this call."""
        checks = [_same_entries(sequence) for sequence in self.sequences]
        if self.empty_dicts:
            checks.append(partial(_are_false, [*self.empty_dicts]))
        if self.dicts:
            checks.append(versions_check(self.dicts))
        if self.buffers:
            buffers = [*self.buffers]
            checks.append(_equal(lambda: list(map(content, buffers))))
        if self.classes:
            members = list(map(vars, self.classes))
            checks.append(_equal(lambda: list(map(len, members))))
        if self.slots:
            objects, names = zip(*self.slots, strict=True)
            checks.append(_same(lambda: map(getattr, objects, names, repeat(None))))
        if self.entries:
            holders, keys = zip(*self.entries, strict=True)
            checks.append(_same(lambda: map(getitem, holders, keys)))
        for read, values in ((_CELL_CONTENTS, self.cells), (_CODE, self.functions), (_DEFAULTS, self.functions)):
            if values:
                checks.append(_same(partial(map, read, [*values])))
        return checks[0] if len(checks) == 1 else lambda: all(check() for check in checks)


_LISTS = frozenset(vars(Objects()))
_CELL_CONTENTS = attrgetter("cell_contents")
_CODE = attrgetter("__code__")
_DEFAULTS = attrgetter("__defaults__")


def _are_false(values: Collection[object]) -> bool:
    return not any(values)


def _equal(read: Callable[[], list[object]]) -> Check:
    then = read()
    return lambda: read() == then


def _same(read: Callable[[], Iterable[object]]) -> Check:
    then = [*read()]

    def check() -> bool:
        try:
            return all(map(is_, read(), then))
        except (LookupError, ValueError):  # an entry is missing, or a cell is empty
            return False

    return check


def _same_entries(entries: Collection[object]) -> Check:
    then = [*entries]
    return lambda: len(entries) == len(then) and all(map(is_, entries, then))


def content(value: object) -> object:
    """Return a copy of what an array or another buffer holds, to compare with."""
    if isinstance(value, np.ndarray):
        return (value.shape, value.dtype, value.tolist() if value.dtype.hasobject else value.tobytes())
    return bytes(memoryview(value))  # type: ignore[arg-type]
