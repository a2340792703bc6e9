"""README is true: its examples are run, and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from tests.support.fake_clock import FakeClock
from tests.support.paths import README

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
    assert len(shown) >= 2
    for arguments in shown:
        assert _parser().parse_args(shlex.split(arguments)).run is not None


def test_every_solver_in_the_table_is_registered_and_the_other_way_round() -> None:
    import scheduler as sc

    table = README.read_text().split("## Solvers")[1].split("## ")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for cell in cells for name in re.findall("`([a-z-]+)`", cell)}
    assert named == set(sc.solver_names())
