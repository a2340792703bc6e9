"""What the pages contain that no one writes by hand: tables, facts and figures.

A page says where: `<!-- table: NAME -->...<!-- end -->` is the table of a CSV file with how it was
recorded, `<!-- fact: NAME -->...<!-- end -->` a figure within a sentence. Figures are files.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.pages.recordings import Recording, read_manifest
from tests.pages.tables import fact_of, table_of
from tests.support.paths import README, ROOT

GUIDE = ROOT / "notebooks" / "guide"
FIGURES = GUIDE / "figures"
_PLACE = re.compile(r"<!-- (table|fact): ([a-z][^>]*?) -->.*?<!-- end -->", re.DOTALL)
_AGE = " The package has changed since."


def page_paths() -> list[Path]:
    """Return README and all pages of the guide."""
    return [README, *sorted(GUIDE.glob("*.md"))]


def generated(page: str) -> str:
    """Return a page with its tables and facts made anew."""
    manifest = read_manifest()

    def filled(found: re.Match[str]) -> str:
        kind, name = found.groups()
        if kind == "fact":
            return f"<!-- fact: {name} -->{fact_of(name)}<!-- end -->"
        return f"<!-- table: {name} -->\n\n{table_of(name)}\n\n{_origin(manifest[name])}\n<!-- end -->"

    return _PLACE.sub(filled, page)


def without_ages(page: str) -> str:
    """Return a page without what depends on later commits."""
    return page.replace(_AGE, "")


def tables_shown(page: str) -> list[str]:
    """Return the names of the tables that a page shows."""
    return [name for kind, name in _PLACE.findall(page) if kind == "table"]


def _origin(recording: Recording) -> str:
    """Say how a table was recorded, and whether the package has changed since."""
    if not recording.commit:
        return f"`{recording.command}`"
    age = _AGE if recording.is_older_than_the_code() else ""
    return f"`{recording.command}`\n(commit {recording.commit}, {recording.date}, {recording.machine}).{age}"
