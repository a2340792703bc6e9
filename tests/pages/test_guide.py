"""Pages keep to their form: one question, an example first, links that lead somewhere, tables that are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import scheduler as sc
from scheduler.cli import _parser
from scheduler.errors import SchedulerError
from tests.pages.examples import blocks_of
from tests.pages.generate import GUIDE, page_paths
from tests.support.paths import README

MOST_LINES = 200
PAGES = page_paths()
GUIDE_PAGES = [path for path in PAGES if path != README]
by_name = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)


@pytest.mark.parametrize("path", GUIDE_PAGES, ids=lambda path: path.stem)
def test_a_page_asks_one_question_and_begins_with_something_to_run(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    titles = [line for line in lines if line.startswith("# ") and "?" in line]
    assert titles[0] == lines[0]
    beginning = path.read_text().split("\n## ")[0]
    assert {block.language for block in blocks_of(beginning)} & {"python", "py", "console"} or path.stem == "commands"


@by_name
def test_every_link_within_the_repository_leads_to_a_file_and_a_heading(path: Path) -> None:
    page = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", page):
        if not target.startswith("https://"):
            name, _, anchor = target.partition("#")
            linked = path.parent / name if name else path
            assert linked.exists(), target
            assert not anchor or anchor in headings(linked), target


def headings(path: Path) -> list[str]:
    """Return the anchors of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in PAGES
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text())
        if not target.startswith("https://")
    }
    assert [path.name for path in GUIDE_PAGES if path.resolve() not in linked] == []
    notebooks = sorted(GUIDE.parent.glob("*.ipynb"))
    assert [path.name for path in notebooks if path.resolve() not in linked] == []


@by_name
def test_every_command_shown_is_understood(path: Path) -> None:
    for block in blocks_of(path.read_text()):
        for arguments in block.commands:
            assert _parser().parse_args(arguments).run is not None


@by_name
def test_every_command_named_is_one_that_the_parser_knows(path: Path) -> None:
    for command in set(re.findall(r"`scheduler\s([a-z-]+)", path.read_text())):
        assert f" {command} " in " ".join(_parser().format_help().split()), command


def test_the_page_of_commands_has_every_command() -> None:
    named = set(re.findall(r"^\| `scheduler ([a-z-]+)", (GUIDE / "commands.md").read_text(), re.MULTILINE))
    actions = _parser()._subparsers
    assert actions is not None
    (choices,) = [action.choices for action in actions._group_actions]
    assert named == set(choices or ())


def test_troubleshooting_has_every_error_and_its_cure() -> None:
    def tree(error: type[SchedulerError]) -> set[str]:
        public = {error.__name__} if error.__module__ == "scheduler.errors" else set[str]()
        return public.union(*(tree(kind) for kind in error.__subclasses__()))

    rows = re.findall(r"^\| `(\w+Error)` \| (.+) \| (.+) \|$", (GUIDE / "troubleshooting.md").read_text(), re.MULTILINE)
    assert {name for name, _, _ in rows} == tree(SchedulerError)
    assert all(len(cure) > 10 for _, _, cure in rows)


def test_the_table_of_solvers_has_every_solver() -> None:
    cells = re.findall(r"^\| (`[^|]+) \|", (GUIDE / "solvers.md").read_text().split("## ")[0], re.MULTILINE)
    assert {name for cell in cells for name in re.findall("`([a-z-]+)`", cell)} == set(sc.solver_names())


def test_the_table_of_the_plan_file_has_every_key() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (GUIDE / "plan_file.md").read_text(), re.MULTILINE)
    keys = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    plan = sc.make_plan(sc.zoo.unet(2, width=4, size=16), "100%", solver="save-all")
    assert keys == set(plan.to_dict())
