"""The code in pages of the guide runs, and prints what the pages say."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from scheduler.solvers import registry
from tests.pages.examples import blocks_of, run_page, without_numbers
from tests.pages.generate import GUIDE, page_paths
from tests.support.fake_clock import SECONDS_PER_LOOK, FakeClock
from tests.support.paths import README

pytestmark = pytest.mark.long(30)

PAGES = [path for path in page_paths() if path != README]
SECONDS_OF = {"start": 0.05}
"""Seconds per look at the clock, for a page that prints nothing of how far a search came."""
FIXED = "run `python -m tests.pages outputs`, and look at what it changes"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_code_of_a_page_prints_what_the_page_says(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    clock = FakeClock(seconds_per_look=SECONDS_OF.get(path.stem, SECONDS_PER_LOOK))
    with clock, patch.dict(registry.REGISTERED):  # other tests have no solver of a page
        check_page(path)


def check_page(path: Path) -> None:
    for block, printed in run_page(path.read_text(), path.stem):
        if block.output is not None and block.language == "python":
            assert printed == block.output, FIXED
        if block.output is not None and block.language == "console":
            assert without_numbers(printed) == without_numbers(block.output)


def test_every_language_of_a_block_is_one_that_a_test_runs() -> None:
    blocks = [block for path in page_paths() for block in blocks_of(path.read_text())]
    assert {block.language for block in blocks} <= {"python", "py", "console", "text"}
    # These need a model and data of the reader's own, and are run in tests/pytorch/integrations.
    own = [block.code for block in blocks if block.language == "py"]
    assert len(own) == sum("share_plan" in code or "Callback" in code for code in own) == 3


def test_every_script_that_a_page_names_exists() -> None:
    for path in page_paths():
        for block in blocks_of(path.read_text()):
            for line in block.code.splitlines():
                if block.language == "console" and line.startswith("$ python ") and not line.startswith("$ python -m"):
                    assert (GUIDE.parents[1] / line.split()[2]).exists(), line
