"""Byte counts are read exactly, and ambiguous ones are rejected; tables are aligned and escaped."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.errors import InvalidBudgetError
from scheduler.units import (
    format_bytes,
    format_peak,
    format_percent,
    html_table,
    parse_bytes,
    split_quantity,
    text_table,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GiB", 8 * 1024**3),
        ("8GB", 8 * 1000**3),
        ("8 GiB", 8 * 1024**3),
        ("  8GiB ", 8 * 1024**3),
        ("8gib", 8 * 1024**3),
        ("3B", 3),
        ("3KiB", 3 * 1024),
        ("3MiB", 3 * 1024**2),
        ("3TiB", 3 * 1024**4),
        ("3kB", 3000),
        ("3KB", 3000),
        ("3MB", 3 * 1000**2),
        ("3TB", 3 * 1000**4),
        ("1.5kB", 1500),
        ("0.5KiB", 512),
        ("0GiB", 0),
        ("1024", 1024),
        ("1024.0", 1024),
    ],
)
def test_text_is_read_with_its_unit(text: str, count: int) -> None:
    assert parse_bytes(text) == count


def test_bytes_are_rounded_down() -> None:
    assert parse_bytes("1.9999B") == 1
    assert parse_bytes("0.3KiB") == 307  # 307.2


def test_large_decimals_are_exact() -> None:
    # 0.1 TB as a float product could be off; as a fraction it is not.
    assert parse_bytes("4503599627370497.3KiB") == 4503599627370497 * 1024 + 307


@given(st.integers(0, 2**70))
def test_integers_are_kept(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(str(count)) == count


def test_numpy_integers_become_ints() -> None:
    assert type(parse_bytes(np.int64(5))) is int


@pytest.mark.parametrize("letter", ["K", "M", "G", "T", "k", "g"])
def test_a_bare_letter_is_rejected_with_both_readings(letter: str) -> None:
    with pytest.raises(InvalidBudgetError, match="could mean two things") as rejected:
        parse_bytes(f"8{letter}")
    assert f'"8{letter.upper()}iB"' in str(rejected.value)
    assert f'"8{"k" if letter in "Kk" else letter.upper()}B"' in str(rejected.value)


def test_the_readings_of_a_bare_letter_are_right() -> None:
    with pytest.raises(InvalidBudgetError) as rejected:
        parse_bytes("8G")
    assert str(rejected.value) == ('"8G" could mean two things: write "8GiB" (2^30 bytes each) or "8GB" (10^9)')


@pytest.mark.parametrize(
    "text", ["-8GiB", "-1", "nan", "inf", "NaNGiB", "1e9", "", " ", "GiB", "8,5GiB", "8 G i B", "٣B"]
)
def test_text_that_is_not_a_number_is_rejected(text: str) -> None:
    with pytest.raises(InvalidBudgetError):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["8XB", "8PiB", "60%", "8bytes"])
def test_an_unknown_unit_is_rejected(text: str) -> None:
    with pytest.raises(InvalidBudgetError, match="unknown unit"):
        parse_bytes(text)


def test_a_fraction_without_a_unit_is_rejected() -> None:
    with pytest.raises(InvalidBudgetError, match="no unit"):
        parse_bytes("8.5")


@pytest.mark.parametrize("value", [-1, True, False, np.True_, 8.0, 8.5, math.nan, math.inf, None, b"8GiB", [8]])
def test_anything_but_a_byte_count_is_rejected(value: object) -> None:
    with pytest.raises(InvalidBudgetError):
        parse_bytes(value)


def test_text_too_long_to_be_a_number_is_rejected_and_cut() -> None:
    with pytest.raises(InvalidBudgetError) as rejected:
        parse_bytes("9" * 10**6)
    assert len(str(rejected.value)) < 200


def test_a_quantity_is_split_into_an_exact_number_and_its_unit() -> None:
    assert split_quantity(" 62.5 %") == (Fraction(125, 2), "%")
    assert split_quantity("7") == (7, "")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2, "1.00 MiB"),
        (5 * 1024**3 // 2, "2.50 GiB"),
        (3 * 1024**4, "3.00 TiB"),
        (2048 * 1024**4, "2048.00 TiB"),
    ],
)
def test_bytes_are_written_in_the_largest_binary_unit(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_percentages_are_rounded_and_infinity_is_a_dash() -> None:
    assert format_percent(0.04864) == "4.86%"
    assert format_percent(0.04864, 1) == "4.9%"
    assert format_percent(math.inf) == "-"


def test_a_peak_is_shown_in_percent_of_what_is_added_to_the_resident_bytes() -> None:
    # 24 bytes of the 80 that the save-everything step adds to 16.
    assert format_peak(40, 16, 96) == "40 B (30.0%)"
    assert format_peak(16, 16, 16) == "16 B"


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_without_spaces() -> None:
    assert text_table([("a", "bbb", "c"), ("aaaa", "b", "")]) == "a     bbb  c\naaaa  b"


def test_html_cells_are_escaped() -> None:
    assert html_table([("<b>",), ("&",)]) == "<table><tr><th>&lt;b&gt;</th></tr><tr><td>&amp;</td></tr></table>"
