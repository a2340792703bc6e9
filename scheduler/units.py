"""Byte counts, percentages and tables as text. Input is parsed once, at the public entry points."""

from __future__ import annotations

import html
import math
import operator
import re
from collections.abc import Sequence
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
                raise InvalidBudgetError(f'"{value}" has no unit: write "{value}GiB", or an integer for bytes')
            return int(number)
        scale = _UNITS.get(unit.lower())
        if scale is None:
            raise InvalidBudgetError(_unknown_unit(value, unit))
        return math.floor(number * scale)
    if isinstance(value, bool):
        raise InvalidBudgetError(f"a byte count must be an int or text, got {value!r}")
    try:
        count = operator.index(value)
    except TypeError:
        raise InvalidBudgetError(
            f'a byte count must be an int or text such as "8GiB", got {type(value).__name__} {value!r}'
        ) from None
    if count < 0:
        raise InvalidBudgetError(f"a byte count must be >= 0, got {count}")
    return count


def split_quantity(text: str) -> tuple[Fraction, str]:
    """Return the number and the unit of text such as "8GiB" or "60%".

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
        if count / scale >= 0.999995:  # would be rounded to 1024.00 of the smaller unit
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"


def format_percent(share: float, digits: int = 2) -> str:
    """Return a share in percent; "-" if it is not finite.

    Examples
    --------
    >>> format_percent(0.0486)
    '4.86%'
    >>> format_percent(float("inf"))
    '-'
    """
    return f"{share:.{digits}%}" if math.isfinite(share) else "-"


def format_peak(count: int, resident_bytes: int, baseline_peak_bytes: int) -> str:
    """Return a peak or a budget in bytes and in percent.

    Parameters
    ----------
    count : int
        Bytes of the peak of a whole step, resident tensors included.
    resident_bytes : int
    baseline_peak_bytes : int
        Peak of the save-everything schedule. The percentage is of the bytes that it adds to
        the resident bytes, as in a budget such as "60%"; it is left out where it adds none.

    Examples
    --------
    >>> format_peak(130, 100, 150)
    '130 B (60.0%)'
    """
    added = baseline_peak_bytes - resident_bytes
    if added <= 0:
        return format_bytes(count)
    return f"{format_bytes(count)} ({format_percent((count - resident_bytes) / added, 1)})"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines whose columns are aligned, two spaces apart.

    Examples
    --------
    >>> print(text_table([("status", "OPTIMAL"), ("peak", "16 B")]))
    status  OPTIMAL
    peak    16 B
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of which is the header, as an HTML table.

    Examples
    --------
    >>> html_table([("solver",), ("a < b",)])
    '<table><tr><th>solver</th></tr><tr><td>a &lt; b</td></tr></table>'
    """
    tags = ["th"] + ["td"] * (len(rows) - 1)
    lines = (
        "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) for tag, row in zip(tags, rows, strict=True)
    )
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


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
