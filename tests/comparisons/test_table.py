"""Comparisons: one correct row per case, wherever it ran, and no finished row is lost."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from multiprocessing import get_context
from pathlib import Path
from threading import Thread
from types import ModuleType

import pytest

import scheduler as sc
from scheduler.comparisons.journal import Journal
from scheduler.comparisons.sweep import _warm_up
from scheduler.comparisons.table import Row
from scheduler.errors import InvalidBudgetError, InvalidOptionError, MissingExtraError, UnknownSolverError
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.registry import MODULES
from tests.support.fake_clock import FakeClock
from tests.support.oracle import optimum
from tests.support.paths import ROOT
from tests.support.training_graphs import conv_net, uniform_chain

BUDGETS = ["100%", "80%", "60%", "50%", "40%"]
SOLVERS = ["save-all", "recompute-all", "greedy", "ilp"]


def sweep(**options: object) -> sc.Comparison:
    """Run 200 cases with solvers that draw no random numbers and take milliseconds."""
    graphs = {str(seed): sc.zoo.random_layered(9, seed=seed) for seed in range(10)}
    return sc.compare(graphs, BUDGETS, SOLVERS, time_limit=20.0, **options)


def facts(comparison: sc.Comparison) -> list[Row]:
    return [replace(row, seconds=0.0) for row in comparison]


def small(**options: object) -> sc.Comparison:
    return sc.compare([uniform_chain(3), conv_net(1)], ["100%", "80%"], ["save-all", "ilp"], **options)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A registered solver module; each test gives it a `propose`."""
    module = ModuleType("toy_solver")
    monkeypatch.setitem(sys.modules, "toy_solver", module)
    monkeypatch.setitem(MODULES, "toy", "toy_solver")
    return module


def test_a_row_holds_the_case_and_the_answer() -> None:
    # By hand: 3 * 1 + 3 * 2 seconds; the loss runs while x0 to x3 and g3 are live, of 4 bytes each; x0 is resident.
    graph = uniform_chain(3)
    peak = 4 * 5
    (row,) = sc.compare([graph], ["80%"], ["ilp"], seed=3, time_limit=30, reorder=False)
    assert (row.graph, row.graph_digest, row.operations) == ("uniform chain of 3", graph.digest, 7)
    assert (row.resident_bytes, row.baseline_peak_bytes, row.baseline_time, row.time_unit) == (4, peak, 9.0, "s")
    assert (row.budget, row.budget_bytes) == ("80%", 4 + 16 * 80 // 100)
    assert (row.solver, row.reorder, row.seed, row.time_limit) == ("ilp", False, 3, 30.0)
    best = optimum(graph.to_dict(), row.budget_bytes, "input order")
    assert best is not None
    assert (row.status, row.time, row.bound, row.gap) == ("OPTIMAL", best, best, 0.0)
    assert row.overhead == pytest.approx(best / 9.0 - 1)
    assert row.peak_bytes <= row.budget_bytes
    assert row.seconds > 0
    assert f"{os.cpu_count()} cores" in row.machine


def test_rows_are_ordered_by_graph_then_budget_then_solver() -> None:
    rows = small().rows
    names = ["uniform chain of 3", "graph 2"]
    assert [(row.graph, row.budget, row.solver) for row in rows] == [
        (name, budget, solver) for name in names for budget in ["100%", "80%"] for solver in ["save-all", "ilp"]
    ]
    assert [row.overhead == 0 for row in rows if row.budget == "100%"] == [True] * 4
    assert [row.time for row in rows if (row.solver, row.budget) == ("save-all", "80%")] == [None, None]


def test_a_solver_that_does_not_solve_a_graph_gets_an_unsuitable_row() -> None:
    graph_row, chain_row = sc.compare(
        {"graph": conv_net(1), "chain": sc.Chain([sc.Layer("l", 1.0, 2.0, 4, 8)], input_bytes=4)}, ["100%"], ["dp"]
    )
    assert (graph_row.status, graph_row.time, graph_row.bound, graph_row.gap) == ("unsuitable", None, None, None)
    assert "chains of layers" in graph_row.reason
    assert (chain_row.status, chain_row.overhead) == ("OPTIMAL", 0.0)


def test_a_chain_and_the_graph_that_it_is_lowered_to_are_two_cases(tmp_path: Path) -> None:
    chain = sc.Chain([sc.Layer("l", 1.0, 2.0, 4, 8)], input_bytes=4)
    rows = sc.compare([chain, chain.graph], ["100%"], ["dp"], path=tmp_path / "rows")
    assert [row.status for row in rows] == ["OPTIMAL", "unsuitable"]


def test_budgets_of_the_same_bytes_run_once_and_have_a_row_each() -> None:
    seen = []
    rows = sc.compare(
        [uniform_chain(3)], ["100%", 20], ["save-all"], progress=lambda *arguments: seen.append(arguments)
    ).rows
    assert [row.budget for row in rows] == ["100%", "20"]
    assert [(done, total) for done, total, _ in seen] == [(1, 1)]


def test_cases_in_the_file_are_not_run_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first = small(path=path)
    written = path.read_bytes()
    ran: list[Row] = []
    again = small(path=path, progress=lambda done, total, row: ran.append(row))
    assert (again, ran, path.read_bytes()) == (first, [], written)
    more = sc.compare(
        {"renamed": uniform_chain(3)},
        ["100%"],
        ["ilp", "greedy"],
        path=path,
        progress=lambda done, total, row: ran.append(row),
    )
    assert [row.solver for row in ran] == ["greedy"]
    assert [row.graph for row in more] == ["renamed", "renamed"]
    assert len(sc.Comparison.load(path)) == len(first) + 1


def test_a_row_is_synced_before_the_next_case_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, synced, seen = tmp_path / "rows.jsonl", [], []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(path.read_bytes().count(b"\n")))
    small(path=path, progress=lambda done, total, row: seen.append((done, synced[-1])))
    assert seen == [(done, done) for done in range(1, 9)]


@pytest.mark.parametrize("other", [{"seed": 1}, {"reorder": False}, {"time_limit": 59.0}, {"budgets": ["90%"]}])
def test_a_case_that_differs_in_any_option_is_run(tmp_path: Path, other: dict[str, object]) -> None:
    path, ran = tmp_path / "rows.jsonl", []
    asked = {"graphs": [uniform_chain(3)], "budgets": ["100%"], "solvers": ["save-all"], "path": path}
    sc.compare(**asked)
    sc.compare(**asked | other, progress=lambda done, total, row: ran.append(row))
    assert len(ran) == 1


def test_rows_of_another_version_are_kept_and_their_cases_run_again(tmp_path: Path) -> None:
    path, ran = tmp_path / "rows.jsonl", []
    (row,) = sc.compare([uniform_chain(3)], ["100%"], ["save-all"], path=path)
    path.write_text(json.dumps(asdict(replace(row, version="0.0.1"))) + "\n")
    sc.compare([uniform_chain(3)], ["100%"], ["save-all"], path=path, progress=lambda done, total, row: ran.append(row))
    assert len(ran) == 1
    assert [kept.version for kept in sc.Comparison.load(path)] == ["0.0.1", row.version]


KILLED = """
import os, signal, sys
from tests.comparisons.test_table import sweep

def die_half_way(done, total, row):
    assert total == 200
    if done == 100:
        os.kill(os.getpid(), signal.SIGKILL)

sweep(path=sys.argv[1], progress=die_half_way)
"""


def test_a_comparison_killed_half_way_and_resumed_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    path, ran = tmp_path / "rows.jsonl", []
    killed = subprocess.run([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes().count(b"\n") == 100
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[0][:300])  # killed while it wrote a row
    resumed = sweep(path=path, progress=lambda done, total, row: ran.append(row))
    assert len(ran) == 100
    assert facts(resumed) == facts(sweep())
    assert len(resumed) == 200
    assert resumed.missing == 0
    assert sorted(facts(sc.Comparison.load(path)), key=repr) == sorted(facts(resumed), key=repr)


def test_wherever_the_last_line_was_cut_the_table_becomes_complete_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    table = small(path=path)
    *first, last = path.read_bytes().splitlines(keepends=True)
    for length in (1, 2, 20, len(last) - 3, len(last) - 2):
        path.write_bytes(b"".join(first) + last[:length])
        assert len(sc.Comparison.load(path)) == len(first)
        assert facts(small(path=path)) == facts(table)
        assert len(sc.Comparison.load(path)) == len(first) + 1
        assert path.read_bytes().startswith(b"".join(first))


@pytest.mark.parametrize(
    "content",
    ["graph,budget\n", "a note", "{}\n", '{"a": 1}', '{\n "a": 1\n}', '[1]\n{"half', "\xff\n"],
)
def test_a_file_that_is_not_a_table_is_rejected_and_left_unchanged(tmp_path: Path, content: str) -> None:
    path = tmp_path / "precious"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidOptionError, match=r"precious.*(new|another)"):
        small(path=path)
    assert path.read_bytes() == content.encode("latin-1")


def test_a_row_with_a_value_of_the_wrong_type_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    (row,) = sc.compare([uniform_chain(3)], ["100%"], ["save-all"], path=path)
    path.write_text(json.dumps(asdict(row) | {"peak_bytes": "20"}) + "\n")
    with pytest.raises(InvalidOptionError, match=r"line 1: .*'peak_bytes'"):
        sc.Comparison.load(path)


def test_a_second_writer_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = tmp_path / "rows.jsonl"
    with Journal(path), pytest.raises(InvalidOptionError, match="another process is writing"):
        small(path=path)
    assert small(path=path).missing == 0


def test_processes_and_threads_give_the_table_of_one_process(tmp_path: Path) -> None:
    here = facts(small())
    with ThreadPoolExecutor(2) as threads:
        assert facts(small(executor=threads)) == here
    with ProcessPoolExecutor(2, get_context("spawn")) as processes:
        assert facts(small(executor=processes, path=tmp_path / "rows.jsonl")) == here
    assert facts(small(path=tmp_path / "rows.jsonl")) == here


def test_a_dask_cluster_gives_the_table_of_one_process() -> None:
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        distributed.Client(cluster) as client,
        client.get_executor() as executor,
    ):
        assert facts(small(executor=executor)) == facts(small())


def interrupt_at(number: int) -> object:
    def progress(done: int, total: int, row: Row) -> None:
        if done == number:
            signal.raise_signal(signal.SIGINT)

    return progress


def test_an_interrupt_keeps_the_finished_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    stopped = small(path=path, progress=interrupt_at(3))
    assert (len(stopped), stopped.missing) == (3, 5)
    assert facts(sc.Comparison.load(path)) == facts(stopped)
    assert facts(stopped) == facts(small())[:3]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(small(path=path)) == 8


def test_an_interrupt_cancels_the_cases_that_wait_on_an_executor(toy: ModuleType) -> None:
    ran: list[int] = []
    futures: list[Future[Row]] = []

    class Recording(ThreadPoolExecutor):
        def submit(self, function, /, *arguments):  # type: ignore[no-untyped-def]
            futures.append(super().submit(function, *arguments))
            return futures[-1]

    def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        ran.append(problem.budget_bytes)
        # The tenth case lasts until the sweep cancels those behind it, which it does after the third.
        for _ in range(6000 if len(ran) == 10 else 0):
            if any(future.cancelled() for future in futures):
                break
            time.sleep(0.01)
        return Proposal(problem.save_everything, "input order", bound=1.0)

    toy.propose = propose
    with Recording(1) as executor:
        stopped = sc.compare([uniform_chain(3)], range(20, 70), ["toy"], executor=executor, progress=interrupt_at(3))
    assert 3 <= len(stopped) <= len(ran) < 50
    assert len(stopped) + stopped.missing == 50


class InterruptedPool(Executor):
    """An executor whose workers die at Ctrl-C, as foreground processes of a terminal do."""

    def __init__(self, cases: int) -> None:
        self.cases, self.futures = cases, []

    def submit(self, function, /, *arguments):  # type: ignore[no-untyped-def]
        self.futures.append(Future())
        self.futures[-1].set_running_or_notify_cancel()
        if len(self.futures) == self.cases:
            self.thread = Thread(target=self.interrupt)
            self.thread.start()
        return self.futures[-1]

    def interrupt(self) -> None:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        for future in self.futures:
            future.set_exception(BrokenExecutor("a worker was killed"))


def test_workers_killed_by_the_interrupt_are_not_an_error() -> None:
    pool = InterruptedPool(8)
    stopped = small(executor=pool)
    pool.thread.join()
    assert (len(stopped), stopped.missing) == (0, 8)


def test_a_search_cut_short_by_an_interrupt_has_no_row(toy: ModuleType, tmp_path: Path) -> None:
    def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        signal.raise_signal(signal.SIGINT)
        assert deadline.stopped
        return Proposal(problem.save_everything, "input order", bound=1.0)

    toy.propose = propose
    path = tmp_path / "rows.jsonl"
    stopped = sc.compare([uniform_chain(3)], ["100%"], ["save-all", "toy", "ilp"], path=path)
    assert [row.solver for row in stopped] == ["save-all"]
    assert stopped.missing == 2
    assert len(sc.Comparison.load(path)) == 1


@pytest.mark.parametrize(
    ("error", "status"), [(RuntimeError("no luck"), "failed"), (MissingExtraError("no luck"), "not installed")]
)
def test_a_solver_that_fails_has_a_row_and_is_tried_again(
    toy: ModuleType, tmp_path: Path, error: Exception, status: str
) -> None:
    def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        raise error

    toy.propose = propose
    path = tmp_path / "rows.jsonl"
    row, after = sc.compare([uniform_chain(3)], ["100%"], ["toy", "save-all"], path=path)
    assert (row.status, after.status) == (status, "OPTIMAL")
    assert row.reason.endswith("no luck")
    toy.propose = lambda problem, *, deadline, seed: Proposal(problem.save_everything, "input order")
    row, _ = sc.compare([uniform_chain(3)], ["100%"], ["toy", "save-all"], path=path)
    assert (row.status, row.overhead) == ("OPTIMAL", 0.0)


class DyingPool(ThreadPoolExecutor):
    """An executor that runs two cases and dies at the third."""

    submitted = 0

    def submit(self, function, /, *arguments):  # type: ignore[no-untyped-def]
        self.submitted += 1
        return super().submit(function if self.submitted <= 2 else die, *arguments)


def die(case: object) -> Row:
    raise BrokenExecutor("a worker was killed")


def test_the_first_use_of_a_solver_is_not_counted_in_its_time(toy: ModuleType) -> None:
    calls: list[int] = []

    def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
        if not calls:
            fake.advance(100.0)
        calls.append(problem.budget_bytes)
        return Proposal(problem.save_everything, "input order", bound=1.0)

    toy.propose = propose
    _warm_up.cache_clear()
    with FakeClock() as fake:
        row, again = sc.compare([uniform_chain(3)], ["100%", "90%"], ["toy"])
    assert row.seconds == 0
    assert calls[-2:] == [row.budget_bytes, again.budget_bytes]


def test_a_dead_worker_is_an_error_and_its_cases_are_run_later(tmp_path: Path) -> None:
    path, ran = tmp_path / "rows.jsonl", []
    with DyingPool(1) as pool, pytest.raises(BrokenExecutor, match="a worker was killed"):
        small(executor=pool, path=path)
    kept = len(sc.Comparison.load(path))
    assert kept <= 2
    assert facts(small(path=path, progress=lambda done, total, row: ran.append(row))) == facts(small())
    assert len(ran) == 8 - kept


def test_csv_json_and_pandas_hold_the_same_table(tmp_path: Path) -> None:
    table = small()
    head = [field.name for field in fields(Row)]
    table.to_csv(tmp_path / "table.csv")
    table.to_json(tmp_path / "table.json")
    with (tmp_path / "table.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == head
    assert read == [{name: "" if value is None else str(value) for name, value in asdict(row).items()} for row in table]
    assert json.loads((tmp_path / "table.json").read_text()) == table.to_dicts()
    pandas = pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert list(frame.columns) == head
    assert frame["peak_bytes"].isna().tolist() == [row.peak_bytes is None for row in table]
    assert frame["solver"].tolist() == [row.solver for row in table]
    assert isinstance(frame, pandas.DataFrame)


def test_without_pandas_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"checkpoint-scheduler\[tables\]"):
        sc.Comparison(()).to_pandas()


def test_the_markdown_table_has_a_line_per_graph_and_budget_and_a_column_per_solver(tmp_path: Path) -> None:
    (row,) = sc.compare({"a|b": uniform_chain(3)}, ["100%"], ["save-all"])
    asked = replace(row, baseline_time=10.0, overhead=None, global_bound=None)
    large, small = (replace(asked, budget=f"{size}%", budget_bytes=size) for size in (90, 50))
    rows = [
        replace(large, solver="good", status="OPTIMAL", overhead=0.125, global_bound=11.0),
        replace(large, solver="none", status="UNKNOWN", global_bound=10.0),
        replace(large, solver="dp", status="unsuitable"),
        replace(small, solver="good", status="FEASIBLE", overhead=0.5, global_bound=10.5),
        replace(small, solver="none", status="failed"),
        replace(replace(small, graph="c", graph_digest="c"), solver="none", status="INFEASIBLE", global_bound=10.0),
    ]
    sc.Comparison(tuple(rows)).to_markdown(tmp_path / "table.md")
    # What is proven at 90 %, 11 of 10 seconds, holds at 50 %.
    assert (tmp_path / "table.md").read_text().splitlines() == [
        "| graph | budget | good | none | dp | bound |",
        "| --- | --- | --- | --- | --- | --- |",
        "| a\\|b | 90% | 12.50%* | - |  | 10.00% |",
        "| a\\|b | 50% | 50.00% | failed |  | 10.00% |",
        "| c | 50% |  | -* |  | - |",
    ]


def test_a_comparison_is_shown_in_one_line_and_its_overheads_as_text_and_html() -> None:
    # Saving everything takes 20 bytes, and 16 of these (75 %) cost one more forward: 10 s instead of 9 s.
    table = sc.compare({"a<b": uniform_chain(3)}, ["100%", "75%"], ["save-all", "ilp"])
    assert repr(table) == "Comparison(4 rows, graphs=1, solvers=2, missing=0)"
    assert table.summary().splitlines() == [
        "graph  budget  save-all  ilp      bound",
        "a<b    100%    0.00%*    0.00%*   0.00%",
        "a<b    75%     -         11.11%*  11.11%",
    ]
    assert "<tr><td>a&lt;b</td><td>75%</td><td>-</td><td>11.11%*</td><td>11.11%</td></tr>" in table._repr_html_()


def test_a_frontier_becomes_a_table() -> None:
    graph = uniform_chain(4)
    frontier = sc.frontier(graph, ["100%", "80%"], solver="ilp")
    table = sc.Comparison.of_frontier(frontier, graph, name="four")
    assert [row.overhead for row in table] == [row.overhead for row in frontier]
    assert [row.budget_bytes for row in table] == [row.budget_bytes for row in frontier]
    assert {(row.graph, row.graph_digest, row.solver) for row in table} == {("four", graph.digest, "ilp")}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"solvers": ["save-all", "magic"]}, UnknownSolverError, r"magic.*save-all.*ilp.*auto"),
        ({"budgets": ["100%", "8G"]}, InvalidBudgetError, "8G"),
        ({"graphs": []}, InvalidOptionError, "graphs must be a sequence of at least one"),
        ({"graphs": uniform_chain(3)}, InvalidOptionError, "graphs must be a sequence"),
        ({"graphs": ["graph.json"]}, InvalidOptionError, "a Graph or a Chain, got str"),
        ({"budgets": []}, InvalidOptionError, "budgets must be a sequence of at least one"),
        ({"budgets": "60%"}, InvalidOptionError, "budgets must be a sequence"),
        ({"solvers": ()}, InvalidOptionError, "solvers must be a sequence of at least one"),
        ({"solvers": "ilp"}, InvalidOptionError, "solvers must be a sequence"),
        ({"time_limit": 0}, InvalidOptionError, "above 0"),
        ({"seed": -1}, InvalidOptionError, "seed"),
        ({"reorder": "alphabetic"}, InvalidOptionError, "alphabetic"),
    ],
)
def test_bad_options_are_rejected_before_anything_runs(
    tmp_path: Path, options: dict[str, object], error: type[Exception], says: str
) -> None:
    ran: list[Row] = []
    asked = {"graphs": [uniform_chain(3)], "budgets": ["100%"], "solvers": ["save-all"], **options}
    with pytest.raises(error, match=says):
        sc.compare(**asked, path=tmp_path / "rows", progress=lambda done, total, row: ran.append(row))
    assert ran == []
    assert not (tmp_path / "rows").exists()


def test_a_path_that_cannot_be_written_is_rejected_before_anything_runs(tmp_path: Path) -> None:
    ran: list[Row] = []
    for path in (tmp_path, tmp_path / "none" / "rows.jsonl"):
        with pytest.raises(OSError, match=str(path)):
            small(path=path, progress=lambda done, total, row: ran.append(row))
    assert ran == []
