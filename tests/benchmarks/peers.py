"""Side by side with PyTorch's own checkpointing: peak, FLOPs and time of one step, all measured.

    python tests/benchmarks/peers.py > tests/benchmarks/peers.csv

Arguments are names of models; `--points` keeps to a few points of the peers, `--budgets` to a
few of ours, and `--time-limit` gives the seconds for the schedules of a model. Peers are
PyTorch's partitioner at each `activation_memory_budget` (the joint graphs of `torch.compile`,
run as generated code as ours are), `torch.utils.checkpoint` on every block, and
`checkpoint_sequential` where the model is a sequence; all on one thread.

Ours is planned twice for each point of the peers: with `costs="flops"` for the peak of the live
storages that the peer needs ("our peak", "our FLOPs"), and with `costs="measured"` for the
allocator's peak that it needs ("our allocator peak", "our time"). And for eight budgets, evenly
from 5 % above the floor of the graph to the save-everything peak. Peaks are shares of what
AOTAutograd's step that saves everything adds to the resident tensors; FLOPs and times are over
plain eager PyTorch.

Times are CPU seconds of the process: of all steps of a model in turn, the shortest of each.
"noise" says how far that can be trusted: the largest difference, over all steps, between the
shortest time in odd and in even rounds.
"""

from __future__ import annotations

import argparse
import copy
import csv
import functools
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch._dynamo
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import scheduler as sc
from scheduler.problem import Problem
from scheduler.pytorch.costs.operators import Costs
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.allocator import Step, allocator_peak
from scheduler.pytorch.measurement.memory import (
    FlopCounter,
    StorageTracker,
    measure_times,
    resident_tensors,
    training_step,
)
from scheduler.pytorch.models.catalog import ModelCase, make_model
from scheduler.pytorch.tracing import capture

REPEATS, SECONDS = 6, 30.0


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
EVERYTHING, EACH_BLOCK, OWN = "save everything", "checkpoint each block", "ours {}"


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
    """What a step uses."""
    live_bytes, flops = live_peak_and_flops(step, case)
    return Use(live_bytes, allocator_peak(step), flops)


def live_peak_and_flops(step: Step, case: ModelCase) -> tuple[int, int]:
    """The bytes beyond the resident tensors that are live at the peak of a step, and its FLOPs."""
    tracker, counter = StorageTracker(resident_tensors(case.module, (case.args, dict(case.kwargs)))), FlopCounter()
    with counter, tracker:
        step()
    return tracker.peak_bytes, counter.flops


def merged(found: Mapping[str, Use]) -> dict[str, str]:
    """The first of each group of steps with the same live peak and FLOPs, and a label with all their names."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name, use in found.items():
        groups.setdefault((use.live_bytes, use.flops), []).append(name)
    return {
        first: ", ".join([first, *(other.removeprefix("memory budget ") for other in others)])
        for first, *others in groups.values()
    }


def planned_steps(
    case: ModelCase, costs: Costs, wanted: Mapping[str, int], whole: int, options: argparse.Namespace
) -> dict[str, Step]:
    """Steps of ours by name: of those that add no more than their bytes to the resident ones the cheapest.

    Parameters
    ----------
    case : ModelCase
    costs : "measured" or "flops"
        With measured times, peaks are the allocator's.
    wanted : mapping of str to int
        Bytes; our own budgets come on top of them.
    whole : int
        Bytes that saving everything adds.
    options : argparse.Namespace
        Numbers of budgets and seconds.

    Returns
    -------
    dict of str to Step
        Equal schedules are one step; there is none where no schedule was found.
    """
    captured = capture(case.module, case.args, case.kwargs, case.loss, costs=costs)
    graph = captured.graph
    wanted = {**wanted, **own_budgets(graph, whole, options.budgets)}
    budgets = {name: graph.resident_bytes + added for name, added in wanted.items()}
    rows = sc.frontier(graph, sorted(set(budgets.values())), time_limit=options.seconds)
    schedules = {row.budget_bytes: row.schedule for row in rows}

    @functools.cache
    def step_of(schedule: sc.Schedule) -> Step:
        module = build(case.module, captured, schedule, case.args, case.kwargs, loss=case.loss)
        return training_step(module, case.args, case.kwargs)

    return {name: step_of(found) for name, budget in budgets.items() if (found := schedules[budget]) is not None}


def own_budgets(graph: sc.Graph, whole: int, number: int) -> dict[str, int]:
    """Bytes beyond the resident ones: evenly from 5 % above the floor, the largest working set of one operation."""
    least = int(ABOVE_FLOOR * (Problem(graph, 0).floor.bytes - graph.resident_bytes))
    return {OWN.format(k + 1): least + (whole - least) * k // number for k in range(number)}


@dataclass(frozen=True)
class Times:
    """Shortest times of steps, and how far they can be trusted.

    Attributes
    ----------
    seconds : dict of Step to float
        CPU seconds.
    noise : float
        The largest relative difference, over all steps, between odd and even rounds.
    """

    seconds: dict[Step, float]
    noise: float


def timed(steps: Iterable[Step], repeats: int) -> Times:
    """The times of distinct steps, run in turn."""
    distinct = list(dict.fromkeys(steps))
    rounds = measure_times({str(k): step for k, step in enumerate(distinct)}, repeats, clock=time.process_time).values()
    halves = [(min(seconds[::2]), min(seconds[1::2])) for seconds in rounds]
    return Times(
        {step: min(half) for step, half in zip(distinct, halves, strict=True)},
        max(max(half) / min(half) - 1 for half in halves),
    )


def compare(title: str, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The rows of one model."""
    model = MODELS[title]
    case = model.make()
    eager = eager_step(case)
    _, eager_flops = live_peak_and_flops(eager, case)
    steps: dict[str, Step] = {}
    found: dict[str, Use] = {}
    for name, step, owner in peer_steps(
        model, case, lambda name: not options.points or any(name.startswith(point) for point in options.points)
    ):
        steps[name], found[name] = step, measured(step, owner)
        print(title, name, found[name], file=sys.stderr, flush=True)
    labels = merged(found)
    whole = found[EVERYTHING].live_bytes
    shares = {f"{share:.1%}": int(share * whole) for share in model.shares}
    live = {name: found[name].live_bytes for name in labels} | shares
    fewest = planned_steps(case, "flops", live, whole, options)
    allocated = {name: found[name].allocator_bytes for name in labels} | shares
    fastest = planned_steps(case, "measured", allocated, whole, options)
    print(title, f"{len(fewest)} and {len(fastest)} budgets planned", file=sys.stderr, flush=True)
    named = [*labels, *shares, *(OWN.format(k + 1) for k in range(options.budgets))]
    points = [name for name in named if name in labels or name in fewest or name in fastest]
    work = {step: live_peak_and_flops(step, case) for step in fewest.values()}
    held = {step: allocator_peak(step) for step in fastest.values()}
    turns = [table[name] for name in points for table in (steps, fastest) if name in table]
    times = timed([eager, *turns], options.repeats)

    def share(size: int) -> str:
        return f"{size / whole:.4f}"

    def flops(number: int) -> str:
        return f"{number / eager_flops:.4f}"

    def seconds(step: Step) -> str:
        return f"{times.seconds[step] / times.seconds[eager]:.3f}"

    for name in points:
        row = {"model": title, "point": labels.get(name, name), "noise": f"{times.noise:.3f}"}
        if name in labels:
            use = found[name]
            row |= {"peak": share(use.live_bytes), "allocator peak": share(use.allocator_bytes)}
            row |= {"FLOPs": flops(use.flops), "time": seconds(steps[name])}
        if name in fewest:
            live_bytes, number = work[fewest[name]]
            row |= {"our peak": share(live_bytes), "our FLOPs": flops(number)}
        if name in fastest:
            step = fastest[name]
            row |= {"our allocator peak": share(held[step]), "our time": seconds(step)}
        yield row


HEAD = (
    "model", "point", "peak", "allocator peak", "FLOPs", "time",
    "our peak", "our FLOPs", "our allocator peak", "our time", "noise",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table as CSV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--points", nargs="*", default=[], help='how their names begin, such as "memory budget 0.5"')
    parser.add_argument("--budgets", type=int, default=BUDGETS, help="how many of ours")
    parser.add_argument(
        "--time-limit", type=float, default=SECONDS, dest="seconds", help="for a model's schedules, with either costs"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS, help="timed runs of each step, at least 2")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    writer = csv.DictWriter(sys.stdout, HEAD, restval="", lineterminator="\n")
    writer.writeheader()
    for title in options.models:
        for row in compare(title, options):
            writer.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
