"""What a first answer costs: importing the package, a first solve, and `scheduler train`, stage by stage.

    python tests/benchmarks/first_answer.py > tests/benchmarks/first_answer.csv

Each case runs twice in processes of its own: "cold" with empty folders for compiled kernels and
measured costs, then "warm" with what the first run left there. Seconds are wall-clock and CPU
seconds of the process. A stage of `scheduler train` lasts from its message to the next one;
"training" begins when the planned module is ready, and "until training" sums what comes before.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MODEL, BUDGET = "gpt2", "60%"
COLUMNS = ["case", "cache", "stage", "seconds", "cpu_seconds"]
STAGES = ("tracing", "planning", "training", "verifying", "measuring")
"""First words of the messages of `scheduler train`."""
_TICKS = os.sysconf("SC_CLK_TCK")

Moment = tuple[float, float]
"""Wall-clock seconds and CPU seconds of a process."""

IMPORTING = "import scheduler"
SOLVING = """
import scheduler as sc
sc.solve(sc.zoo.{graph}, "{budget}", gap=0.005)
"""
SOLVES = {
    "solve a U-Net": SOLVING.format(graph="unet()", budget="70%"),
    "solve a chain of 60 layers": SOLVING.format(graph="heterogeneous_chain(60)", budget="60%"),
    "solve an irregular graph": SOLVING.format(graph="random_layered(60)", budget="90%"),
}


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a live process."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def run(arguments: list[str], environment: dict[str, str]) -> Iterator[tuple[str, Moment]]:
    """Run a command; yield each line of its stderr with its moment since the start, and at the end an empty line."""
    begun, before = time.perf_counter(), os.times()
    with subprocess.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            yield line, (time.perf_counter() - begun, cpu_seconds(process.pid))
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    yield "", (time.perf_counter() - begun, used)


def stages(environment: dict[str, str], folder: str) -> Iterator[tuple[str, Moment]]:
    """Yield the stages of `scheduler train` with what each costs."""
    output = str(Path(folder) / "plan.json")
    command = [sys.executable, "-m", "scheduler", "train", MODEL, "--budget", BUDGET, "-o", output]
    name, begun = "importing", (0.0, 0.0)
    for line, moment in run(command, environment):
        first = line.split(" ", 1)[0].strip()
        if first not in STAGES and line:
            continue
        yield name, (moment[0] - begun[0], moment[1] - begun[1])
        if first == "training":
            yield "until training", moment
        name, begun = first, moment
    yield "all", begun


def rows() -> Iterator[list[object]]:
    """Yield the rows of the table."""
    cases = {"import scheduler": IMPORTING, **SOLVES}
    for case, code in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                ((_, moment),) = run([sys.executable, "-c", code], _environment(folder))
                yield [case, cache, "all", *_cells(moment)]
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            for stage, moment in stages(_environment(folder), folder):
                yield [f"scheduler train {MODEL} --budget {BUDGET}", cache, stage, *_cells(moment)]


def _environment(folder: str) -> dict[str, str]:
    return {**os.environ, "NUMBA_CACHE_DIR": f"{folder}/kernels", "XDG_CACHE_HOME": f"{folder}/cache"}


def _cells(moment: Moment) -> list[str]:
    return [f"{seconds:.2f}" for seconds in moment]


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for cells in rows():
        writer.writerow(cells)
        sys.stdout.flush()
