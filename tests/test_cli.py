"""The command line: answers on stdout, progress on stderr, and exit codes."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

import scheduler as sc
from scheduler.cli import _parser, main, training
from scheduler.graph.decisions import call_ranges
from scheduler.pytorch.costs.progress import TracingProgress
from tests.support.paths import ROOT
from tests.support.training_graphs import conv_net, uniform_chain


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    sc.write_graph(conv_net(3), tmp_path / "graph.json")
    return str(tmp_path / "graph.json")


def test_plan_show_and_verify_agree(graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert printed.out.startswith("granularity ")
    assert "%)" in next(line for line in printed.out.splitlines() if line.startswith("budget_bytes "))
    assert "smallest_peak_bytes" in printed.out
    assert "planning" in printed.err
    assert "planning" not in printed.out


def test_a_factory_is_found_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "own_model.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(2, 1), (torch.ones(3, 2),), {}, torch.sum\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    assert main(["trace", "own_model:make", "--costs", "flops", "-o", "graph.json"]) == 0
    assert "operations" in capsys.readouterr().out
    assert main(["plan", "graph.json", "--budget", "min"]) == 0
    assert capsys.readouterr().out.startswith("model ")


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


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_on_a_terminal_and_noise_everywhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    training.show(TracingProgress("measuring 7 calls", 0.25, 1.5))
    shown = capsys.readouterr().err
    assert shown == ("\r\x1b[Kmeasuring 7 calls: 25%, 1.5 s" if is_terminal else "")
    training.show(TracingProgress("measured 7 of 9 calls", 1.0, spread=0.3))
    assert "measured times are noise: repeated runs take 30% more" in capsys.readouterr().err
    training.show(TracingProgress("measured 7 of 9 calls", 1.0, spread=0.05))
    assert capsys.readouterr().err == ("\r\x1b[K" if is_terminal else "")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_progress_of_a_search_is_shown_on_a_terminal(
    is_terminal: bool, graph_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert main(["plan", graph_file, "--budget", "80%", "--gap", "0.5"]) == 0
    shown = capsys.readouterr().err
    assert ("\x1b[Ksearching: " in shown) == is_terminal
    assert ", gap " in shown or not is_terminal
    assert not is_terminal or shown.endswith("\x1b[K")


def test_a_gap_is_given_on_the_command_line(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Training ends a search within half a percent of the optimum; a plan alone is searched to the end.
    for command, gap in ((["train", "gpt2", "--budget", "60%"], 0.005), (["plan", "g.json", "--budget", "60%"], 0.0)):
        assert _parser().parse_args(command).gap == gap
        assert _parser().parse_args([*command, "--gap", "0.02"]).gap == 0.02
    assert main(["plan", graph_file, "--budget", "80%", "--gap", "1"]) == 2
    assert "gap must be a number >= 0 and < 1" in capsys.readouterr().err


def test_costs_are_measured_again_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (([], "measured"), (["--measure-again"], "measured-again")):
        options = _parser().parse_args(["trace", "gpt2", "-o", "graph.json", *arguments])
        assert options.costs == expected
    with pytest.raises(SystemExit):
        _parser().parse_args(["trace", "gpt2", "-o", "graph.json", "--costs", "flops", "--measure-again"])
    assert "not allowed with argument --costs" in capsys.readouterr().err


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
    assert (planned["status"], planned["time"]) == ("OPTIMAL", sc.solve(chain, "70%", solver="dp").time)
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
    assert 'granularity="modules"' in capsys.readouterr().err
    assert main(["trace", model, "--granularity", "layers", "-o", "chain.json", "--json"]) == 0
    traced = json.loads(capsys.readouterr().out)
    assert traced["layers"] == 6
    assert sc.read_graph("chain.json").graph.digest == traced["digest"]
    assert main(["train", model, "--granularity", "layers", "--budget", "90%", "--steps", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    predicted, measured = report["predicted_peaks"], report["measured_peaks"]
    assert measured["live_bytes"] <= predicted["live_bytes"] <= report["budget_bytes"]
    assert predicted["allocator_bytes"] is None
    assert report["losses"] == report["plain_losses"]
    assert report["verification"] == {"is_equal": True, "gradients": 6, "buffers": 0, "first": "", "differences": []}


def test_a_model_that_is_not_a_sequence_has_no_layers_to_trace(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["trace", "unet", "--granularity", "layers", "-o", "chain.json"]) == 2
    assert "not a sequence of layers" in capsys.readouterr().err
    assert not Path("chain.json").exists()


def test_a_step_is_traced_for_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = str(tmp_path / "graph.json")
    assert main(["trace", "convnet", "--device", "h100-80gb", "-o", path]) == 0
    printed = capsys.readouterr().out
    assert "s, estimated for H100 SXM 80 GB" in printed
    assert "times are estimated for H100 SXM 80 GB: 70% of its peak" in printed
    assert sc.read_graph(path).time_unit == "s, estimated for H100 SXM 80 GB"
    assert main(["trace", "convnet", "--device", "l40s", "--granularity", "layers", "-o", path]) == 2
    assert "layers are measured on this machine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["trace", "convnet", "--device", "h100", "-o", path])
    assert 'unknown device "h100": did you mean h100-80gb or h100-pcie-80gb' in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_graph_file_holds_no_step_by_modules(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["trace", "unet", "--granularity", "modules", "-o", "graph.json"]) == 2
    assert "scheduler train unet --granularity modules" in capsys.readouterr().err
    assert not Path("graph.json").exists()


def nested_model() -> tuple[object, tuple[object, ...]]:
    """A model that is no sequence and cannot be captured: its blocks branch on a value."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 1e6 else x + self.inner(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    return Model(), (torch.ones(200, 16),)


@pytest.mark.filterwarnings("always")
def test_a_model_that_cannot_be_captured_trains_by_modules_and_is_shown_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"{__name__}:nested_model", "--budget", "min", "--steps", "2", "-o", "plan.json"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("this step is planned by modules, because it cannot be planned by operations") == 1
    plan = sc.Plan.load("plan.json")
    assert plan.granularity == "modules"
    # The model, its blocks, and in each block the sequence with its three modules.
    assert f"Model: 21 calls of modules, {len(plan.decisions)} recomputed" in printed.out
    assert f"proof    {plan.status.name} in modules: " in printed.out
    assert "the planned step equals the plain one: loss, 16 gradients" in printed.out
    assert main(["show", "plan.json"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert sum(line.strip().startswith("recompute ") for line in shown) == len(call_ranges(plan.decisions))
    assert not any(line.startswith("           0 B") for line in shown)


def test_frontier_prints_and_writes_one_row_per_budget(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table_file = tmp_path / "frontier.csv"
    asked = ["frontier", graph_file, "--budgets", "100%,70%", "--solver", "ilp"]
    assert main([*asked, "--json", "--csv", str(table_file)]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out)
    expected = sc.frontier(conv_net(3), ["100%", "70%"], solver="ilp")
    assert [(row["budget_bytes"], row["status"], row["time"], row["bound"]) for row in rows] == [
        (row.budget_bytes, row.status.name, row.time, row.bound) for row in expected
    ]
    assert {row["graph"] for row in rows} == {"graph"}
    assert printed.err == "solving 2 budgets\n"
    with table_file.open(newline="") as file:
        assert [row["budget_bytes"] for row in csv.DictReader(file)] == [str(row.budget_bytes) for row in expected]
    assert main([*asked, "--table", str(tmp_path / "frontier.md")]) == 0
    assert (tmp_path / "frontier.md").read_text().splitlines()[-1].endswith("| 0.00%* | 0.00% |")
    head, smaller, larger = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["budget_bytes", "peak_bytes", "overhead"]
    assert larger.split()[2] == "0.000%"
    assert smaller.split()[0] == str(expected.rows[0].budget_bytes)


def test_a_frontier_below_the_floor_is_a_proven_no(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", graph_file, "--budgets", "1%,2%", "--solver", "ilp"]) == 1
    assert capsys.readouterr().out.count("INFEASIBLE") == 2


def test_compare_takes_folders_and_files_and_resumes(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "graphs"
    folder.mkdir()
    (folder / "README.md").write_text("no graph")
    sc.write_graph(uniform_chain(4), folder / "chain.json")
    asked = ["compare", str(folder), graph_file, "--budgets", "100%,80%", "--solvers", "save-all,ilp", "--json"]
    asked += ["--output", str(tmp_path / "rows.jsonl"), "--csv", str(tmp_path / "table.csv")]
    assert main(asked) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["graph"], row["budget"], row["solver"]) for row in rows] == [
        (graph, budget, solver)
        for graph in ["chain", "graph"]
        for budget in ["100%", "80%"]
        for solver in ["save-all", "ilp"]
    ]
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 9
    assert main([*asked, "--jobs", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == rows  # seconds too: nothing ran again


def test_compare_runs_cases_in_other_processes(graph_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", graph_file, "--budgets", "100%", "--solvers", "save-all,dp", "--jobs", "2"]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split()[:5] == ["graph", "budget", "solver", "status", "overhead"]
    assert first.split()[:5] == ["graph", "100%", "save-all", "OPTIMAL", "0.000%"]
    assert second.split()[:5] == ["graph", "100%", "dp", "unsuitable", "-"]


def test_graphs_of_the_zoo_are_compared_along_with_files(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["compare", graph_file, "zoo:all", "--solvers", "save-all", "--budgets", "100%", "--time-limit", "0.01"]
    assert main([*asked, "--json", "--table", str(tmp_path / "table.md")]) == 0
    names = ["graph", *(f"zoo:{name}" for name in sc.zoo.__all__)]
    rows = json.loads(capsys.readouterr().out)
    assert [row["graph"] for row in rows] == names
    assert {row["graph"]: row["graph_digest"] for row in rows}["zoo:unet"] == sc.zoo.unet().digest
    head, _, *lines = (tmp_path / "table.md").read_text().splitlines()
    assert head == "| graph | budget | save-all | bound |"
    assert [line.split(" | ")[0] for line in lines] == [f"| {name}" for name in names]


def test_a_graph_of_the_zoo_is_planned_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    asked = ["--budget", "60%", "--solver", "dp", "-o", plan]
    assert main(["plan", "zoo:uniform_chain", *asked]) == 0
    assert sc.Plan.load(plan).graph.digest == sc.zoo.uniform_chain().graph.digest
    assert main(["plan", "zoo:uniform_chain:layers=5,forward_time=0.5", *asked]) == 0
    assert sc.Plan.load(plan).graph.digest == sc.zoo.uniform_chain(5, forward_time=0.5).graph.digest
    assert "OPTIMAL" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C of a terminal reaches a group of processes")
def test_an_impatient_interrupt_ends_all_processes_and_keeps_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    budgets = ",".join(f"{share}%" for share in range(60, 100))
    command = [sys.executable, "-m", "scheduler", "compare", "zoo:unet", "--solvers", "ilp", "--budgets", budgets]
    command += ["--time-limit", "0.5", "--jobs", "2", "--output", str(path)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as sweep:
        while not (path.exists() and path.read_bytes()):
            assert sweep.poll() is None
            time.sleep(0.05)
        os.killpg(sweep.pid, signal.SIGINT)
        time.sleep(0.03)
        os.killpg(sweep.pid, signal.SIGINT)
        try:
            sweep.communicate(timeout=30)  # until all have closed their end of stderr
        except subprocess.TimeoutExpired:
            os.killpg(sweep.pid, signal.SIGKILL)
            raise
    assert sweep.returncode in (3, -signal.SIGINT)  # as the second came too late, or not
    assert 1 <= len(sc.Comparison.load(path)) < 40


INTERRUPTED = """
import time
from scheduler.__main__ import main
from scheduler.cli import sweeps

def interrupted(*arguments, executor, **options):
    executor.submit(time.sleep, 0.1)._condition.acquire()  # what Ctrl-C leaves that comes into `wait`
    raise KeyboardInterrupt

sweeps.compare, sweeps._SECONDS_TO_DROP = interrupted, 0.1
main()
"""


@pytest.mark.skipif(os.name != "posix", reason="the exit code is that of a signal")
def test_an_interrupt_that_leaves_a_lock_of_the_pool_taken_ends_all_processes() -> None:
    command = [sys.executable, "-c", INTERRUPTED, "compare", "zoo:unet", "--jobs", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert ended.returncode == -signal.SIGINT
    assert "Traceback" not in ended.stderr


def test_graph_files_of_one_name_are_told_apart_by_their_paths(
    graph_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    other = str(tmp_path / "other" / "graph.json")
    sc.write_graph(uniform_chain(4), other)
    assert main(["compare", graph_file, other, "--budgets", "100%", "--solvers", "save-all", "--json"]) == 0
    assert [row["graph"] for row in json.loads(capsys.readouterr().out)] == [graph_file, other]


def test_a_bar_is_drawn_on_a_terminal_only(graph_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["compare", graph_file, "--budgets", "100%", "--solvers", "save-all,greedy"]
    drawn = io.StringIO()
    monkeypatch.setattr(sys, "stderr", drawn)
    assert main(asked) == 0
    assert drawn.getvalue() == ""
    drawn.isatty = lambda: True  # type: ignore[method-assign]
    assert main(asked) == 0
    _, first, second = drawn.getvalue().split("\r")
    assert first.startswith("[" + "#" * 15 + "." * 15 + "] 1/2  graph 100% save-all")
    assert second.startswith("[" + "#" * 30 + "] 2/2  graph 100% greedy")
    assert second.endswith("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "GRAPH", "--solvers", "magic"], "known are save-all"),
        (["compare", "GRAPH", "--budgets", "8G"], 'write "8GiB"'),
        (["compare", "."], "no graph in ."),
        (["compare", "zoo:lion"], 'no graph "lion" in the zoo: the names are densenet'),
        (["plan", "zoo:", "--budget", "60%"], 'no graph "" in the zoo'),
        (["compare", "zoo:unet:deep=2"], "unexpected keyword argument 'deep'; write zoo:unet:NAME=NUMBER"),
        (["compare", "zoo:unet:depth"], "invalid literal for int"),
        (["compare", "zoo:unet:depth=0"], "depth must be an int of at least 1, got 0"),
        (["compare", "costless.graph"], "found ['name', 'shape']"),
        (["compare", "GRAPH", "--output", "none/rows.jsonl"], "No such file"),
        (["compare", "GRAPH", "--csv", "none/table.csv"], "cannot write none/table.csv"),
        (["compare", "GRAPH", "--table", "none/table.md"], "cannot write none/table.md"),
        (["compare", "GRAPH", "--plot", "none/figures/"], "No such file or directory: none/figures"),
        (["compare", "GRAPH", "--plot", "net.graph/"], "File exists: net.graph"),
        (["frontier", "GRAPH", "--csv", "."], "cannot write ."),
        (["frontier", "GRAPH", "--budgets", "90%,"], 'cannot read ""'),
    ],
)
def test_bad_input_of_a_sweep_exits_2_before_anything_runs(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = [{"name": "a", "shape": [2]}, {"name": "b", "shape": [2]}]
    Path("costless.graph").write_text(json.dumps({"nodes": nodes, "links": [{"source": "a", "target": "b"}]}))
    sc.write_graph(conv_net(1), "net.graph")
    assert main(["net.graph" if entry == "GRAPH" else entry for entry in arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_dead_worker_gives_no_answer_and_a_hint(
    graph_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def die(*arguments: object, **options: object) -> None:
        raise BrokenProcessPool("a process was terminated abruptly")

    monkeypatch.setattr("scheduler.comparisons.sweep._rows_from_executor", die)
    assert main(["compare", graph_file, "--budgets", "100%", "--solvers", "save-all", "--jobs", "2"]) == 3
    assert "use fewer --jobs" in capsys.readouterr().err
