"""README is true: its examples are run, and print what it says."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from tests.support.fake_clock import FakeClock
from tests.support.paths import BENCHMARKS, README

pytestmark = pytest.mark.long(40)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_python_example_prints_what_readme_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() in blocks("text")


def recorded(name: str) -> list[list[str]]:
    """The lines of a recorded benchmark, its head first."""
    with (BENCHMARKS / f"{name}.csv").open() as file:
        return list(csv.reader(file))


def recorded_cases(name: str) -> list[dict[str, str]]:
    """The lines of a recorded benchmark under the names in its head."""
    head, *rows = recorded(name)
    return [dict(zip(head, row, strict=True)) for row in rows]


def shape(text: str) -> list[str]:
    """What does not depend on the machine: numbers, padding and how far the proof came left out."""
    text = re.sub(r"(OPTIMAL|FEASIBLE) in (any|given) order", "STATUS", text)
    text = re.sub(r"noise ±", "0% ±", text)
    text = re.sub(r"-?\+?[0-9.]+%?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_main_command_prints_what_readme_shows_but_for_measured_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from scheduler.cli import main
    from scheduler.pytorch import training
    from scheduler.pytorch.models import networks
    from scheduler.pytorch.training import TrainingReport

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(networks, "gpt2", partial(networks.gpt2, layers=3))  # numbers are not compared
    monkeypatch.setattr(training, "_TIMED_STEPS", 1)  # what is measured is not compared
    monkeypatch.setattr(TrainingReport, "captured_step_is_slower", False)  # a note that depends on measured times
    with FakeClock(seconds_per_look=0.1):
        assert main(["train", "gpt2", "--budget", "60%"]) == 0
    printed = shape(capsys.readouterr().out)
    assert any(shape(text) == printed for text in blocks("text"))


def test_every_command_in_readme_is_one_that_the_parser_knows(capsys: pytest.CaptureFixture[str]) -> None:
    from scheduler.cli import main

    named = set(re.findall(r"`scheduler ([a-z-]+)", README.read_text()))
    assert named == {
        *("models", "trace", "plan", "show", "report", "export", "verify"),
        *("train", "max-batch", "frontier", "compare", "doctor"),
    }
    for command in sorted(named):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


def test_every_command_shown_is_understood() -> None:
    from scheduler.cli import _parser

    shown = re.findall(
        r"^\$ (?:.* && )?scheduler (.*)$", "\n".join(blocks("console")).replace("\\\n", ""), re.MULTILINE
    )
    assert len(shown) >= 3
    for arguments in shown:
        assert _parser().parse_args(shlex.split(arguments)).run is not None


def test_every_solver_in_the_table_is_registered_and_the_other_way_round() -> None:
    import scheduler as sc

    table = README.read_text().split("## Solvers")[1].split("## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for cell in cells for name in re.findall("`([a-z-]+)`", cell)}
    assert named == set(sc.solver_names())


def test_the_table_of_overheads_is_the_recorded_one_and_within_five_per_cent() -> None:
    head, *rows = recorded("overhead")
    table = README.read_text()
    for row in (head, *rows):
        assert f"| {' | '.join(row)} |" in table
    assert all(float(row[-1]) <= 1.05 for row in rows)


def test_no_recorded_decomposition_lowers_floor_or_peak() -> None:
    rows = recorded_cases("decompositions")
    plain = {row["model"]: row for row in rows if row["decomposition"] == "none"}
    others = [row for row in rows if row["decomposition"] != "none"]
    for row in others:
        assert float(row["floor"]) >= float(plain[row["model"]]["floor"]), row
        assert float(row["peak"]) >= float(plain[row["model"]]["peak"]), row
    changed = sum(row["same gradients"] == "no" for row in others)
    assert f"{changed} of {len(others)} change bits of the gradients" in " ".join(README.read_text().split())


def test_the_table_of_planning_is_the_recorded_one_and_each_model_takes_less_than_thirty_seconds() -> None:
    head, *rows = recorded("planning")
    table = README.read_text()
    for row in (head, *rows):
        assert f"| {' | '.join(row)} |" in table
    assert all(float(row[head.index("together")]) < 30 for row in rows)


def test_the_table_of_general_graphs_is_the_recorded_one() -> None:
    head, *rows = recorded("general_graphs")
    table = README.read_text()
    assert len(rows) > 20
    for row in (head, *rows):
        assert f"| {' | '.join(row)} |" in table


def test_the_table_of_compiled_steps_is_the_recorded_one_and_holds_what_was_planned() -> None:
    head, *rows = recorded("compiled")
    table = README.read_text()
    for row in (head, *rows):
        assert f"| {' | '.join(row)} |" in table
    models = ("hf-gpt2", "resnet50", "hf-vit")
    assert [row[:2] for row in rows] == [[model, how] for model in models for how in ("eager", "inductor")]
    for _, _, error, planned, held, planned_other, held_other in rows:
        assert float(error) < 1e-9
        assert (planned, planned_other) == (held, held_other)


def deep_table(rows: list[dict[str, str]]) -> list[str]:
    """A line per case, in percent."""
    return [
        f"| {row['blocks']} | {row['operations']} | {row['budget']} | {float(row['overhead']):.3%}"
        f" | {float(row['gap']):.4%} | {row['status']} | {row['seconds']} of {row['limit']} | {row['peak_gib']} |"
        for row in rows
    ]


def test_the_table_of_deep_networks_is_the_recorded_one() -> None:
    rows = recorded_cases("deep_networks")
    table = README.read_text()
    assert len(rows) > 10
    for line in deep_table(rows):
        assert line in table


def prediction_table(rows: list[dict[str, str]]) -> list[str]:
    """A line per model: the largest deviations of its peaks, and its overheads at two budgets."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        cells = [model, str(len(own))]
        for kind in ("live", "allocator"):
            ratios = [int(row[f"{kind}_measured"]) / int(row[f"{kind}_predicted"]) for row in own]
            cells.append(f"{max(abs(ratio - 1) for ratio in ratios):.2%}")
        largest = max(int(row["allocator_measured"]) / int(row["budget_bytes"]) for row in own)
        cells.append(f"{largest:.2%}")
        for row in (own[len(own) // 4 - 1], own[len(own) // 2 - 1]):
            cells += [f"{float(row[f'overhead_{kind}']):.1%}" for kind in ("predicted", "measured")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def test_predicted_times_are_those_of_two_traces_and_measured_within_three_points() -> None:
    text = README.read_text()
    rows = recorded_cases("predicted_times")
    assert len(rows) >= 7
    for row in rows:
        first, second, measured, noise = (
            float(row[column]) for column in ("first trace", "second trace", "measured", "noise")
        )
        cells = [row["model"], row["budget"], *(f"{share:.1%}" for share in (first, second, measured, noise))]
        assert f"| {' | '.join(cells)} |" in text
        assert abs(first - second) < 0.01
        assert round(max(abs(first - measured), abs(second - measured)), 3) <= 0.03


def test_predicted_peaks_are_the_measured_ones_as_readme_says() -> None:
    rows = recorded_cases("predictions")
    table = README.read_text()
    lines = prediction_table(rows)
    assert len(lines) == 7
    for line in lines:
        assert line in table
    for row in rows:
        assert int(row["live_measured"]) == pytest.approx(int(row["live_predicted"]), rel=0.001)
        assert int(row["allocator_measured"]) == pytest.approx(int(row["allocator_predicted"]), rel=0.03)
        assert int(row["allocator_measured"]) <= int(row["budget_bytes"])
    for smaller, larger in itertools.pairwise(rows):
        if smaller["model"] == larger["model"]:
            assert int(smaller["allocator_predicted"]) <= int(larger["allocator_predicted"])
            assert float(smaller["overhead_predicted"]) >= float(larger["overhead_predicted"])


@pytest.mark.parametrize("name", ["accumulation", "checkpoint_exports", "max_batch"])
def test_the_table_of_a_benchmark_is_the_recorded_one(name: str) -> None:
    head, *rows = recorded(name)
    table = README.read_text()
    assert rows
    for row in (head, *rows):
        assert f"| {' | '.join(row)} |" in table


def solver_table(rows: list[dict[str, str]], budget: str) -> list[str]:
    """Percent lost by each solver on each graph: a star for a proven optimum, a dash for no schedule found."""
    rows = [row for row in rows if row["budget"] == budget]
    graphs = sorted({row["graph"] for row in rows})
    cells = {
        (row["solver"], row["graph"]): f"{float(row['overhead']):.2%}{'*' * (row['status'] == 'OPTIMAL')}"
        if row["overhead"]
        else "-"
        for row in rows
        if row["status"] != "unsuitable"
    }
    served = [solver for solver in dict.fromkeys(row["solver"] for row in rows) if any(solver in key for key in cells)]
    lines = [f"| solver | {' | '.join(graphs)} |"]
    lines += [f"| `{solver}` | {' | '.join(cells.get((solver, graph), '') for graph in graphs)} |" for solver in served]
    bounds = {
        graph: max(
            float(row["global_bound"]) / float(row["baseline_time"]) - 1
            for row in rows
            if row["graph"] == graph and row["global_bound"]
        )
        for graph in graphs
    }
    lines.append(f"| bound, any order | {' | '.join(f'{bounds[graph]:.2%}' for graph in graphs)} |")
    return lines


def test_the_table_of_solvers_is_the_recorded_one() -> None:
    rows = recorded_cases("solvers")
    table = README.read_text()
    for line in solver_table(rows, "70%"):
        assert line in table


SHOWN_OF_PEERS = (
    "peak", "FLOPs", "our peak", "our FLOPs", "allocator peak", "time", "our allocator peak", "our time",
)  # fmt: skip


def peers_table(rows: list[dict[str, str]]) -> list[str]:
    """The points of the peers that no other of theirs is as good as, ours at no more peak, and ours below theirs."""
    lines = [f"| model | PyTorch | {' | '.join(SHOWN_OF_PEERS)} |"]
    points = [row for row in rows if row["peak"]]

    def is_beaten(row: dict[str, str]) -> bool:
        return any(
            float(other["peak"]) <= float(row["peak"]) and float(other["FLOPs"]) <= float(row["FLOPs"])
            for other in points
            if other["model"] == row["model"] and other is not row
        )

    def line(row: dict[str, str], point: str) -> str:
        return f"| {row['model']} | {point} | {' | '.join(row[name] or '-' for name in SHOWN_OF_PEERS)} |"

    lines += [line(row, row["point"]) for row in points if not is_beaten(row)]
    for row in rows:
        least = min(float(other["peak"]) for other in points if other["model"] == row["model"])
        if not row["peak"] and row["our peak"] and float(row["our peak"]) < least:
            lines.append(line(row, "-"))
    return lines


def test_the_table_of_peers_is_the_recorded_one_and_ours_is_no_worse_anywhere() -> None:
    rows = recorded_cases("peers")
    table = README.read_text()
    assert len(peers_table(rows)) > 10
    for line in peers_table(rows):
        assert line in table
    for row in rows:
        if row["peak"]:
            assert float(row["our peak"]) <= float(row["peak"]), row
            assert float(row["our FLOPs"]) <= float(row["FLOPs"]), row
            assert float(row["our allocator peak"]) <= float(row["allocator peak"]), row
            assert float(row["our time"]) <= float(row["time"]) * (1 + float(row["noise"])), row
    noise = max(float(row["noise"]) for row in rows)
    assert f"differ by {noise:.1%} at most" in " ".join(table.split())
