"""The page on architecture names files that exist, and every folder of the package."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.paths import ROOT

PAGE = (ROOT / "notebooks" / "guide" / "architecture.md").read_text()
PACKAGE = ROOT / "scheduler"


def test_every_named_file_exists() -> None:
    known = {path.name for path in PACKAGE.rglob("*.py")}
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(named) > 20
    assert [name for name in named if not (PACKAGE / name).exists() and Path(name).name not in known] == []


def test_every_folder_is_named_once() -> None:
    named = re.findall(r"`([\w/]+)/`", PAGE)
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")} - {Path(), Path("pytorch")}
    for folder in folders:
        assert sum(f"/{folder}".endswith(f"/{name}") for name in named) == 1, folder
    assert len(named) == len(folders) + 1  # paths are relative to `scheduler/`


def test_the_page_is_short() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 110
