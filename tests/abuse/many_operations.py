"""Run a step of very many operations through files, the simulator and solvers, and print the time and memory of each.

    python tests/abuse/many_operations.py 1000000 [SECONDS [counted]]

The step is that of equal layers. Each row shows seconds of CPU and of the clock, the process's memory in
MiB (the largest so far), and the answer. Each solver has so many seconds, by default 20. With `counted`, the
seconds of CPU are those of a clock that counts ten million calls as a second, and so are the limits.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import scheduler as sc
from tests.support.fake_clock import FakeClock
from tests.support.training_graphs import uniform_chain

BUDGETS = {"save-all": "100%", "segments": "60%", "greedy": "60%", "ilp": "60%", "auto": "60%"}


def print_row(name: str, act: Callable[[], object], *, counted: bool) -> object:
    """Call a function, print its row, and return what it returns; an error of ours is an answer too."""
    cpu, started = time.process_time(), time.monotonic()
    said = ""
    work = FakeClock(seconds_per_call=1e-7)
    with work if counted else contextlib.nullcontext():
        try:
            found = act()
        except sc.SchedulerError as error:
            found, said = None, f"{type(error).__name__}: {error}"
    if isinstance(found, sc.Solution):
        said = f"{found.status.name}, {found.overhead:.2%} slower" if found.schedule else found.messages[0]
    elapsed, used = time.monotonic() - started, work.seconds if counted else time.process_time() - cpu
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{name:<16}{used:>8.1f}{elapsed:>8.1f}{held:>8.0f}  {said}", flush=True)
    return found


def main(count: int, seconds: float = 20.0, *, counted: bool = False) -> None:
    """Print the rows for a step of about that many operations."""
    row = partial(print_row, counted=counted)
    print(f"{'':<16}{'cpu s':>8}{'s':>8}{'MiB':>8}")
    graph = uniform_chain(count // 2)
    print(f"{len(graph.operations)} operations")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.json")
        row("write", lambda: sc.write_graph(graph, path))
        read = row("read", lambda: sc.read_graph(path))
        assert read == graph
        del read
        for solver, budget in BUDGETS.items():
            row(solver, partial(sc.solve, graph, budget, solver=solver, time_limit=seconds))
        plan = row("plan", lambda: sc.make_plan(graph, "100%", solver="save-all"))
        assert isinstance(plan, sc.Plan)
        row("save the plan", lambda: plan.save(path))
        assert row("load the plan", lambda: sc.Plan.load(path)) == plan


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:3]), counted=sys.argv[3:] == ["counted"])
