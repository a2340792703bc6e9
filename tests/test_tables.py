"""Tables: aligned as text, escaped as HTML."""

from __future__ import annotations

from scheduler.tables import html_table, text_table


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_without_spaces() -> None:
    assert text_table([("a", "bbb", "c"), ("aaaa", "b", "")]) == "a     bbb  c\naaaa  b"


def test_html_cells_are_escaped() -> None:
    assert html_table([("<b>",), ("&",)]) == "<table><tr><th>&lt;b&gt;</th></tr><tr><td>&amp;</td></tr></table>"
