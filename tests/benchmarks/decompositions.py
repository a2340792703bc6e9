"""What PyTorch's decompositions would change in a captured step: its floor, its peak, and its frontier.

    python tests/benchmarks/decompositions.py > tests/benchmarks/decompositions.csv

Models are those of the comparison with PyTorch's own checkpointing (`peers.py`). Each is
captured as it is ("none"), with one decomposition at a time of those that Inductor's
partitioner works on, and with all of core ATen; what leaves the graph as it is, is left out.
"floor" is the largest working set of one operation, "peak" that of the step that saves
everything, both beyond the resident tensors and as shares of the peak without
decompositions; "overhead" is the cheapest found, in FLOPs over the step without, at shares of
that peak; "same gradients" says whether they are those of plain eager PyTorch bit by bit.
"""

from __future__ import annotations

import csv
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import torch
from peers import MODELS
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._functorch import aot_autograd

import scheduler as sc
from scheduler.errors import CaptureError
from scheduler.problem import Problem
from scheduler.pytorch.capture.captured_step import Capture
from scheduler.pytorch.capture.operators import aten
from scheduler.pytorch.execute.runner import build
from scheduler.pytorch.measurement.memory import training_step
from scheduler.pytorch.models.catalog import ModelCase
from scheduler.pytorch.tracing import capture

Table = Mapping[object, Callable[..., object]]

OPERATORS = {
    "softmax": [aten._softmax, aten._log_softmax],
    "softmax backward": [aten._softmax_backward_data, aten._log_softmax_backward_data],
    "cross entropy backward": [aten.nll_loss_backward, aten.nll_loss2d_backward],
    "layer norm": [aten.native_layer_norm],
    "layer norm backward": [aten.native_layer_norm_backward],
    "batch norm backward": [aten.native_batch_norm_backward],
    "activations backward": [
        aten.gelu_backward, aten.silu_backward, aten.tanh_backward, aten.threshold_backward,
    ],
    "embedding backward": [aten.embedding_dense_backward],
}  # fmt: skip
SHARES = (0.3, 0.5, 0.7)
SECONDS = 15.0
"""For the three schedules of a graph."""
COLUMNS = [
    "model", "decomposition", "operations", "floor", "peak",
    *(f"overhead at {share:.0%}" for share in SHARES), "same gradients",
]  # fmt: skip


def tables() -> Iterator[tuple[str, Table]]:
    """The decompositions by name."""
    yield "none", {}
    for name, operators in OPERATORS.items():
        yield name, get_decompositions(operators)
    yield "core ATen", core_aten_decompositions()


def captured(case: ModelCase, table: Table) -> Capture:
    """The step with these decompositions."""
    export = functools.partial(aot_autograd.aot_export_joint_with_descriptors, decompositions=dict(table))
    with mock.patch.object(aot_autograd, "aot_export_joint_with_descriptors", export):
        return capture(case.module, case.args, case.kwargs, case.loss, costs="flops")


def gradients(case: ModelCase, step: Callable[[], object]) -> list[torch.Tensor]:
    """The gradients that a step leaves."""
    step()
    return [p.grad.clone() for p in case.module.parameters() if p.grad is not None]


def rows(title: str) -> Iterator[list[object]]:
    """The rows of one model."""
    case = MODELS[title].make()
    expected = gradients(case, training_step(case.module, case.args, case.kwargs, loss=case.loss))
    plain: sc.Graph | None = None
    for name, table in tables():
        try:
            found = captured(case, table)
        except CaptureError as error:
            print(title, name, error, file=sys.stderr)
            continue
        graph, resident = found.graph, found.graph.resident_bytes
        plain = plain or graph
        if graph is not plain and graph.structure_digest == plain.structure_digest:
            continue
        base = Problem(plain, 0).baseline
        whole = base.peak_bytes - plain.resident_bytes
        problem = Problem(graph, 0)
        answers = sc.frontier(graph, [resident + int(share * whole) for share in SHARES], time_limit=SECONDS)
        step = build(case.module, found, problem.save_everything, case.args, case.kwargs, loss=case.loss)
        made = gradients(case, training_step(step, case.args, case.kwargs))
        yield [
            title,
            name,
            len(graph.operations),
            f"{(problem.floor.bytes - resident) / whole:.4f}",
            f"{(problem.baseline.peak_bytes - resident) / whole:.4f}",
            *("" if answer.schedule is None else f"{answer.time / base.time - 1:.4f}" for answer in answers),
            "yes" if all(map(torch.equal, made, expected)) else "no",
        ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(COLUMNS)
    for title in sys.argv[1:] or MODELS:
        for cells in rows(title):
            writer.writerow(cells)
            sys.stdout.flush()
