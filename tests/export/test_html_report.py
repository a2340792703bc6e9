"""The report: well-formed, self-contained, and as true as the plan."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import scheduler as sc
from scheduler.cli import main
from scheduler.errors import PlanClaimError
from scheduler.export.html_report import layer_rows, report_html, write_report
from tests.support.plans import layered_plan, oddly_named_plan, twice_plan, viewing_plan

image = pytest.importorskip("matplotlib.image")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """A page read strictly: every element is closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.styles = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attrs)
        if tag == "table":
            self.tables[str(found["id"])] = []
        elif tag == "tr":
            list(self.tables.values())[-1].append([])
        elif tag in ("td", "th"):
            list(self.tables.values())[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            self.styles += data
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            list(self.tables.values())[-1][-1][-1] += data


@pytest.mark.parametrize("plan", [twice_plan(), layered_plan(), oddly_named_plan()], ids=["chain", "layers", "odd"])
def test_the_page_is_well_formed_and_refers_to_nothing_outside(plan: sc.Plan) -> None:
    page = Page(report_html(plan))
    assert page.seen.count("svg") == 2
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.seen)
    assert len(page.ids) == len(set(page.ids))
    for name, value in page.attributes:
        if name in ("href", "xlink:href", "src"):
            assert value[1:] in page.ids
        if "url(" in value:
            assert value.split("url(#")[1].split(")")[0] in page.ids
        assert "://" not in value or name.startswith("xmlns")
        assert not name.startswith("on")
    assert "://" not in page.styles
    assert "@import" not in page.styles


def test_claims_and_proof_are_the_plans() -> None:
    plan = twice_plan()
    page = Page(report_html(plan))
    claims, proof = dict(map(tuple, page.tables["claims"])), dict(map(tuple, page.tables["proof"]))
    assert claims["budget"] == "17 B (17 bytes)"
    assert claims["peak"] == "16 B (16 bytes)"
    assert claims["peak of saving everything"] == "16 B (16 bytes)"
    assert claims["resident tensors"] == "4 B (4 bytes)"
    assert claims["saved at the end of the forward phase"] == "4 B (4 bytes)"
    assert claims["operation at the peak"] == "b1"
    assert (claims["time"], claims["time of saving everything"]) == ("7 s", "6 s")
    assert claims["overhead in time"] == "16.6667%"
    assert proof["status"].startswith("FEASIBLE")
    assert proof["search space"] == "any order"
    # No schedule takes less than each layer once: 6 of 7 units.
    assert proof["lower bound on the time, in the search space"] == "6 s"
    assert proof["lower bound on the time, over all schedules"] == "6 s"
    assert (proof["gap"], proof["gap over all schedules"]) == ("14.2857%", "14.2857%")
    assert (proof["solver"], proof["solve time"]) == ("by hand", "0.25 s")
    assert proof["package version"] == plan.package_version
    assert proof["digest of the plan"] == plan.digest
    assert proof["digest of the graph"] == plan.graph.digest
    assert proof["digest of the graph's structure"] == plan.graph.structure_digest
    assert "It has 1 recomputation and takes 16.67% more time. A schedule in the search space" in page.text


def test_layers_tell_what_is_saved_and_recomputed_counted_by_hand() -> None:
    page = Page(report_html(layered_plan()))
    assert page.tables["layers"] == [
        ["layer", "saved", "tensors saved", "recomputed, of the step's time", "operations recomputed"],
        ["enc", "", "", "16.667%", "1 operationenc.forward: 1 x"],
        ["dec", "16 B", "3 tensorsdec.output: 4 Bdec.saved: 8 Bdec.kept_input: 4 B", "", ""],
        ["loss", "", "", "", ""],
        ["all layers", "16 B", "3 tensors", "16.667%", "1 run"],
    ]


def test_tensors_on_one_storage_count_once() -> None:
    assert [(row.layer, row.saved) for row in layer_rows(viewing_plan())] == [("f", (("y", 4),)), ("view", (("z", 0),))]


def test_layers_add_up_to_what_simulation_gives() -> None:
    for plan in (twice_plan(), layered_plan(), viewing_plan(), oddly_named_plan()):
        rows = layer_rows(plan)
        assert sum(row.saved_bytes for row in rows) == plan.simulation.saved_bytes
        assert sorted(name for row in rows for name, _ in row.saved) == sorted(plan.saved_data)
        again = {name: runs for row in rows for name, runs in row.recomputed}
        assert again == {name: runs for name, runs in plan.simulation.recomputed.items() if runs}


def test_names_are_text_whatever_they_hold() -> None:
    plan = oddly_named_plan()
    page = Page(report_html(plan))
    assert f"Plan of {plan.graph.name}" in page.text
    assert plan.graph.operations[0].name in dict(map(tuple, page.tables["claims"])).values()


def test_a_plan_has_one_report_and_no_other() -> None:
    assert report_html(layered_plan()) == report_html(layered_plan())


def test_a_plan_with_an_untrue_claim_has_no_report() -> None:
    with pytest.raises(PlanClaimError, match="states peak_bytes=15"):
        report_html(replace(twice_plan(), peak_bytes=15))


@pytest.mark.parametrize(("command", "name"), [("report", "report.html"), ("export", "trace.json")])
def test_the_commands_write_files_or_lose_nothing(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = layered_plan()
    plan.save("plan.json")
    assert main([command, "plan.json", "-o", name, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["peak_bytes"] == plan.peak_bytes
    assert name in said.values()
    written = Path(name).read_text()
    assert plan.digest in written
    assert main([command, "plan.json", "-o", "none/file"]) == 2
    assert "none" in capsys.readouterr().err
    assert main([command, name, "-o", name]) == 2
    assert Path(name).read_text() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["plan.json", name])


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_the_pictures(tmp_path: Path) -> None:
    write_report(layered_plan(), tmp_path / "report.html")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2600"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={tmp_path / 'page.png'}"]
    subprocess.run([*command, (tmp_path / "report.html").as_uri()], check=True, capture_output=True, timeout=120)
    pixels = (255 * image.imread(tmp_path / "page.png")[:, :, :3]).round().astype(int)
    for color in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00), (0x00, 0x9E, 0x73), (0x56, 0xB4, 0xE9)):
        assert (pixels == color).all(axis=2).sum() > 200
