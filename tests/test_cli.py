"""The command line: answers on stdout, progress on stderr, exit codes that mean something."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import scheduler as sc
from scheduler.cli import main
from tests.training_graphs import conv_net, uniform_chain


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    sc.write_graph(conv_net(3), tmp_path / "graph.json")
    return str(tmp_path / "graph.json")


def test_plan_show_and_verify_tell_one_story(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = str(tmp_path / "plan.json")
    assert main(["plan", graph_file, "--budget", "80%", "-o", plan_file, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    plan = sc.Plan.load(plan_file)
    assert planned["plan"] == plan_file
    assert (planned["status"], planned["peak_bytes"], planned["time"]) == (plan.status.name, plan.peak_bytes, plan.time)
    assert main(["show", plan_file, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["saved"] == list(plan.saved)
    assert sum(shown["recomputed"].values()) == sum(plan.simulation.recomputed.values())
    assert main(["verify", plan_file, "--graph", graph_file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verified"] is True


def test_the_answer_is_on_stdout_and_progress_on_stderr(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", graph_file, "--budget", "80%"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("status ")
    assert "planning" in printed.err
    assert "planning" not in printed.out


def test_a_graph_comes_from_standard_input(graph_file: str) -> None:
    command = [sys.executable, "-m", "scheduler", "plan", "-", "--budget", "100%", "--json"]
    text = Path(graph_file).read_text()
    printed = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed)["overhead"] == 0


def test_verify_exits_1_on_an_untrue_claim_and_on_another_graph(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    sc.make_plan(conv_net(3), "80%").save(plan_file)
    sc.write_graph(uniform_chain(4), tmp_path / "other.json")
    assert main(["verify", str(plan_file), "--graph", str(tmp_path / "other.json")]) == 1
    assert "PlanMismatchError" in capsys.readouterr().err
    data = json.loads(plan_file.read_text())
    data["claims"]["peak_bytes"] -= 1
    plan_file.write_text(json.dumps(data))
    assert main(["verify", str(plan_file)]) == 1
    assert "PlanClaimError: " in capsys.readouterr().err
    plan_file.write_text("{}")
    assert main(["verify", str(plan_file)]) == 2


def test_a_budget_that_is_proven_too_small_exits_1_and_writes_nothing(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    assert main(["plan", graph_file, "--budget", "1%", "-o", str(plan_file)]) == 1
    assert "BudgetTooSmallError: no schedule fits" in capsys.readouterr().err
    assert not plan_file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "GRAPH", "--budget", "8G"], 'write "8GiB"'),
        (["plan", "GRAPH", "--budget", "80%", "--solver", "magic"], "unknown solver"),
        (["plan", "none.json", "--budget", "80%"], "cannot read none.json"),
        (["plan", "GRAPH", "--budget", "80%", "-o", "none/plan.json"], "No such file"),
        (["plan", "GRAPH", "--budget", "80%", "--time-limit", "0"], "time_limit"),
        (["show", "GRAPH"], "not a plan"),
    ],
)
def test_bad_input_exits_2_with_a_message(
    graph_file: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([graph_file if entry == "GRAPH" else entry for entry in arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_torch_is_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["models"]) == 2
    assert 'pip install "checkpoint-scheduler[torch]"' in capsys.readouterr().err


def test_usage_errors_exit_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main(["plan"])
    assert caught.value.code == 2


def test_a_chain_file_is_planned_by_its_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain = sc.Chain([sc.Layer(f"l{i}", 1.0, 2.0, 4, 8) for i in range(6)], input_bytes=4)
    chain_file, plan_file = str(tmp_path / "chain.json"), str(tmp_path / "plan.json")
    sc.write_graph(chain, chain_file)
    assert main(["plan", chain_file, "--budget", "70%", "-o", plan_file, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["status"], planned["time"]) == ("OPTIMAL", sc.solve(chain, "70%", solver="chain").time)
    assert sc.Plan.load(plan_file).granularity == "layers"
    assert main(["verify", plan_file, "--graph", chain_file, "--json"]) == 0


def branching_model() -> tuple[object, tuple[object, ...]]:
    """A sequence that cannot be captured: one layer branches on a value."""
    import torch
    from torch import nn

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.square().mean() if x.sum() > 0 else x.abs().mean()

    layers = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), Branch()]
    return nn.Sequential(*layers), (torch.ones(200, 8),)


def test_a_model_that_cannot_be_captured_trains_by_its_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    model = f"{__name__}:branching_model"
    assert main(["trace", model, "-o", "graph.json"]) == 2
    assert 'granularity="layers"' in capsys.readouterr().err
    assert main(["trace", model, "--layers", "-o", "chain.json", "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert traced["layers"] == 6
    assert sc.read_graph("chain.json").digest == traced["digest"]
    assert main(["train", model, "--layers", "--budget", "90%", "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["measured_peak_bytes"] <= report["predicted_peak_bytes"] <= report["budget_bytes"]
    assert report["losses"] == report["baseline_losses"]


def test_a_model_that_is_no_sequence_has_no_layers_to_trace(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["trace", "unet", "--layers", "-o", "chain.json"]) == 2
    assert "not a sequence of layers" in capsys.readouterr().err
    assert not Path("chain.json").exists()
