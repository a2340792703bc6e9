"""The code in pages of the guide runs, and prints what the pages say."""

from __future__ import annotations

import contextlib
import io
import re

import pytest

from tests.support.paths import ROOT


@pytest.mark.parametrize("name", ["modules"])
def test_the_code_of_a_page_prints_what_the_page_says(name: str) -> None:
    pytest.importorskip("torch")
    page = (ROOT / "notebooks" / "guide" / f"{name}.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == page.count("```python") > 0
    variables: dict[str, object] = {}
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{name}.md", "exec"), variables)
        assert printed.getvalue() == expected
