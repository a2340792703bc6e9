"""How long `checkpointed` takes from a model to its planned module, and what its plans are worth.

    python tests/benchmarks/planning_times.py tests/benchmarks/planning_times.csv

All models of the catalog at their default sizes, and ten of timm, transformers, peft and
diffusers (small ones, with steps of milliseconds), each at "60%" (at "min+25%" if 60 % is
refused) and at "min". Rows are appended to the file; those that it has already are skipped, so a
run may be continued. `--models` and `--budgets` keep to some.

Each row is made in a process of its own, with compiled kernels but without measured costs:
if a kernel had to be compiled, the row is made once more. Seconds are wall-clock seconds; those of
the processor are shown next to them, for busy machines. The step is a plain one, the shortest of
a few in the same process; ten times its time and 8 s are allowed for planning. The measured peak
is that of live storages, to be compared with `predicted_bytes`; all bytes include the resident
tensors of the plan.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BUDGETS = ("60%", "min")
WHERE_REFUSED = "min+25%"
OTHERS = (
    "timm convnext_atto",
    "timm vit_tiny",
    "timm efficientnet_b0",
    "timm densenet121",
    "timm swin",
    "qwen2",
    "bart",
    "lora",
    "diffusers unet",
    "diffusers dit",
)
"""Names of models in tests/zoo/models.py."""
STEPS, MORE_SECONDS = 10, 8.0
"""What planning may take: so many plain steps and so many seconds."""
PLAIN_STEPS = 3
LEAST_COMPILATION = 1e-3
"""Seconds between two looks at the clock are less."""
COLUMNS = [
    "model",
    "budget",
    "operations",
    "step_seconds",
    "planning_seconds",
    "planning_cpu_seconds",
    "allowed_seconds",
    "status",
    "gap",
    "overhead",
    "budget_bytes",
    "predicted_bytes",
    "measured_bytes",
]


def plan(name: str, budget: str, *, by_processor: bool) -> dict[str, object]:
    """Return the row of a model, and whether a kernel was compiled for it."""
    import torch

    from scheduler.errors import BudgetTooSmallError
    from scheduler.pytorch import checkpointed
    from scheduler.pytorch.measurement.memory import measure, resident_tensors, training_step
    from scheduler.pytorch.models.catalog import make_model
    from scheduler.solvers.deadline import clock
    from tests.zoo.models import CASES

    if by_processor:
        clock.read = time.process_time
        leave_highs_to_the_clock()
    torch.manual_seed(0)
    if name in CASES:
        other = CASES[name]()
        model, loss = other.model, other.loss
        args, kwargs = other.batch(1)
    else:
        case = make_model(name)
        model, loss, args, kwargs = case.module, case.loss, case.args, dict(case.kwargs)
    plain = training_step(model, args, kwargs, loss=loss)
    step = min(seconds_of(plain) for _ in range(1 + PLAIN_STEPS))
    model.zero_grad()
    started, cpu_started = time.perf_counter(), time.process_time()
    try:
        planned = checkpointed(model, budget, args, kwargs, loss=loss)
    except BudgetTooSmallError as error:
        return {"refused": str(error)}
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    compiled = clock.read() - clock.now() > LEAST_COMPILATION
    found = planned.plan
    assert found is not None
    measured = measure(
        training_step(planned, args, kwargs), resident=resident_tensors(planned, (args, kwargs)), repeats=1
    )
    others = found.graph.resident_bytes - measured.resident_bytes
    return {
        "compiled": compiled,
        "operations": len(found.graph.operations),
        "step_seconds": f"{step:.3f}",
        "planning_seconds": f"{seconds:.2f}",
        "planning_cpu_seconds": f"{cpu_seconds:.2f}",
        "allowed_seconds": f"{STEPS * step + MORE_SECONDS:.2f}",
        "status": found.status.name,
        "gap": f"{found.gap:.4f}",
        "overhead": f"{found.overhead:.4f}",
        "budget_bytes": found.budget_bytes,
        "predicted_bytes": found.simulation.live_peak_bytes,
        "measured_bytes": measured.live_peak_bytes + others,
    }


def leave_highs_to_the_clock() -> None:
    """Give HiGHS no limit of its own, which is in wall-clock seconds: our deadline ends its searches all the same."""
    import pulp

    begin = pulp.HiGHS.__init__

    def begin_without_limit(self: object, *, timeLimit: float = 0.0, **options: object) -> None:
        begin(self, **options)

    pulp.HiGHS.__init__ = begin_without_limit


def seconds_of(step: object) -> float:
    """Return the wall-clock seconds of a call."""
    assert callable(step)
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def run(name: str, budget: str, *, by_processor: bool) -> dict[str, object]:
    """Plan in a process of its own, without measured costs."""
    root = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "SCHEDULER_COSTS_FILE": f"{folder}/costs.json", "PYTHONPATH": root}
        command = [sys.executable, __file__, "--plan", name, budget]
        command += ["--by-processor"] if by_processor else []
        process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
    return run(name, budget, by_processor=by_processor) if found.get("compiled") else found


def main(path: Path, names: list[str], budgets: list[str], *, by_processor: bool) -> None:
    """Append the rows that a file does not have."""
    done = set()
    with contextlib.suppress(FileNotFoundError), path.open(newline="") as file:
        done = {(row["model"], row["budget"]) for row in csv.DictReader(file)}
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        if not done and not path.stat().st_size:
            writer.writeheader()
        for name in names:
            for budget in budgets:
                forms = (budget, *([WHERE_REFUSED] if "min" not in budget else []))
                if done.intersection((name, form) for form in forms):
                    continue
                for form in forms:
                    if "refused" not in (found := run(name, form, by_processor=by_processor)):
                        writer.writerow({"model": name, "budget": form, **found})
                        file.flush()
                        break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, nargs="?")
    parser.add_argument("--models", help="names, separated by commas")
    parser.add_argument("--budgets", default=",".join(BUDGETS))
    parser.add_argument(
        "--by-processor", action="store_true", help="on a busy machine: time limits are seconds of the processor"
    )
    parser.add_argument("--plan", nargs=2, metavar=("MODEL", "BUDGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan:
        print(json.dumps(plan(*options.plan, by_processor=options.by_processor)))
    else:
        from scheduler.pytorch.models.catalog import model_names

        names = options.models.split(",") if options.models else [*model_names(), *OTHERS]
        main(options.path, names, options.budgets.split(","), by_processor=options.by_processor)
