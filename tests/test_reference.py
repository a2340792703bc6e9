"""The API reference: README's command builds it, and it shows every public name with its docstring."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import scheduler
import scheduler.pytorch
from tests.support.paths import ROOT


class Entries(HTMLParser):
    """The text of each entry of a page by its id; the text of the page itself has the empty id."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self.open.append(dict(attrs).get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pdoc")
    pytest.importorskip("torch")
    (script,) = re.findall(r"^\$ python (\S+) build/reference$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    folder = tmp_path_factory.mktemp("reference")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    built = subprocess.run(
        [sys.executable, script, str(folder)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (built.returncode, built.stderr) == (0, "")
    return folder


def first_paragraph(documented: object) -> str:
    """Return the first paragraph of a docstring as a page shows it."""
    return " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].replace("`", "").split())


@pytest.mark.parametrize("module", [scheduler, scheduler.zoo, scheduler.pytorch], ids=lambda module: module.__name__)
def test_every_public_name_has_its_entry_with_its_docstring(pages: Path, module: ModuleType) -> None:
    page = Path(pages, *module.__name__.split(".")).with_suffix(".html")
    texts = {name: " ".join(text.split()) for name, text in Entries(page.read_text()).texts.items()}
    assert first_paragraph(module) in texts[""]
    for name in module.__all__:
        public = getattr(module, name)
        if not isinstance(public, ModuleType):
            assert len(first_paragraph(public)) > 10
            assert first_paragraph(public) in texts[name]


def test_the_index_links_to_every_page_and_every_page_links_back(pages: Path) -> None:
    index = (pages / "index.html").read_text()
    listed = set(re.findall(r'href="(scheduler[\w/]*\.html)"', index))
    assert listed == {str(page.relative_to(pages)) for page in pages.rglob("*.html")} - {"index.html"}
    assert {"scheduler/solvers/ilp.html", "scheduler/errors.html", "scheduler/zoo.html"} < listed
    for page in listed:
        assert f'href="{"../" * page.count("/")}index.html"' in (pages / page).read_text()
