"""Kills, full disks, read-only folders and many writers at once: no lost or half-written file."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import scheduler as sc
from scheduler.cli import main
from scheduler.comparisons.journal import Journal, read_entries
from scheduler.errors import InvalidOptionError
from scheduler.graph.formats import write_graph
from tests.abuse.tally import BOOK
from tests.support.paths import ROOT
from tests.support.training_graphs import conv_net, uniform_chain

pytestmark = [pytest.mark.abuse, pytest.mark.skipif(os.name != "posix", reason="processes are forked and killed")]
KILLS, WRITERS, ROUNDS = 60, 4, 25


@pytest.fixture(scope="module")
def plans() -> tuple[sc.Plan, sc.Plan]:
    """Two plans of some hundred kilobytes: to write them takes more than one write."""
    graph = conv_net(60)
    return sc.make_plan(graph, "100%", solver="save-all"), sc.make_plan(graph, "70%", solver="greedy", time_limit=20)


def child(work: Callable[[], None]) -> int:
    """Do it in a process of its own and return its id; there are no threads here that a fork would halve."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def in_child(work: Callable[[], None]) -> None:
    """Do it in a process of its own, which must end well."""
    assert os.waitpid(child(work), 0)[1] == 0


def killed_after(work: Callable[[], None], seconds: float) -> None:
    """Do it in a process of its own, and kill that after a while."""
    pid = child(work)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def forever(plans: tuple[sc.Plan, sc.Plan], path: Path) -> None:
    while True:
        for plan in plans:
            plan.save(path)


def test_a_plan_file_is_whole_whenever_its_writer_is_killed(plans: tuple[sc.Plan, sc.Plan], tmp_path: Path) -> None:
    path, draw, tally = tmp_path / "plan.json", random.Random(0), BOOK.of("kill -9 during save")
    plans[0].save(path)
    for _ in range(KILLS):
        killed_after(lambda: forever(plans, path), draw.uniform(0.0, 0.05))
        tally.keep(tally.attempt(sc.Plan.load, path) in plans)
    plans[1].save(path)
    tally.keep(sc.Plan.load(path) == plans[1], "what a killed writer left stands in nobody's way")


def table(path: Path | None = None) -> sc.Comparison:
    graphs = [uniform_chain(layers) for layers in range(2, 12)]
    return sc.compare(graphs, ["100%", "80%"], ["save-all", "greedy", "recompute-all"], path=path)


def test_a_table_loses_no_row_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path, draw, tally = tmp_path / "rows.jsonl", random.Random(1), BOOK.of("kill -9 during compare")
    whole = table()  # and what is compiled is compiled
    known: tuple[object, ...] = ()
    kills = 0
    while len(known) < len(whole) and kills < 10 * KILLS:
        kills += 1
        killed_after(lambda: table(path), draw.uniform(0.0, 0.06))
        if path.exists():
            rows = tally.attempt(sc.Comparison.load, path).rows
            tally.keep(rows[: len(known)] == known, "a row that was on disk is gone or changed")
            known = rows
    assert kills > 3
    resumed = table(path)
    answers = [(row.key, row.status, row.time, row.peak_bytes) for row in whole]
    tally.keep([(row.key, row.status, row.time, row.peak_bytes) for row in resumed] == answers)
    tally.keep(len(sc.Comparison.load(path)) == len(whole), "no row stands twice")


FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)


@pytest.mark.parametrize("step", ["os.open", "os.fsync", "os.replace"])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda number: errno.errorcode[number])
def test_a_file_stays_as_it_was_whichever_step_of_a_save_fails(
    step: str, failure: int, plans: tuple[sc.Plan, sc.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(failure, os.strerror(failure))

    path, tally = tmp_path / "plan.json", BOOK.of("disk full or read-only")
    plans[0].save(path)
    monkeypatch.setattr(step, fail)
    tally.tried += 1
    with pytest.raises(OSError, match=os.strerror(failure)):
        plans[1].save(path)
    monkeypatch.undo()
    tally.keep(sc.Plan.load(path) == plans[0])
    tally.keep(os.listdir(tmp_path) == ["plan.json"], "nothing is left beside it")


def limit_files(size_bytes: int) -> None:
    """Let no file of this process grow beyond a size: a disk that is full at that byte."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("write", ["plan", "graph", "csv"])
def test_a_disk_that_is_full_at_any_byte_leaves_the_old_file(
    write: str, plans: tuple[sc.Plan, sc.Plan], tmp_path: Path
) -> None:
    path, tally = tmp_path / "file", BOOK.of("disk full or read-only")
    rows = table() if write == "csv" else None

    def save() -> None:
        if rows is not None:
            rows.to_csv(path)
        elif write == "plan":
            plans[0].save(path)
        else:
            write_graph(plans[0].graph, path)

    save()
    old = path.read_bytes()
    draw = random.Random(2)
    for size_bytes in (0, 1, len(old) - 1, *(draw.randrange(len(old)) for _ in range(20))):

        def save_in_vain(size_bytes: int = size_bytes) -> None:
            limit_files(size_bytes)
            with pytest.raises(OSError, match="too large"):
                save()

        tally.tried += 1
        in_child(save_in_vain)
        tally.keep(path.read_bytes() == old)
        tally.keep(os.listdir(tmp_path) == ["file"], "nothing is left beside it")


def test_a_disk_that_is_full_at_any_byte_costs_a_table_only_the_row_that_did_not_fit(tmp_path: Path) -> None:
    path, tally = tmp_path / "rows.jsonl", BOOK.of("disk full or read-only")
    whole = table(path)
    content = path.read_bytes()
    draw = random.Random(3)
    # Seconds have more digits or fewer from run to run: the last tenth may not be reached.
    for size_bytes in (0, 1, *(draw.randrange(len(content) * 9 // 10) for _ in range(20))):
        path.unlink()

        def fill_the_disk(size_bytes: int = size_bytes) -> None:
            limit_files(size_bytes)
            with pytest.raises(OSError, match="too large"):
                table(path)

        tally.tried += 1
        in_child(fill_the_disk)
        tally.keep(len(read_entries(path).values) >= size_bytes // 1200, "rows that fitted are there")
        tally.keep(len(table(path)) == len(whole))
        tally.keep(len(sc.Comparison.load(path)) == len(whole), "no row stands twice")


def test_a_journal_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    path, tally = tmp_path / "rows.jsonl", BOOK.of("disk full or read-only")

    def fill_and_go_on() -> None:
        with Journal(path) as journal:
            journal.append({"row": 1})
            limit_files(path.stat().st_size + 5)
            with pytest.raises(OSError, match="too large"):
                journal.append({"row": 2, "long": "x" * 100_000})
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            journal.append({"row": 3})

    tally.tried += 1
    in_child(fill_and_go_on)
    tally.keep(read_entries(path).values == ({"row": 1}, {"row": 3}))


def test_writers_of_one_file_leave_it_whole_at_every_moment(plans: tuple[sc.Plan, sc.Plan], tmp_path: Path) -> None:
    path, tally = tmp_path / "plan.json", BOOK.of("many writers at once")
    plans[0].save(path)

    def write() -> None:
        for number in range(ROUNDS):
            plans[number % 2].save(path)

    writers = [child(write) for _ in range(WRITERS)]
    while writers:
        tally.keep(tally.attempt(sc.Plan.load, path) in plans)
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended:
            assert status == 0
            writers.remove(ended)
    tally.keep(os.listdir(tmp_path) == ["plan.json"])


def test_of_many_sweeps_with_one_table_one_writes_and_the_others_are_refused(tmp_path: Path) -> None:
    path, tally = tmp_path / "rows.jsonl", BOOK.of("many writers at once")

    def sweep_or_be_refused() -> None:
        for _ in range(5):
            with suppress(InvalidOptionError):  # another process is writing
                table(path)

    sweeps = [child(sweep_or_be_refused) for _ in range(WRITERS)]
    tally.tried += len(sweeps)
    for pid in sweeps:
        tally.keep(os.waitpid(pid, 0)[1] == 0)
    tally.keep(len(table(path)) == len(sc.Comparison.load(path)), "no row stands twice")


UNWRITABLE = ["/dev/null/out.json", "/proc/out.json", "/no such folder/out.json", "/"]


@pytest.mark.parametrize("path", UNWRITABLE)
@pytest.mark.parametrize(
    "command",
    [
        ["plan", "GRAPH", "--budget", "80%", "--output"],
        ["export", "PLAN", "--output"],
        ["report", "PLAN", "--output"],
        ["frontier", "GRAPH", "--csv"],
        ["compare", "GRAPH", "--output"],
        ["trace", "gpt2", "--output"],
        ["train", "gpt2", "--budget", "80%", "--output"],
        ["max-batch", "gpt2", "--budget", "1GiB", "--output"],
    ],
    ids=lambda command: command[0],
)
def test_a_path_that_cannot_be_written_is_refused_before_the_work(
    command: list[str], path: str, plans: tuple[sc.Plan, sc.Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tally = BOOK.of("disk full or read-only")
    plans[0].save(tmp_path / "plan.json")
    sc.write_graph(plans[0].graph, tmp_path / "graph.json")
    names = {"GRAPH": str(tmp_path / "graph.json"), "PLAN": str(tmp_path / "plan.json")}
    code = tally.attempt(main, [*(names.get(word, word) for word in command), path])
    printed = capsys.readouterr()
    tally.accept(code == 2, (code, printed))
    assert printed.out == ""
    assert path in printed.err
    assert not any(word in printed.err for word in ("planning", "tracing", "solving"))


def test_an_answer_that_standard_output_cannot_take_is_an_error(tmp_path: Path) -> None:
    write_graph(conv_net(2), tmp_path / "graph.json")
    command = [sys.executable, "-m", "scheduler", "plan", str(tmp_path / "graph.json"), "--budget", "100%"]
    tally = BOOK.of("disk full or read-only")
    tally.tried += 1
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    tally.keep(ran.returncode != 0)
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
