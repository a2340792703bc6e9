"""Byte counts as text: parsed once, at the front door."""

from __future__ import annotations

import math
import operator
import re
from fractions import Fraction

from scheduler.errors import InvalidBudgetError

_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*", re.ASCII)
_LONGEST_NUMBER = 40


def parse_bytes(value: int | str) -> int:
    """Return a byte count given as an int or as text such as "8GiB" or "1.5 GB".

    Parameters
    ----------
    value : int or str
        Bytes; text needs a unit: B, KiB, MiB, GiB, TiB (powers of 2^10) or kB, MB, GB, TB
        (powers of 10^3). A plain integer as text means bytes.

    Returns
    -------
    int
        Bytes, rounded down.

    Raises
    ------
    InvalidBudgetError
        If the value is negative, not finite, of another type, or has an unknown unit.

    Examples
    --------
    >>> parse_bytes("8GiB")
    8589934592
    >>> parse_bytes("1.5 kB")
    1500
    """
    if isinstance(value, str):
        number, unit = split_quantity(value)
        if unit == "":
            if number.denominator != 1:
                raise InvalidBudgetError(f'"{value}" has no unit: write "{value}GiB" or whole bytes')
            return int(number)
        scale = _UNITS.get(unit.lower())
        if scale is None:
            raise InvalidBudgetError(_unknown_unit(value, unit))
        return math.floor(number * scale)
    if isinstance(value, bool):
        raise InvalidBudgetError(f"a byte count is an int or text, not {value!r}")
    try:
        count = operator.index(value)
    except TypeError:
        raise InvalidBudgetError(
            f'a byte count is an int or text such as "8GiB", not {type(value).__name__} {value!r}'
        ) from None
    if count < 0:
        raise InvalidBudgetError(f"a byte count cannot be negative: {count}")
    return count


def split_quantity(text: str) -> tuple[Fraction, str]:
    """Return number and unit of text such as "8GiB" or "60%".

    Raises
    ------
    InvalidBudgetError
        If the text is not a non-negative decimal number with an optional unit.
    """
    match = _TEXT.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if match is None:
        shown = text if len(text) <= _LONGEST_NUMBER else text[:_LONGEST_NUMBER] + "..."
        raise InvalidBudgetError(
            f'cannot read "{shown}" as a number of bytes: write for example "8GiB", "8GB" or "60%"'
        )
    return Fraction(match[1]), match[2]


def format_bytes(count: int) -> str:
    """Return a byte count in the largest binary unit that keeps it at least 1.

    Examples
    --------
    >>> format_bytes(8589934592)
    '8.00 GiB'
    >>> format_bytes(17)
    '17 B'
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count / scale >= 0.999995:  # what would read 1024.00 of the smaller unit
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def _unknown_unit(text: str, unit: str) -> str:
    if unit.lower() in {"k", "m", "g", "t"}:
        number, letter = text.strip()[: -len(unit)].strip(), unit.upper()
        power = " kMGT".index("k" if letter == "K" else letter)
        decimal = "kB" if letter == "K" else letter + "B"
        return (
            f'"{text}" could mean two things: write "{number}{letter}iB" (2^{10 * power} bytes each)'
            f' or "{number}{decimal}" (10^{3 * power})'
        )
    return f'unknown unit "{unit}" in "{text}": use B, KiB, MiB, GiB, TiB, kB, MB, GB or TB'
