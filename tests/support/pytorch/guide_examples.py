"""The examples of the guide that need names of the reader's own."""

from __future__ import annotations

from tests.pages.examples import blocks_of
from tests.pages.generate import page_paths


def run_example(word: str, **names: object) -> dict[str, object]:
    """Run the example in which a word occurs, with these names given, and return all names."""
    blocks = [block for path in page_paths() for block in blocks_of(path.read_text())]
    (code,) = [block.code for block in blocks if block.language == "py" and word in block.code]
    assert len(code.splitlines()) <= 12
    exec(compile(code, "guide", "exec"), names)
    return names
