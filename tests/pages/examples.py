"""Run the code blocks of a page in order, as a reader would."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scheduler.cli import main

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)


LONG = {"train", "doctor"}
"""Commands that take long, and that tests/test_readme.py and tests/test_doctor.py run."""


@dataclass(frozen=True)
class Block:
    """A code block of a page, and the output that the page shows below it."""

    language: str
    code: str
    output: str | None

    @property
    def commands(self) -> list[list[str]]:
        """The commands of this package in a console block, without its name."""
        lines = re.findall(r"^\$ (?:.* && )?(?:time )?scheduler (.*)$", self.code.replace("\\\n", ""), re.MULTILINE)
        return [shlex.split(line) for line in lines] if self.language == "console" else []


def blocks_of(page: str) -> list[Block]:
    """Return the code blocks of a page in order; outputs belong to the block above them."""
    return [Block(language, code, output or None) for language, code, output in BLOCK.findall(page)]


def run_page(page: str, name: str, *, run_long: bool = False) -> Iterator[tuple[Block, str]]:
    """Run the Python blocks and the commands of a page in order; yield each with what it printed.

    The commands run in this process, in the current folder; those of `LONG` only with `run_long`.
    """
    names: dict[str, object] = {"__name__": name}
    for block in blocks_of(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            if block.language == "python":
                exec(compile(block.code, f"{name}.md", "exec"), names)
            if "def factory(" in block.code:  # the file that the page calls mine.py
                Path("mine.py").write_text(block.code)
            for command in block.commands:
                if command[0] in LONG and "mine:factory" not in command and not run_long:
                    continue
                status = main(command)
                assert status == 0, (name, command, status)
        yield block, printed.getvalue()


def without_numbers(text: str) -> list[str]:
    """Return lines without what depends on the machine: numbers, padding and how far the proof came."""
    text = re.sub(r"(OPTIMAL|FEASIBLE) in (any|given|input|late) order", "STATUS", text)
    text = re.sub(r"noise ±", "0% ±", text)
    text = re.sub(r"-?\+?[0-9.]+%?", "#", text)
    return [" ".join(line.split()) for line in text.splitlines()]
