"""What plans lose under `torch.utils.checkpoint`: peak and FLOPs of one step, with the plan and with its exports.

    python tests/benchmarks/checkpoint_exports.py > tests/benchmarks/checkpoint_exports.csv

Peaks are live storages beyond the resident ones, over those of plain PyTorch; FLOPs are counted,
over plain PyTorch's. Layers are those of `ModelCase.layered`; regions are a model's blocks.
"""

from __future__ import annotations

import copy
import csv
import functools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import scheduler as sc
from scheduler.pytorch import checkpointed, profile_layers, trace
from scheduler.pytorch.integrations.torch_checkpoint import layer_spans, selective_contexts
from scheduler.pytorch.measurement.memory import FlopCounter, StorageTracker, resident_tensors
from scheduler.pytorch.models.catalog import ModelCase, make_model

BUDGETS = ("60%", "40%")
TIME_LIMIT = 20.0
Step = Callable[[], object]


def cost(module: nn.Module, case: ModelCase, forward: Callable[..., Tensor]) -> tuple[int, int]:
    """Peak in bytes beyond the resident ones, and FLOPs, of one step."""
    module.zero_grad()
    with FlopCounter() as counter, StorageTracker(resident_tensors(module, case.args)) as tracker:
        forward(*case.args).backward()
    return tracker.peak_bytes, counter.flops


def with_regions(module: nn.Module, regions: dict[str, nn.Module], plan: sc.Plan | None) -> nn.Module:
    """Recompute these submodules under `torch.utils.checkpoint`; with a plan, save in them what it saves."""
    for name, region in regions.items():
        options = {} if plan is None else {"context_fn": selective_contexts(plan, name)}
        region.forward = functools.partial(checkpoint, region.forward, use_reentrant=False, **options)
    return module


def blocks_of(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules that make up the blocks of a GPT-2."""
    return {f"blocks.{name}": block for name, block in module.blocks.named_children()}


def in_spans(layers: nn.Sequential, plan: sc.Plan) -> Callable[[object], object]:
    """Layers one after the other, in the spans of a plan."""
    parts = iter(layers)
    spans = [(nn.Sequential(*(next(parts) for _ in span.layers)), span.recompute) for span in layer_spans(plan)]

    def forward(x: object) -> object:
        for span, recompute in spans:
            x = checkpoint(span, x, use_reentrant=False) if recompute else span(x)
        return x

    return forward


def rows() -> Iterator[list[str]]:
    """One row per model, budget and way to run."""
    torch.set_num_threads(1)
    case = make_model("gpt2")
    graph = trace(case.module, case.args, loss=case.loss, costs="flops")
    plain_peak, plain_flops = cost(case.module, case, case.module)

    def row(budget: str, way: str, found: tuple[int, int]) -> list[str]:
        return ["gpt2", budget, way, f"{found[0] / plain_peak:.1%}", f"{found[1] / plain_flops - 1:.2%}"]

    module = copy.deepcopy(case.module)
    yield row("", "every block recomputed", cost(module, case, with_regions(module, blocks_of(module), None)))
    for budget in BUDGETS:
        plan = sc.make_plan(graph, budget, time_limit=TIME_LIMIT)
        module = checkpointed(copy.deepcopy(case.module), plan, case.args, loss=case.loss)
        yield row(budget, "the plan, by operations", cost(module, case, module))
        module = copy.deepcopy(case.module)
        yield row(
            budget, "its policy, block by block", cost(module, case, with_regions(module, blocks_of(module), plan))
        )
        module = copy.deepcopy(case.module)
        yield row(budget, "its policy, in one region", cost(module, case, with_regions(module, {"": module}, plan)))
    layered = case.layered()
    chain = profile_layers(layered.module, layered.args)
    for budget in BUDGETS:
        plan = sc.make_plan(chain, budget)
        module = copy.deepcopy(layered.module)
        yield row(budget, "the plan, by layers", cost(module, layered, checkpointed(module, plan, layered.args)))
        module = copy.deepcopy(layered.module)
        yield row(budget, "its spans of layers", cost(module, layered, in_spans(module, plan)))


if __name__ == "__main__":
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["model", "budget", "way", "peak", "FLOPs added"])
    writer.writerows(rows())
