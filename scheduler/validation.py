"""Checks of data on construction: names, numbers and fields, with errors that say what is wrong.

Every function raises `InvalidGraphError`, or the error class given as `error`.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping, Set
from functools import cache
from inspect import signature
from typing import Any, TypeVar

from scheduler.errors import InvalidGraphError, SchedulerError

LONGEST_TIME = 1e30

Error = type[SchedulerError]
Part = TypeVar("Part")


def build(kind: type[Part], data: object, what: str) -> Part:
    """Return a dataclass built from plain data that names its fields."""
    fields = mapping(data, what)
    check_keys(fields, _field_names(kind), what)  # type: ignore[arg-type]  # a class is hashable
    try:
        return kind(**fields)
    except TypeError as error:
        raise InvalidGraphError(f"{what} lacks a field: {error}") from None


@cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(signature(kind).parameters)


def mapping(data: object, what: str, *, error: Error = InvalidGraphError) -> Mapping[str, Any]:
    """Return a value that must be a JSON object."""
    if not isinstance(data, Mapping):
        raise error(f"{what} must be a JSON object, got {type(data).__name__}")
    return data


def sequence(value: object, what: str, *, error: Error = InvalidGraphError) -> list[object]:
    """Return a value that must be a JSON list."""
    if not isinstance(value, list):
        raise error(f"{what} must be a JSON list, got {type(value).__name__}")
    return value


def check_version(fields: Mapping[str, object], form: str, version: int, *, lacks: str) -> None:
    """Reject data of another format or version; data of version 1 lacks some fields, which the message names."""
    found, number = fields.get("format"), fields.get("version")
    if found == form and number == 1 and not isinstance(number, bool):
        raise InvalidGraphError(
            f"files of version 1 are no longer read: they lack {lacks}. Write the file again with this package, for"
            " example with `scheduler trace` or `write_graph`"
        )
    if found != form or number != version:
        raise InvalidGraphError(f'format must be "{form}" of version {version}, got {found!r} of version {number!r}')


def check_keys(fields: Mapping[str, object], known: Set[str], what: str) -> None:
    """Reject unknown fields."""
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise InvalidGraphError(f"{what} has an unknown field {unknown[0]!r}; known are {sorted(known)}")


def check_name(name: object, what: str) -> None:
    """Reject a name that is empty or not printable."""
    if not isinstance(name, str) or not name:
        raise InvalidGraphError(f"the name of {what} must be non-empty text, got {name!r}")
    if not name.isprintable():
        raise InvalidGraphError(f"the name of {what} must be printable, got {name!r}")


def text_of(value: object, what: str, *, error: Error = InvalidGraphError) -> str:
    """Return a value that must be printable text: no escape sequences, no lone surrogates."""
    if not isinstance(value, str):
        raise error(f"{what} must be text, got {value!r}")
    if not value.isprintable():
        raise error(f"{what} must be printable text, got {value!r}")
    return value


def check_unique(names: list[str], what: str, *, error: Error = InvalidGraphError) -> None:
    """Reject two entries of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise error(f'two {what} are called "{name}"')
        seen.add(name)


def names_of(values: object, what: str, *, error: Error = InvalidGraphError) -> tuple[str, ...]:
    """Return a sequence of names as a tuple."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise error(f"{what} must be a sequence of names, got {values!r}")
    names = tuple(values)
    for name in names:
        if not isinstance(name, str):
            raise error(f"{what} must be a sequence of names, got one with {name!r}")
    return names


def instances(values: object, kind: type, what: str) -> tuple[object, ...]:
    """Return a sequence of instances of one class as a tuple."""
    if not isinstance(values, Iterable):
        raise InvalidGraphError(f"{what} must be a sequence, got {type(values).__name__}")
    entries = tuple(values)
    for entry in entries:
        if not isinstance(entry, kind):
            raise InvalidGraphError(f"{what} must be {kind.__name__} values, got {type(entry).__name__}")
    return entries


def count_of(value: object, what: str, *, error: Error = InvalidGraphError) -> int:
    """Return a value that must be an int >= 0."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = -1
    if isinstance(value, bool) or count < 0:
        raise error(f"{what} must be an int >= 0, got {value!r}")
    return count


def time_of(value: object, what: str, *, error: Error = InvalidGraphError) -> float:
    """Return a value that must be a finite number >= 0."""
    try:
        time = math.nan if isinstance(value, (bool, str)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        time = math.nan
    if not 0 <= time <= LONGEST_TIME:
        raise error(f"{what} must be a finite number from 0 to {LONGEST_TIME:g}, got {value!r}")
    return time + 0.0  # -0.0 becomes 0.0: equal values have equal digests


def set_field(instance: object, field: str, value: object) -> None:
    """Set a field of a frozen dataclass while it is constructed."""
    object.__setattr__(instance, field, value)


def sha256(data: object) -> str:
    """Return the SHA-256 of plain data, the same for equal data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
