"""README is true: its examples are run, and print what it says."""

from __future__ import annotations

import contextlib
import csv
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


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


def shape(text: str) -> list[str]:
    """What does not depend on the machine: numbers, padding and how far the proof came left out."""
    text = re.sub(r"(OPTIMAL|FEASIBLE) in (any|given) order", "STATUS", text)
    text = re.sub(r"-?\+?[0-9.]+%?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_main_command_prints_what_readme_shows_but_for_measured_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from scheduler.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["train", "gpt2", "--budget", "60%"]) == 0
    printed = shape(capsys.readouterr().out)
    assert any(shape(text) == printed for text in blocks("text"))


def test_every_command_in_readme_is_one_that_the_parser_knows(capsys: pytest.CaptureFixture[str]) -> None:
    from scheduler.cli import main

    named = set(re.findall(r"`scheduler ([a-z-]+)", README.read_text()))
    assert named == {"models", "trace", "plan", "show", "report", "export", "verify", "train", "frontier", "compare"}
    for command in sorted(named):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert command in capsys.readouterr().out


def test_every_solver_in_the_table_is_registered_and_the_other_way_round() -> None:
    import scheduler as sc

    table = README.read_text().split("## Solvers")[1].split("## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for cell in cells for name in re.findall("`([a-z-]+)`", cell)}
    assert named == set(sc.solver_names())


def test_the_table_of_overheads_is_the_recorded_one_and_within_five_per_cent() -> None:
    with (Path(__file__).parent / "benchmarks" / "overhead.csv").open() as file:
        head, *rows = csv.reader(file)
    table = README.read_text()
    for row in (head, *rows):
        assert f"| {' | '.join(row)} |" in table
    assert all(float(row[-1]) <= 1.05 for row in rows)


def test_the_table_of_general_graphs_is_the_recorded_one() -> None:
    with (Path(__file__).parent / "benchmarks" / "general_graphs.csv").open() as file:
        head, *rows = csv.reader(file)
    table = README.read_text()
    assert len(rows) > 20
    for row in (head, *rows):
        assert f"| {' | '.join(row)} |" in table


def solver_table(rows: list[dict[str, str]], budget: str) -> list[str]:
    """Per cent lost by each solver on each graph: a star for a proven optimum, a dash for no schedule found."""
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
            float(row["bound_any"]) / float(row["baseline_time"]) - 1
            for row in rows
            if row["graph"] == graph and row["bound_any"]
        )
        for graph in graphs
    }
    lines.append(f"| bound, any order | {' | '.join(f'{bounds[graph]:.2%}' for graph in graphs)} |")
    return lines


def test_the_table_of_solvers_is_the_recorded_one() -> None:
    with (Path(__file__).parent / "benchmarks" / "solvers.csv").open() as file:
        rows = list(csv.DictReader(file))
    table = README.read_text()
    for line in solver_table(rows, "70%"):
        assert line in table
