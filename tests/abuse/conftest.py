from __future__ import annotations

import pytest

from tests.abuse.tally import BOOK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if BOOK.areas:
        terminalreporter.section("abuse")
        for line in BOOK.lines():
            terminalreporter.write_line(line)
