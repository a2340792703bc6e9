"""Side by side with PyTorch's own checkpointing: peak, FLOPs and time of one step, all measured.

    python tests/benchmarks/peers.py > tests/benchmarks/peers.csv

Arguments are names of models; `--points` keeps to a few points of the peers, `--budgets` to a
few of ours, and `--time-limit` gives the seconds for all schedules of a model. Peers are
PyTorch's partitioner at each `activation_memory_budget` (the joint graphs of `torch.compile`,
run as generated code as ours are), `torch.utils.checkpoint` on every block, and
`checkpoint_sequential` where the model is a sequence; all on one thread. Ours is planned for
the peak that the peer needs, and for eight budgets evenly from 5 % above the floor. Peaks are
shares of what AOTAutograd's step that saves everything adds to the resident tensors; FLOPs and
times are over plain eager PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import scheduler as sc
from scheduler.api import plan_of
from scheduler.problem import Problem
from scheduler.pytorch import checkpointed, trace
from scheduler.pytorch.memory import (
    FlopCounter,
    Step,
    StorageTracker,
    allocator_peak,
    measure_times,
    resident_tensors,
    training_step,
)
from scheduler.pytorch.models import ModelCase, make_model

REPEATS = 3


@dataclass(frozen=True)
class Model:
    """A model to compare on.

    Attributes
    ----------
    name : str
        Of the factory, as `make_model` knows it.
    options : dict
        Of the factory.
    blocks : tuple of str
        Modules that are run under `torch.utils.checkpoint`, or that hold those.
    sequence : str
        The nn.Sequential for `checkpoint_sequential`, "" if there is none.
    shares : tuple of float
        Budgets of ours beside the eight, as shares of what saving everything adds.
    """

    name: str
    options: Mapping[str, object]
    blocks: tuple[str, ...]
    sequence: str = ""
    shares: tuple[float, ...] = ()

    def make(self) -> ModelCase:
        """The model, always with the same weights and batch."""
        return make_model(self.name, **self.options)


MODELS = {
    "GPT-2": Model("hf-gpt2", {"layers": 8, "heads": 8, "vocabulary": 4096, "dropout": 0.0}, ("transformer.h",)),
    "ResNet-50": Model("resnet50", {"width": 32, "batch_size": 8}, ("features",), "features", (0.4,)),
    "U-Net": Model("unet", {"batch_size": 2, "size": 96}, ("down", "up", "bottom")),
    "ViT": Model("hf-vit", {"dropout": 0.0}, ("vit.layers",)),
    "BERT": Model("hf-bert", {"dropout": 0.0}, ("bert.encoder.layer",)),
    "T5": Model("hf-t5", {"dropout": 0.0}, ("encoder.block", "decoder.block")),
    "Llama": Model("hf-llama", {}, ("model.layers",)),
}
MEMORY_BUDGETS = tuple(k / 10 for k in range(11))
BUDGETS, ABOVE_FLOOR = 8, 1.05
SEGMENTS = (4, 16)
EVERYTHING, EACH_BLOCK, OURS = "save everything", "checkpoint each block", "ours, "


class _Step(nn.Module):
    """A model with its loss."""

    def __init__(self, case: ModelCase) -> None:
        super().__init__()
        self.module, self.loss = case.module, case.loss

    def forward(self, *args: object, **kwargs: object) -> object:
        outputs = self.module(*args, **kwargs)
        return outputs if self.loss is None else self.loss(outputs)


def generated_code(module: fx.GraphModule, _: object) -> Callable[[list[object]], object]:
    """A graph as code that lets go of its arguments and of every value after its last use."""
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    forward = module.forward

    def run(arguments: list[object]) -> object:
        return forward(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compiled_steps(case: ModelCase, memory_budgets: Sequence[float | None]) -> dict[float | None, Step]:
    """Steps whose forward and backward graphs are those of `torch.compile`, by memory budget; None saves everything.

    The compiled functions are called directly, without guards: Dynamo compiles nothing where
    storages and FLOPs are counted.
    """
    functions: dict[float | None, Callable[..., tuple[torch.Tensor, ...]]] = {}
    given: list[tuple[object, ...]] = []

    def backend(graph: fx.GraphModule, example_inputs: list[torch.Tensor]) -> Callable[..., object]:
        for memory_budget in memory_budgets:
            compile_graph = aot_autograd(
                fw_compiler=generated_code,
                bw_compiler=generated_code,
                partition_fn=default_partition if memory_budget is None else min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )
            with config.patch(activation_memory_budget=memory_budget or 0.0):
                functions[memory_budget] = compile_graph(graph, example_inputs)

        def call(*arguments: object) -> object:
            given.append(arguments)
            return functions[memory_budgets[0]](*arguments)

        return call

    torch._dynamo.reset()
    once = {getattr(logging.Logger, name) for name in ("warning_once", "info_once") if hasattr(logging.Logger, name)}
    with torch._dynamo.config.patch(ignore_logging_functions=once), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(_Step(case), backend=backend, fullgraph=True)(*case.args, **case.kwargs).backward()

    def step_of(function: Callable[..., tuple[torch.Tensor, ...]]) -> Step:
        def step() -> torch.Tensor:
            case.module.zero_grad(set_to_none=True)
            (loss,) = function(*given[0])
            loss.backward()
            return loss.detach()

        return step

    return {memory_budget: step_of(function) for memory_budget, function in functions.items()}


def eager_step(case: ModelCase) -> Step:
    """A step of plain eager PyTorch."""
    return training_step(case.module, case.args, case.kwargs, loss=case.loss)


def blockwise(model: Model, case: ModelCase) -> ModelCase:
    """The case with every block under `torch.utils.checkpoint`."""
    module = copy.deepcopy(case.module)
    for name in model.blocks:
        holder = module.get_submodule(name)
        blocks = holder.children() if isinstance(holder, nn.ModuleList) or name == model.sequence else [holder]
        for block in blocks:
            if any(True for _ in block.children()):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore
    return ModelCase(module, case.args, case.kwargs, case.loss)


def segmented(model: Model, case: ModelCase, segments: int) -> ModelCase:
    """The case with its sequence in equal segments under `checkpoint_sequential`."""
    module = copy.deepcopy(case.module)
    for part in module.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False  # a segment must find its input unchanged when it is computed again
    sequence = module.get_submodule(model.sequence)
    layers = list(sequence.children())
    sequence.forward = lambda x: checkpoint_sequential(layers, segments, x, use_reentrant=False)  # type: ignore
    return ModelCase(module, case.args, case.kwargs, case.loss)


def peer_steps(model: Model, case: ModelCase, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Step, ModelCase]]:
    """The steps of the peers by name: the first saves everything, and is always wanted."""
    names = {f"memory budget {memory_budget:g}": memory_budget for memory_budget in reversed(MEMORY_BUDGETS)}
    steps = compiled_steps(case, [None, *(memory_budget for name, memory_budget in names.items() if wanted(name))])
    yield EVERYTHING, steps[None], case
    for name, memory_budget in names.items():
        if memory_budget in steps:
            yield name, steps[memory_budget], case
    if wanted(EACH_BLOCK):
        blocks = blockwise(model, case)
        yield EACH_BLOCK, eager_step(blocks), blocks
    for name, segments in {f"checkpoint_sequential {k}": k for k in SEGMENTS}.items():
        if model.sequence and wanted(name):
            parts = segmented(model, case, segments)
            yield name, eager_step(parts), parts


@dataclass(frozen=True)
class Use:
    """What one step uses beyond the resident tensors: live bytes and the allocator's at the peak, and FLOPs."""

    live_bytes: int
    allocator_bytes: int
    flops: int


def measured(step: Step, case: ModelCase) -> Use:
    """What a step uses; the run under the allocator's instrument warms up for the times, which are taken later."""
    allocator_bytes = allocator_peak(step)
    tracker, counter = StorageTracker(resident_tensors(case.module, (case.args, dict(case.kwargs)))), FlopCounter()
    with tracker, counter:
        step()
    return Use(tracker.peak_bytes, allocator_bytes, counter.flops)


class Comparison:
    """Steps of one model and what each used; of the peers, and of ours, equal ones are timed once."""

    def __init__(self, case: ModelCase) -> None:
        self.eager = eager_step(case)
        self.eager_flops = measured(self.eager, case).flops
        self.steps: dict[str, Step] = {}
        self.found: dict[str, Use] = {}
        self.same: dict[str, str] = {}
        """The first step with the same peak and FLOPs, for every step."""

    def add(self, name: str, step: Step, case: ModelCase) -> None:
        """Measure a step."""
        self.steps[name], self.found[name] = step, measured(step, case)
        print(name, self.found[name], file=sys.stderr, flush=True)
        self.same[name] = next((other for other in self.same.values() if self._key(other) == self._key(name)), name)

    def _key(self, name: str) -> tuple[bool, int, int]:
        return name.startswith(OURS), self.found[name].live_bytes, self.found[name].flops

    def label(self, name: str) -> str:
        """The name of a step with those of the peers that are the same."""
        others = [other for other, first in self.same.items() if first == name != other]
        return ", ".join([name, *(other.removeprefix("memory budget ") for other in others)])

    def seconds(self, repeats: int) -> dict[str, float]:
        """The shortest time of each step over that of plain eager PyTorch, all run in turn."""
        steps = {name: self.steps[name] for name in dict.fromkeys(self.same.values())}
        times = measure_times({"eager": self.eager, **steps}, repeats)
        return {name: min(times[first]) / min(times["eager"]) for name, first in self.same.items()}

    def figures(self, name: str, seconds: Mapping[str, float]) -> list[str]:
        """Peak, allocator's peak, FLOPs and time of a step, relative; empty where there is none."""
        if name not in self.found:
            return [""] * 4
        found, whole = self.found[name], self.found[EVERYTHING].live_bytes
        return [
            f"{found.live_bytes / whole:.4f}",
            f"{found.allocator_bytes / whole:.4f}",
            f"{found.flops / self.eager_flops:.4f}",
            f"{seconds[name]:.3f}",
        ]


def compare(title: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of one model."""
    model = MODELS[title]
    case = model.make()
    table = Comparison(case)
    for name, step, owner in peer_steps(
        model, case, lambda name: not options.points or any(name.startswith(point) for point in options.points)
    ):
        table.add(name, step, owner)
    peers = list(dict.fromkeys(table.same.values()))
    labels = {name: table.label(name) for name in peers}
    wanted = {name: table.found[name].live_bytes for name in peers}
    graph = trace(case.module, case.args, case.kwargs, loss=case.loss, costs="flops")
    wanted |= our_budgets(graph, table.found[EVERYTHING].live_bytes, options.budgets, model.shares)
    for name, step in our_steps(case, graph, wanted, options.seconds):
        table.add(name, step, case)
    seconds = table.seconds(options.repeats)
    for name in wanted:
        yield [title, labels.get(name, name), *table.figures(name, seconds), *table.figures(OURS + name, seconds)]


def our_budgets(graph: sc.Graph, whole: int, number: int, shares: Sequence[float]) -> dict[str, int]:
    """Budgets evenly from 5 % above the floor, the largest working set of one operation, and at these shares."""
    least = ABOVE_FLOOR * (Problem(graph, 0).floor.bytes - graph.resident_bytes) / whole
    named = {f"floor + {ABOVE_FLOOR - 1:.0%}": least} if number else {}
    evenly = [least + (1 - least) * k / number for k in range(1, number)]
    named |= {f"{share:.1%}": share for share in (*evenly, *shares)}
    return {name: int(share * whole) for name, share in named.items()}


def our_steps(
    case: ModelCase, graph: sc.Graph, wanted: Mapping[str, int], time_limit: float
) -> Iterator[tuple[str, Step]]:
    """Steps that add at most the bytes named to the resident ones, with the fewest FLOPs; none where none is found."""
    budgets = {name: graph.resident_bytes + added for name, added in wanted.items()}
    print(f"planning {len(budgets)} budgets", file=sys.stderr, flush=True)
    rows = {row.budget_bytes: row for row in sc.frontier(graph, list(budgets.values()), time_limit=time_limit)}
    for name, budget in budgets.items():
        if rows[budget].schedule is not None:
            module = checkpointed(case.module, plan_of(graph, rows[budget]), case.args, case.kwargs, loss=case.loss)
            yield OURS + name, training_step(module, case.args, case.kwargs)


HEAD = (
    "model", "point", "peak", "allocator peak", "FLOPs", "time",
    "our peak", "our allocator peak", "our FLOPs", "our time",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--points", nargs="*", default=[], help='how their names begin, such as "memory budget 0.5"')
    parser.add_argument("--budgets", type=int, default=BUDGETS, help="how many of ours")
    parser.add_argument(
        "--time-limit", type=float, default=60.0, dest="seconds", help="seconds for a model's schedules"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed runs of each step")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(HEAD)
    for title in options.models:
        for row in compare(title, options):
            writer.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
