"""Training steps that fill a GPU: peak and time, eager, checkpointed, compiled and planned.

    python tests/benchmarks/gpu.py > tests/benchmarks/gpu.csv

`--models` keeps to some models, `--batch-size` takes another batch for all, `--ways` keeps to
some ways: "eager", "each block" (`torch.utils.checkpoint` around every block), "knob 0.5"
(`torch.compile` with that `activation_memory_budget`), "plan 60%" and "compiled plan 60%" (our
backend with Inductor). Each way starts from the same weights, alone on the device.

The peak is the caching allocator's (`torch.cuda.max_memory_allocated`) in one step, parameters
included; "predicted" is that of the plan. Times are the shortest of several steps, and over
eager. A way that does not fit the device says so instead.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import gc
import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from scheduler.errors import BudgetTooSmallError
from scheduler.pytorch import backend, checkpointed
from scheduler.pytorch.measurement.allocator import Step
from scheduler.pytorch.measurement.memory import measure_times, training_step
from scheduler.pytorch.models.catalog import ModelCase, make_model

MODELS: dict[str, tuple[dict[str, object], str]] = {
    "gpt2": (
        {"layers": 24, "width": 1024, "heads": 16, "vocabulary": 50257, "length": 1024, "batch_size": 16},
        "blocks",
    ),
    "resnet50": ({"width": 64, "size": 224, "classes": 1000, "batch_size": 384}, "features"),
}
"""Options of each factory, and the container of its blocks."""
BUDGETS = ("80%", "60%", "40%")
KNOBS = ("1.0", "0.8", "0.5", "0.2")
WAYS = ("eager", "each block")
WAYS += tuple(f"knob {knob}" for knob in KNOBS)
WAYS += tuple(f"{kind} {budget}" for kind in ("plan", "compiled plan") for budget in BUDGETS)
REPEATS, SECONDS = 5, 60.0
HEAD = ("model", "batch size", "way", "peak", "predicted", "seconds", "over eager")


def on_device(case: ModelCase) -> tuple[nn.Module, tuple[object, ...]]:
    """A module and its batch on the device."""
    return case.module.cuda(), tree_map_only(torch.Tensor, lambda tensor: tensor.cuda(), case.args)


def step_of(way: str, module: nn.Module, args: tuple[object, ...], container: str) -> tuple[Step, int | None]:
    """A step of a model that returns its loss, and the peak that a plan predicts."""
    kind, _, value = way.rpartition(" ")
    if way == "each block":
        for block in module.get_submodule(container).children():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    elif kind == "knob":
        torch._functorch.config.activation_memory_budget = float(value)
        module = torch.compile(module)  # type: ignore[assignment]
    elif kind == "compiled plan":
        made = backend(value, compiler="inductor", time_limit=SECONDS)
        return training_step(torch.compile(module, backend=made), args), None  # type: ignore[arg-type]
    elif kind == "plan":
        planned = checkpointed(module, value, args, time_limit=SECONDS)
        assert planned.plan is not None
        return training_step(planned, args), planned.plan.peak_bytes
    return training_step(module, args), None


def peak_of(step: Step, module: nn.Module) -> int:
    """The allocator's peak in one step that finds no gradients."""
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def row(name: str, way: str, options: Mapping[str, object], container: str) -> dict[str, object]:
    """One way to train one model, alone on the device."""
    torch._dynamo.reset()
    found: dict[str, object] = {"model": name, "batch size": options["batch_size"], "way": way}
    module, args = on_device(make_model(name, **options))
    try:
        step, found["predicted"] = step_of(way, module, args, container)
        step()
        found["peak"] = peak_of(step, module)
        found["seconds"] = min(measure_times({way: step}, REPEATS)[way])
    except torch.cuda.OutOfMemoryError:
        found["peak"] = "out of memory"
    except BudgetTooSmallError as error:
        found["peak"] = str(error)
    finally:
        torch._functorch.config.activation_memory_budget = 1.0
    return found


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[*MODELS])
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=[*WAYS])
    parser.add_argument("--batch-size", type=int)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit(
            "no CUDA device is seen: this benchmark fills a GPU with tens of GiB; run it where there is one"
        )
    writer = csv.DictWriter(sys.stdout, HEAD, lineterminator="\n")
    writer.writeheader()
    for name in given.models:
        options, container = copy.deepcopy(MODELS[name])
        if given.batch_size:
            options["batch_size"] = given.batch_size
        eager = 0.0
        for way in given.ways:
            found = row(name, way, options, container)
            gc.collect()  # what the way before held, compiled code and cycles in autograd's graph among it
            torch.cuda.empty_cache()
            seconds = float(str(found.get("seconds", 0.0)))
            eager = seconds if way == "eager" else eager
            if seconds and eager:
                found["over eager"] = f"{seconds / eager:.3f}"
            writer.writerow(found)
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
