"""The pages show what was recorded, and what was recorded is what the pages claim."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path

import pytest

from tests.pages import recordings
from tests.pages.generate import FIGURES, GUIDE, generated, page_paths, tables_shown, without_ages
from tests.pages.recordings import read_manifest, read_rows, table_names

FIXED = "run `python -m tests.pages`, and commit what it changes"


@pytest.mark.parametrize("path", page_paths(), ids=lambda path: path.stem)
def test_a_page_shows_what_was_recorded(path: Path) -> None:
    page = path.read_text()
    assert without_ages(page) == without_ages(generated(page)), FIXED


def test_every_table_is_on_a_page_and_says_how_it_was_recorded() -> None:
    shown = {name for path in page_paths() for name in tables_shown(path.read_text())}
    manifest = read_manifest()
    for name in table_names():
        assert name in manifest, f"recorded.csv does not say how {name}.csv was made: add a line with name and command"
        assert all((manifest[name].commit, manifest[name].date, manifest[name].machine)), name
        assert name in shown or name == "step_memory", f"{name}.csv is on no page: write <!-- table: {name} -->"
    assert list(manifest) == sorted(manifest)


def test_every_figure_is_of_what_was_recorded() -> None:
    pytest.importorskip("matplotlib")
    from tests.pages.figures import digest_of, figure_names, svg_of

    assert sorted(path.stem for path in FIGURES.iterdir()) == figure_names()
    for name in figure_names():
        svg = (FIGURES / f"{name}.svg").read_text()
        assert digest_of(name) in svg, FIXED
        assert labels(svg) == labels(svg_of(name)), FIXED


def test_recording_a_table_runs_its_command_and_says_when_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "BENCHMARKS", tmp_path)
    table = tmp_path / "new.csv"
    known = recordings.Recording("new", f"echo a,b > {table} && echo 1,2 >> {table}", "", "", "")
    found = recordings.record(known)
    assert recordings.read_rows("new") == [{"a": "1", "b": "2"}]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    assert re.fullmatch(r"\d+ cores of .*, load \d+\.\d", found.machine)
    # A command that fails leaves the table that was there.
    with pytest.raises(subprocess.CalledProcessError):
        recordings.record(recordings.Recording("new", f"echo c > {table}; false", "", "", ""))
    assert recordings.read_rows("new") == [{"a": "1", "b": "2"}]


def labels(svg: str) -> list[str]:
    """Return all texts of a figure; where they are differs between versions of matplotlib."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def test_a_line_of_the_text_never_has_a_figure_that_is_not_generated() -> None:
    """A percentage in the prose of these pages comes from a fact."""
    for name in ("measurements", "measured_times"):
        page = generated((GUIDE / f"{name}.md").read_text())
        prose = re.sub(r"<!-- (table|fact):.*?<!-- end -->", "", page, flags=re.DOTALL)
        assert re.findall(r"\d\.\d+ ?%", prose) == []


def test_generated_code_that_recomputes_nothing_takes_at_most_five_per_cent_more() -> None:
    assert all(float(row["time over eager"]) <= 1.05 for row in read_rows("overhead"))


def test_no_recorded_decomposition_lowers_floor_or_peak() -> None:
    rows = read_rows("decompositions")
    plain = {row["model"]: row for row in rows if row["decomposition"] == "none"}
    for row in rows:
        assert float(row["floor"]) >= float(plain[row["model"]]["floor"]), row
        assert float(row["peak"]) >= float(plain[row["model"]]["peak"]), row


def test_each_model_is_traced_and_planned_in_less_than_thirty_seconds() -> None:
    assert all(float(row["together"]) < 30 for row in read_rows("planning"))


def test_compiled_steps_hold_what_was_planned_and_inductor_never_more() -> None:
    rows = read_rows("compiled")
    assert len(rows) == 6
    for row in rows:
        assert float(row["gradient error"]) < 1e-9
        for size in (4, 6):
            planned, held = int(row[f"planned bytes, {size}"]), int(row[f"held bytes, {size}"])
            fewest = planned if row["compiler"] == "eager" else 0.9 * planned
            assert fewest <= held <= planned


def test_predicted_times_are_those_of_two_traces_and_measured_within_three_points() -> None:
    rows = read_rows("predicted_times")
    assert len(rows) >= 7
    for row in rows:
        first, second, measured = (float(row[column]) for column in ("first trace", "second trace", "measured"))
        assert abs(first - second) < 0.01
        assert round(max(abs(first - measured), abs(second - measured)), 3) <= 0.03


def test_predicted_peaks_are_the_measured_ones() -> None:
    rows = read_rows("predictions")
    for row in rows:
        assert int(row["live_measured"]) == pytest.approx(int(row["live_predicted"]), rel=0.001)
        assert int(row["allocator_measured"]) == pytest.approx(int(row["allocator_predicted"]), rel=0.03)
        assert int(row["allocator_measured"]) <= int(row["budget_bytes"])
    for smaller, larger in itertools.pairwise(rows):
        if smaller["model"] == larger["model"]:
            assert int(smaller["allocator_predicted"]) <= int(larger["allocator_predicted"])
            assert float(smaller["overhead_predicted"]) >= float(larger["overhead_predicted"])


def test_the_planned_step_of_the_figure_stays_within_its_budget() -> None:
    (budget,) = (int(row["bytes"]) for row in read_rows("step_memory") if row["series"] == "budget")
    peaks = {
        series: max(int(row["bytes"]) for row in read_rows("step_memory") if row["series"] == series)
        for series in ("PyTorch", "plan")
    }
    assert peaks["plan"] <= budget < peaks["PyTorch"]


def test_plans_are_no_worse_than_pytorchs_own_checkpointing_anywhere() -> None:
    for row in read_rows("peers"):
        if row["peak"]:
            assert float(row["our peak"]) <= float(row["peak"]), row
            assert float(row["our FLOPs"]) <= float(row["FLOPs"]), row
            assert float(row["our allocator peak"]) <= float(row["allocator peak"]), row
            assert float(row["our time"]) <= float(row["time"]) * (1 + float(row["noise"])), row
