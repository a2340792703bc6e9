"""What data is checked for at birth: names, numbers and fields, with errors that say what is wrong."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping, Set
from functools import cache
from inspect import signature
from typing import Any, TypeVar

from scheduler.errors import InvalidGraphError

LONGEST_TIME = 1e30

Part = TypeVar("Part")


def build(kind: type[Part], data: object, what: str) -> Part:
    """Return a dataclass made of plain data that names its fields."""
    fields = mapping(data, what)
    check_keys(fields, _field_names(kind), what)  # type: ignore[arg-type]  # a class is hashable
    try:
        return kind(**fields)
    except TypeError as error:
        raise InvalidGraphError(f"{what} lacks a field: {error}") from None


@cache
def _field_names(kind: type) -> frozenset[str]:
    return frozenset(signature(kind).parameters)


def mapping(data: object, what: str) -> Mapping[str, Any]:
    """Return a JSON object, checked to be one."""
    if not isinstance(data, Mapping):
        raise InvalidGraphError(f"{what} is a JSON object, not {type(data).__name__}")
    return data


def sequence(value: object, what: str) -> list[object]:
    """Return a JSON list, checked to be one."""
    if not isinstance(value, list):
        raise InvalidGraphError(f"{what} is a JSON list, not {type(value).__name__}")
    return value


def check_keys(fields: Mapping[str, object], known: Set[str], what: str) -> None:
    """Refuse fields that nobody knows."""
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise InvalidGraphError(f"{what} has an unknown field {unknown[0]!r}; known are {sorted(known)}")


def check_name(name: object, what: str) -> None:
    """Refuse a name that is empty or cannot be printed."""
    if not isinstance(name, str) or not name:
        raise InvalidGraphError(f"the name of a {what} is non-empty text, not {name!r}")
    if not name.isprintable():
        raise InvalidGraphError(f"the name of a {what} has unprintable characters: {name!r}")


def check_text(text: object, what: str) -> None:
    """Refuse what is no text, or cannot be printed: escape sequences, lone surrogates."""
    if not isinstance(text, str):
        raise InvalidGraphError(f"{what} is text, not {text!r}")
    if not text.isprintable():
        raise InvalidGraphError(f"{what} has unprintable characters: {text!r}")


def check_unique(names: list[str], what: str) -> None:
    """Refuse two things of one name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidGraphError(f'two {what} are called "{name}"')
        seen.add(name)


def names_of(values: object, what: str) -> tuple[str, ...]:
    """Return names as a tuple."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InvalidGraphError(f"{what} are a sequence of names, not {values!r}")
    names = tuple(values)
    for name in names:
        if not isinstance(name, str):
            raise InvalidGraphError(f"{what} are names, not {name!r}")
    return names


def instances(values: object, kind: type, what: str) -> tuple[object, ...]:
    """Return values of one kind as a tuple."""
    if not isinstance(values, Iterable):
        raise InvalidGraphError(f"{what} are a sequence, not {type(values).__name__}")
    entries = tuple(values)
    for entry in entries:
        if not isinstance(entry, kind):
            raise InvalidGraphError(f"{what} are {kind.__name__} values, not {type(entry).__name__}")
    return entries


def count_of(value: Any, what: str) -> int:
    """Return a whole number >= 0."""
    try:
        count = operator.index(value)
    except TypeError:
        raise InvalidGraphError(f"{what} is a whole number, not {value!r}") from None
    if isinstance(value, bool) or count < 0:
        raise InvalidGraphError(f"{what} is a whole number >= 0, not {value!r}")
    return count


def time_of(value: Any, what: str) -> float:
    """Return a finite time >= 0."""
    if isinstance(value, (bool, str)):
        raise InvalidGraphError(f"{what} is a number, not {value!r}")
    try:
        time = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidGraphError(f"{what} is a finite number, not {value!r}") from None
    if not math.isfinite(time) or not 0 <= time <= LONGEST_TIME:
        raise InvalidGraphError(f"{what} is a finite number from 0 to {LONGEST_TIME:g}, not {value!r}")
    return time + 0.0  # -0.0 becomes 0.0: equal values have equal digests


def set_field(instance: object, field: str, value: object) -> None:
    """Set a field of a frozen dataclass, at its birth."""
    object.__setattr__(instance, field, value)


def sha256(data: object) -> str:
    """Return the SHA-256 of plain data, the same for equal data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
