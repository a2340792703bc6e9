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
    folders = [path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("__init__.py")]
    named = [name.rstrip("/") for name in re.findall(r"`([\w/]+/)`", PAGE)]
    for folder in folders:
        if folder != Path() and folder != Path("pytorch"):
            assert sum(str(folder).endswith(name) for name in named) + (f"`{folder}/" in PAGE) >= 1, folder
    assert len(named) == len(set(named))
