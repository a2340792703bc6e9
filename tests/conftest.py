from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

# Small models and graphs gain nothing from threads, and two workers have two cores. This is read when torch,
# numpy or Inductor are imported, so nothing above this line may import them.
os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS")}
# What tests measure is not kept in the user's folder for caches.
os.environ["SCHEDULER_COSTS_FILE"] = "off"

import pytest
from hypothesis import settings

from tests.abuse.tally import BOOK
from tests.support.examples import ALL
from tests.support.fake_clock import SECONDS_PER_LOOK, FakeClock

# `pytest --hypothesis-profile dev` is for quick runs, "thorough" for nights.
settings.register_profile("dev", max_examples=ALL // 10, deadline=None, print_blob=True)
settings.register_profile("ci", max_examples=ALL, deadline=None, print_blob=True)
settings.register_profile("thorough", max_examples=20 * ALL, deadline=None, print_blob=True)
settings.load_profile("ci")

# A process that a shell starts in the background ignores Ctrl-C, which some tests send to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _counted_searches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the time limits of searches a number of looks at the clock, the same on every machine."""
    if request.node.get_closest_marker("abuse") or "benchmark" in request.fixturenames:
        yield
    else:
        with FakeClock(seconds_per_look=SECONDS_PER_LOOK):
            yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files, so that no worker is left with one of them at the end."""

    def seconds(item: pytest.Item) -> float:
        marker = item.get_closest_marker("long")
        return float(marker.args[0]) if marker else 0.0

    items.sort(key=seconds, reverse=True)


def pytest_collection_finish() -> None:
    """Let the collector of cycles pass over what is imported, which is most of all objects and stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the tallies of a worker to the process that prints them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["tallies"] = BOOK.counts()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Add the tallies of a worker that has finished."""
    BOOK.add(getattr(node, "workeroutput", {}).get("tallies", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the abuse tests tried."""
    if BOOK.areas:
        terminalreporter.section("abuse")
        for line in BOOK.lines():
            terminalreporter.write_line(line)
