"""Training steps that fill a GPU: predicted and measured memory, and time at equal peaks.

    python tests/benchmarks/gpu.py > tests/benchmarks/gpu.csv

Each model trains plainly ("eager"), with `torch.utils.checkpoint` around every block ("each
block"), by plans for several budgets ("plan 60%") and by one for the peak of each block ("plan for
each block's peak"), in float32 and under autocast in bfloat16. `--models` and `--precisions` keep
to some. `--compiled` compares `torch.compile` with an `activation_memory_budget` ("knob 0.5") with
plans through Inductor at that peak instead.

Bytes are of one step that finds no gradients, parameters and inputs included. "live" counts the
storages of tensors; "allocated" and "reserved" are the peaks of CUDA's caching allocator less
what libraries keep ("kept": cuBLAS's workspaces); "expandable" is what it reserves with segments
that grow. "predicted" is the plan's live peak, the others are those of the simulated allocator. A
plan has ten seconds, "min" included. Times are medians of steps that take turns with the eager
one; "over eager" is the median of the ratios less 1, between its smallest and largest. Where the
eager step does not fit, times stand alone. The last columns name what it ran on.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import gc
import itertools
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import scheduler as sc
from scheduler.planning.caching_allocator import allocator_use
from scheduler.pytorch import backend
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.allocator import Step
from scheduler.pytorch.measurement.memory import (
    StorageTracker,
    measure_times,
    resident_tensors,
    storage_bytes,
    training_step,
)
from scheduler.pytorch.models.catalog import ModelCase, make_model
from scheduler.pytorch.tracing import capture

MODELS: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    "gpt2": ({"layers": 12, "width": 1024, "heads": 16, "vocabulary": 50257, "length": 1024}, ("blocks",)),
    "hf-llama": ({"layers": 12, "width": 1024, "length": 2048, "vocabulary": 32000}, ("model.layers",)),
    "hf-vit": ({"layers": 12, "width": 768, "size": 224, "classes": 1000}, ("vit.layers",)),
    "resnet50": ({"width": 64, "size": 224, "classes": 1000}, ("features",)),
    "unet": ({"width": 64, "size": 256}, ("down", "up")),
}
"""Options of each factory, and the containers of its blocks."""
BATCHES = {
    "float32": {"gpt2": 16, "hf-llama": 4, "hf-vit": 32, "resnet50": 256, "unet": 32},
    "bfloat16": {"gpt2": 32, "hf-llama": 8, "hf-vit": 64, "resnet50": 256, "unet": 32},
}
"""The size of a batch by precision and model."""
BUDGETS = ("min", "60%", "90%")
KNOBS = ("1", "0.5")
REPEATS, SECONDS = 3, 10.0
BYTES = ("predicted", "live", "predicted allocated", "allocated", "predicted reserved", "reserved")
BYTES += ("predicted expandable", "expandable", "kept")
COLUMNS = ("model", "precision", "way", "budget", *BYTES, "gap", "overhead predicted", "seconds", "over eager")
COLUMNS += ("device", "driver", "torch")


class Autocast(nn.Module):
    """A model whose forward runs under autocast in bfloat16."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: object, **kwargs: object) -> object:
        with torch.autocast("cuda", torch.bfloat16):
            return self.module(*args, **kwargs)


@dataclass(frozen=True)
class Case:
    """A model on the device.

    Attributes
    ----------
    model : ModelCase
        Its batch and its loss; the module computes in the precision.
    blocks : tuple of nn.Module
    """

    model: ModelCase
    blocks: tuple[nn.Module, ...]

    def step_of(self, module: nn.Module, *, returns_loss: bool = False) -> Step:
        """A step of a module in the place of the model's; `returns_loss` if it returns its loss."""
        return training_step(module, self.model.args, self.model.kwargs, loss=None if returns_loss else self.model.loss)

    @property
    def resident(self) -> list[Tensor]:
        return resident_tensors(self.model.module, (self.model.args, dict(self.model.kwargs)))


def make_case(name: str, precision: str) -> Case:
    """A model with its batch on the device."""
    options, containers = MODELS[name]
    made = make_model(name, **options, batch_size=BATCHES[precision][name])
    module = made.module.cuda()
    children = [block for container in containers for block in module.get_submodule(container).children()]
    blocks = tuple(block for block in children if any(block.children()))  # single operators save nothing
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), (made.args, dict(made.kwargs)))
    if precision == "bfloat16":
        module = Autocast(module)
    return Case(ModelCase(module, args, kwargs, made.loss), blocks)


def set_expandable_segments(expandable: bool) -> None:
    """Let segments that the allocator reserves from now on grow, as `PYTORCH_CUDA_ALLOC_CONF` does, or not."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{expandable}")


def memory_of(step: Step, resident: list[Tensor], *, counted: bool = True) -> dict[str, int]:
    """The peaks of a step by its tensors, if these can be counted, and by the allocator; a first step warms up."""
    total = storage_bytes(resident)
    step()
    found: dict[str, int] = {}
    if counted:
        with StorageTracker(resident) as tracker:
            step()
        found["live"] = total + tracker.peak_bytes
    peaks = []
    for expandable in (True, False):
        for tensor in resident:
            tensor.grad = None
        set_expandable_segments(expandable)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - total
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peaks.append((torch.cuda.max_memory_allocated() - kept, torch.cuda.max_memory_reserved() - kept))
    (_, expandable_reserved), (allocated, reserved) = peaks
    return found | {"allocated": allocated, "reserved": reserved, "expandable": expandable_reserved, "kept": kept}


def times_of(step: Step, eager: Step | None) -> dict[str, object]:
    """The time of a step, and its ratio to the eager one, in turn with it."""
    steps: dict[str, Step] = {"step": step} | ({} if eager is None else {"eager": eager})
    times = measure_times(steps, REPEATS)
    found: dict[str, object] = {"seconds": f"{statistics.median(times['step']):.4f}"}
    if eager is not None:
        ratios = [own / other - 1 for own, other in zip(times["step"], times["eager"], strict=True)]
        found["over eager"] = f"{statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})"
    return found


def rows(case: Case) -> Iterator[dict[str, object]]:
    """The rows of one model in one precision; what does not fit the device says so."""
    model = case.model
    plain = case.step_of(model.module)
    eager: Step | None = plain
    try:
        yield {"way": "eager", **memory_of(plain, case.resident), **times_of(plain, None)}
    except torch.cuda.OutOfMemoryError:
        eager = None
        yield {"way": "eager", "live": "out of memory"}
    budgets: dict[str, int | str] = {f"plan {budget}": budget for budget in BUDGETS}
    if case.blocks:
        step = each_block(case)
        memory = memory_of(step, case.resident)
        yield {"way": "each block", **memory, **times_of(step, eager)}
        budgets["plan for each block's peak"] = memory["live"]
    captured = capture(model.module, model.args, model.kwargs, model.loss, costs="measured")
    for way, budget in budgets.items():
        yield {"way": way, **planned(case, captured, budget, eager)}


def each_block(case: Case) -> Step:
    """A step with `torch.utils.checkpoint` around every block."""
    plain = case.step_of(case.model.module)

    def step() -> object:
        with contextlib.ExitStack() as stack:
            for block in case.blocks:
                forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
                stack.enter_context(mock.patch.object(block, "forward", forward))
            return plain()

    return step


def planned(case: Case, captured: Capture, budget: int | str, eager: Step | None) -> dict[str, object]:
    """What a plan predicts, and what its step takes."""
    graph, model = captured.graph, case.model
    constants = graph.resident_bytes - storage_bytes(case.resident)
    answer = sc.solve(graph, budget + constants if isinstance(budget, int) else budget, time_limit=SECONDS)
    if answer.schedule is None or answer.simulation is None:
        return {"budget": answer.budget_bytes, "live": answer.status.name}
    use = allocator_use(graph, answer.schedule)
    expandable = allocator_use(graph, answer.schedule, expandable_segments=True)
    module = build(model.module, captured, answer.schedule, model.args, model.kwargs, loss=model.loss)
    step = case.step_of(module, returns_loss=True)
    return {
        "budget": answer.budget_bytes - constants,
        "predicted": answer.simulation.live_peak_bytes - constants,
        "predicted allocated": use.allocated_bytes - constants,
        "predicted reserved": use.reserved_bytes - constants,
        "predicted expandable": expandable.reserved_bytes - constants,
        "gap": f"{answer.gap:.4f}",
        "overhead predicted": f"{answer.overhead:.4f}",
        **memory_of(step, case.resident),
        **times_of(step, eager),
    }


def compiled_rows(case: Case) -> Iterator[dict[str, object]]:
    """The rows of `torch.compile`: without a budget, with its own knob, and with our plan at the knob's peak."""
    model = case.model
    eager, resident = case.step_of(model.module), case.resident
    yield {"way": "eager", **memory_of(eager, resident), **times_of(eager, None)}
    for knob in KNOBS:
        with torch._functorch.config.patch(activation_memory_budget=float(knob)):
            step = case.step_of(torch.compile(model.module))  # type: ignore[arg-type]
            memory = memory_of(step, resident, counted=False)
            yield {"way": f"knob {knob}", **memory, **times_of(step, eager)}
        torch._dynamo.reset()
        made = backend(memory["allocated"], compiler="inductor", time_limit=SECONDS)
        step = case.step_of(torch.compile(model.module, backend=made))  # type: ignore[arg-type]
        found = {"way": f"compiled plan for the peak of knob {knob}", "budget": memory["allocated"]}
        try:
            yield {**found, **memory_of(step, resident, counted=False), **times_of(step, eager)}
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, sc.BudgetTooSmallError):
                raise
            yield {**found, "live": "no plan fits"}
        torch._dynamo.reset()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--precisions", nargs="*", choices=BATCHES, default=[*BATCHES])
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is seen: this benchmark fills a GPU with tens of GiB; run it where there is one"
        )
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.strip()
    ran_on = {"device": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__}
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for name, precision in itertools.product(given.models, given.precisions):
        case = make_case(name, precision)
        for row in (compiled_rows if given.compiled else rows)(case):
            writer.writerow({"model": name, "precision": precision, **row, **ran_on})
            sys.stdout.flush()
        del case, row
        gc.collect()  # cycles in autograd's graph, and compiled code
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
