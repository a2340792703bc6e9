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
_PLACE = re.compile(r"<!-- (table|fact): ([^>]+?) -->.*?<!-- end -->", re.DOTALL)
_AGE = re.compile(r" Since then, [0-9,]+ commits? (has|have) changed the package\.")


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
    return _AGE.sub("", page)


def tables_shown(page: str) -> list[str]:
    """Return the names of the tables that a page shows."""
    return [name for kind, name in _PLACE.findall(page) if kind == "table"]


def _origin(recording: Recording) -> str:
    """Say how a table was recorded, and whether the package has changed since."""
    if not recording.commit:
        return f"`{recording.command}`"
    later = recording.later_commits()
    age = f" Since then, {later:,} commit{'s have' if later > 1 else ' has'} changed the package." if later else ""
    return f"`{recording.command}`\n(commit {recording.commit}, {recording.date}, {recording.machine}).{age}"
