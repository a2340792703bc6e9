"""The examples of README that need names of the reader's own."""

from __future__ import annotations

import re

from tests.support.paths import README


def run_example(word: str, **names: object) -> dict[str, object]:
    """Run the example in which a word stands, with these names given, and return all names."""
    (code,) = [block for block in re.findall(r"^```py\n(.*?)^```", README.read_text(), re.M | re.S) if word in block]
    assert len(code.splitlines()) <= 12
    exec(compile(code, "README.md", "exec"), names)
    return names
