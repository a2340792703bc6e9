from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import nn

from scheduler.pytorch import trace
from scheduler.pytorch.costs import kept_costs, timing
from scheduler.pytorch.costs.kept_costs import VARIABLE, Cost, costs_file, describe_file, keep_costs, read_costs
from scheduler.pytorch.costs.operators import _spread
from scheduler.pytorch.costs.progress import TracingProgress

COST = Cost(0.5, 0.25, 64)


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Keep costs in a file of the test."""
    found = tmp_path / "new" / "costs.json"
    monkeypatch.setenv(VARIABLE, str(found))
    return found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of calls of each measurement."""
    counts: list[int] = []
    times = timing.Trials.times

    def counted(trials: timing.Trials, seconds: float = 0.0, **options: object) -> list[timing.Timing | None]:
        found = times(trials, 0.0, **options)
        counts.append(len(found))
        return found

    monkeypatch.setattr(timing.Trials, "times", counted)
    return counts


def graph_of(width: int, **options: object) -> object:
    return trace(nn.Linear(width, 8), (torch.ones(2, width),), loss=torch.sum, **options)


def test_a_second_trace_measures_nothing_and_gives_the_same_graph(path: Path, measured: list[int]) -> None:
    assert graph_of(8) == graph_of(8)
    assert len(measured) == 1


def test_calls_that_are_not_known_are_measured(path: Path, measured: list[int]) -> None:
    graph_of(8)
    graph_of(16)
    assert 0 < measured[1] < measured[0]


def test_costs_are_measured_again_on_request_and_replaced(path: Path, measured: list[int]) -> None:
    graph_of(8)
    data = json.loads(path.read_text())
    data["costs"] = {key: [1000.0, 0.0, 7] for key in data["costs"]}
    path.write_text(json.dumps(data))
    assert max(operation.time for operation in graph_of(8).operations) == 1000.0
    again = graph_of(8, costs="measured-again")
    assert measured[0] == measured[1]
    assert max(operation.time for operation in again.operations) < 1000.0
    assert graph_of(8) == again


def test_workspaces_and_times_that_were_measured_apart_are_kept_together(path: Path, measured: list[int]) -> None:
    graph_of(8, costs="flops", workspaces=True)
    graph_of(8, workspaces=False)
    graph_of(8)
    assert len(measured) == 1


def test_costs_hold_only_under_the_conditions_of_their_measurement(path: Path) -> None:
    keep_costs({"call": COST}, "one thread")
    assert read_costs(["call", "other"], "one thread") == {"call": COST}
    assert read_costs(["call"], "two threads") == {}
    devices = [torch.device("cpu")]
    before = kept_costs.measuring_conditions(devices)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert kept_costs.measuring_conditions(devices) != before
    finally:
        torch.set_float32_matmul_precision(precision)
    assert kept_costs.measuring_conditions(devices) == before
    assert torch.__version__ in before


def test_the_file_is_bounded_and_drops_the_oldest_costs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_costs, "MAX_ENTRIES", 3)
    for name in "abcad":
        keep_costs({name: COST}, "")
    assert set(read_costs("abcd", "")) == {"a", "c", "d"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 1, "costs": []}',
        '{"format": 1, "costs": {"a": 1}}',
        '{"format": 1, "costs": {"a": [-1.0, 0.0, 0]}}',
        '{"format": 1, "costs": {"a": [1.0, "x", 0]}}',
        '{"format": 1, "costs": {"a": [1.0, 0.0, 1.5]}}',
        '{"format": 1, "costs": {"a": [NaN, 0.0, 0]}}',
    ],
)
def test_a_broken_file_is_ignored_with_a_warning_and_written_anew(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with pytest.warns(UserWarning, match="ignored and will be written anew"):
        assert read_costs(["call"], "") == {}
    with pytest.warns(UserWarning, match="ignored"):
        keep_costs({"call": COST}, "")
    assert read_costs(["call"], "") == {"call": COST}


def test_a_file_of_another_format_is_replaced_without_a_word(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"format": 0, "whatever": 1}')
    assert read_costs(["call"], "") == {}
    keep_costs({"call": COST}, "")
    assert read_costs(["call"], "") == {"call": COST}


def test_a_file_that_cannot_be_written_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/dev/null/costs.json")
    with pytest.warns(UserWarning, match=f"cannot be kept in /dev/null/costs.json.*{VARIABLE}"):
        keep_costs({"call": COST}, "")


def _keep(path: str, name: str) -> None:
    import os

    os.environ[VARIABLE] = path
    for number in range(20):
        keep_costs({f"{name}{number}": COST}, "")


def test_processes_that_write_at_the_same_time_leave_a_whole_file(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_keep, args=(str(path), name)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert read_costs(["a19", "b19"], "")
    assert [file.name for file in path.parent.iterdir()] == ["costs.json"]


def test_the_file_is_in_the_folder_for_caches_and_can_be_turned_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    assert costs_file() is None
    assert "nothing is kept" in describe_file()
    keep_costs({"call": COST}, "")
    assert read_costs(["call"], "") == {}
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert costs_file() == tmp_path / "checkpoint-scheduler" / "costs.json"
    assert describe_file() == f"{costs_file()}, not written yet"
    keep_costs({"call": COST}, "")
    assert describe_file() == f"{costs_file()}, {costs_file().stat().st_size} B"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert costs_file() == tmp_path / ".cache" / "checkpoint-scheduler" / "costs.json"


def test_progress_says_how_far_tracing_is_and_how_far_times_are_noise(path: Path) -> None:
    seen: list[TracingProgress] = []
    graph_of(8, progress=seen.append)
    assert [progress.stage for progress in seen[:2]] == ["capturing the step", "asking what the outputs of calls hold"]
    measuring = [progress for progress in seen if progress.stage.startswith("measuring ")]
    assert [progress.fraction for progress in measuring] == sorted(progress.fraction for progress in measuring)
    assert measuring[-1].fraction == 1.0
    assert seen[-1].spread is not None
    seen.clear()
    graph_of(8, progress=seen.append)
    assert seen[-1].stage.startswith("measured 0 of ")
    assert seen[-1].spread is not None


def test_the_spread_of_a_step_is_that_of_its_calls_by_their_time() -> None:
    # By hand: 1 s that scatters by 40 %, run three times, and 1 s that does not.
    known = {"a": Cost(1.0, 0.4, 0), "b": Cost(1.0, 0.0, 0), "c": Cost(None, 0.0, 0)}
    assert _spread(["a", "a", "b", "a", "c"], known) == pytest.approx(0.3)
