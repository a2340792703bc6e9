"""Hostile graph, chain and plan files: our error or a correct answer, in bounded time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import scheduler as sc
from scheduler.api import lower
from scheduler.cli import main
from scheduler.errors import GraphFormatError, PlanFormatError, SchedulerError
from tests.abuse.hostile import RAW, edited, places, seeds, spoiled
from tests.abuse.tally import BOOK
from tests.support.examples import examples
from tests.support.oracle import peak_of
from tests.support.paths import ROOT
from tests.support.plans import layered_plan, oddly_named_plan

pytestmark = pytest.mark.abuse
SEEDS = seeds()
GRAPHS = [name for name in SEEDS if name != "plan"]


def check_graph_file(path: Path, area: str) -> None:
    """Read it; what is read must be whole, and simulated as the independent oracle judges it."""
    tally = BOOK.of(area)
    read = tally.attempt(sc.read_graph, path)
    if isinstance(read, SchedulerError):
        return
    tally.accept(type(read).from_dict(read.to_dict()) == read, "what is written reads back")
    lowered = tally.attempt(lower, read)
    if isinstance(lowered, SchedulerError):
        return
    graph, _ = lowered
    solution = tally.attempt(sc.solve, graph, "100%", solver="save-all")
    tally.accept(isinstance(solution, sc.Solution) and solution.schedule is not None, solution)
    actions = [
        ("compute", action.operation) if isinstance(action, sc.Compute) else ("free", action.tensor)
        for action in solution.schedule
    ]
    found = (solution.time, solution.peak_bytes)
    tally.accept(peak_of(graph.to_dict(), actions) == found, "the oracle finds another time or peak")


def check_plan_file(path: Path, area: str, plan: sc.Plan) -> None:
    """Load it: it is refused, or it is the plan that it was."""
    tally = BOOK.of(area)
    read = tally.attempt(sc.Plan.load, path)
    tally.accept(isinstance(read, SchedulerError) or read == plan, "a spoiled plan was taken for a whole one")


@pytest.mark.parametrize("name", GRAPHS)
@settings(max_examples=examples(500), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_spoiled_graph_file_is_refused_or_read_rightly(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "spoiled.json"
    path.write_bytes(data.draw(spoiled(SEEDS[name])))
    check_graph_file(path, f"{name} files")


@settings(max_examples=examples(1000), suppress_health_check=list(HealthCheck))
@given(content=spoiled(SEEDS["plan"]))
def test_a_spoiled_plan_file_is_refused_or_unchanged(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "spoiled.json"
    path.write_bytes(content)
    check_plan_file(path, "plan files", layered_plan())


@pytest.mark.parametrize("name", [name for name, content in SEEDS.items() if content.startswith(b"{")])
def test_every_hostile_value_in_every_place_is_refused_or_read_rightly(name: str, tmp_path: Path) -> None:
    path, data = tmp_path / "file.json", json.loads(SEEDS[name])
    found = list(places(data))
    for number, raw in enumerate(RAW):
        for place in found[number % 5 :: 5]:
            text = json.dumps(edited(data, place, "replace", "RAW")).replace('"RAW"', RAW[raw])
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
            if name == "plan":
                check_plan_file(path, "plan files", layered_plan())
            else:
                check_graph_file(path, f"{name} files")


@pytest.mark.parametrize("name", SEEDS)
def test_the_files_are_whole_before_they_are_spoiled(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(SEEDS[name])
    assert sc.Plan.load(path) == layered_plan() if name == "plan" else sc.read_graph(path)


@pytest.mark.parametrize("name", [name for name, content in SEEDS.items() if content.startswith(b"{")])
def test_an_entry_that_stands_twice_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(SEEDS[name].replace(b"{", b'{"version": 0, "version": 1, ', 1))
    error = BOOK.of(f"{name} files").attempt(sc.Plan.load if name == "plan" else sc.read_graph, path)
    BOOK.of(f"{name} files").accept(isinstance(error, GraphFormatError | PlanFormatError), error)
    assert '"version"' in str(error)


SPY = """
import sys, json
import scheduler as sc
from scheduler.cli import main
from scheduler.export.html_report import write_report
from tests.abuse.hostile import RAW
sc.Plan.load(sys.argv[1])
main(["show", sys.argv[1]])
FORBIDDEN = ("exec", "compile", "import", "pickle", "os", "subprocess", "ctypes", "socket")
seen, watching = [], True
def watch(event, arguments):
    if watching and event.split(".")[0] in FORBIDDEN:
        seen.append((event, str(arguments)[:200]))
sys.addaudithook(watch)
for path in sys.argv[1:]:
    try:
        sc.Plan.load(path)
    except sc.SchedulerError:
        pass
    main(["show", path])
    main(["verify", path])
watching = False
print(json.dumps(seen))
"""


def test_a_plan_file_never_runs_code(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(len(RAW) + 1)]
    oddly_named_plan().save(paths[0])
    for path, raw in zip(paths[1:], RAW.values(), strict=True):
        plan = layered_plan().to_dict() | {"package_version": "RAW", "note": "RAW"}
        path.write_bytes(json.dumps(plan).replace('"RAW"', raw).encode("utf-8", "surrogatepass"))
    ran = subprocess.run(
        [sys.executable, "-c", SPY, *map(str, paths)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    tally = BOOK.of("plans that would be code")
    tally.tried += len(paths)
    tally.accept(ran.returncode == 0, ran.stderr)
    tally.accept(json.loads(ran.stdout.splitlines()[-1]) == [], ran.stdout[-2000:])


@pytest.mark.parametrize("raw", RAW)
def test_the_command_line_meets_a_hostile_plan_with_exit_code_2_or_1_and_a_message(
    raw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = layered_plan().to_dict()
    tally = BOOK.of("command line")
    for key in plan:
        path = tmp_path / "plan.json"
        text = json.dumps(plan | {key: "RAW"}).replace('"RAW"', RAW[raw])
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        code = tally.attempt(main, ["verify", str(path)])
        tally.accept(code in (1, 2) or (code == 0 and plan[key] == json.loads(RAW[raw])), (key, code))
        assert code == 0 or "Error: " in capsys.readouterr().err


BIG = """
import json, resource, sys
import scheduler as sc
from tests.support.fake_clock import FakeClock
path, count = sys.argv[1], int(sys.argv[2])
reads = [[]] + [[f"t{i}"] for i in range(count)]
operations = [{"name": f"o{i}", "inputs": reads[i], "outputs": [f"t{i}"], "time": 1} for i in range(count)]
tensors = [{"name": f"t{i}", "size_bytes": 4} for i in range(count)]
whole = {"format": "scheduler-graph", "version": 2, "operations": operations, "tensors": tensors}
text = json.dumps(whole | {"results": [f"t{count - 1}"]})
texts = [text, text[:-100], text.replace(f'"o{count - 1}"', '"o0"'), text.replace('"t7"]', '"t9"]', 1), "[" * count]
del operations, tensors, whole
answers = []
for text in texts:
    open(path, "w").write(text)
    with FakeClock(seconds_per_call=1e-7) as work:
        try:
            graph = sc.read_graph(path)
            answer = str(sc.simulate(graph, sc.solve(graph, 8, solver="save-all").schedule).time)
        except sc.SchedulerError as error:
            answer = f"{type(error).__name__}: {error}"
    answers.append([answer, work.calls])
print(json.dumps([answers, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def test_very_many_operations_are_read_or_refused_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """10^5 of them, in so many calls and bytes for each that 10^6 would pass in a few minutes and GB."""
    count, tally = 100_000, BOOK.of("very many operations")
    command = [sys.executable, "-c", BIG, str(tmp_path / "graph.json"), str(count)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    tally.tried += 5
    tally.accept(ran.returncode == 0, ran.stderr)
    answers, kilobytes = json.loads(ran.stdout)
    said, calls = zip(*answers, strict=True)
    tally.accept(said[0] == str(float(count)), said[0])
    for text, expected in zip(said[1:], ("not valid JSON", '"o0"', '"t7"', "not valid JSON"), strict=True):
        tally.accept(expected in text, text)
    assert max(calls) < 2000 * count
    assert kilobytes * 1024 < 10_000 * count
