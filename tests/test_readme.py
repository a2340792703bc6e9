"""README is true: its examples are run, and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from functools import partial
from pathlib import Path

import pytest

from tests.pages.examples import without_numbers
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


def test_the_main_command_prints_what_readme_shows_but_for_measured_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from scheduler.cli import main
    from scheduler.pytorch import training
    from scheduler.pytorch.models import networks
    from scheduler.pytorch.training import TrainingReport

    monkeypatch.chdir(tmp_path)
    small = partial(networks.gpt2, layers=2, width=128, length=64)
    monkeypatch.setattr(networks, "gpt2", small)  # numbers are not compared, but units
    monkeypatch.setattr(training, "_TIMED_STEPS", 1)  # what is measured is not compared
    monkeypatch.setattr(TrainingReport, "captured_step_is_slower", False)  # a note that depends on measured times
    with FakeClock(seconds_per_look=0.1):
        assert main(["train", "gpt2", "--budget", "60%"]) == 0
    printed = without_numbers(capsys.readouterr().out)
    assert any(without_numbers(text) == printed for text in blocks("text"))


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150
