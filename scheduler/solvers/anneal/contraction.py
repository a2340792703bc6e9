"""A graph as annealing sees it: views folded into their base, all in flat arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.graph import Graph
from scheduler.solvers.anneal.state import Model
from scheduler.solvers.graph_arrays import flat_rows
from scheduler.solvers.ilp.views import fold_views
from scheduler.solvers.walk import cheapest_makers


class Contraction:
    """A graph as annealing sees it: views are read where their base lies.

    A view is folded (`fold_views`): who reads it reads its base. Its first run stays in the
    sequence as a reader of the base that makes nothing; `expand` runs it again before a
    reader where the base is new. Other outputs on an input's storage are counted as new
    bytes, so that the memory here is that of the judge or more.

    Parameters
    ----------
    graph : Graph
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        index = graph.index
        views = fold_views(graph)
        self.root, self.folded = views.root, views.folded
        self.views: list[tuple[int, ...]] = [()] * len(graph.tensors)
        """Per folded tensor, the views to run on its base, itself included, in order."""
        for i in range(len(graph.operations)):
            if self.folded[i]:
                chain = sorted({view for t in index.inputs[i] for view in self.views[t]} | {i})
                for t in index.outputs[i]:
                    self.views[t] = tuple(chain)

    def contract(self, runs: Sequence[int]) -> tuple[list[int], list[bool], dict[int, int]]:
        """Return the sequence of runs to anneal, which of them are fixed, and who leads each task."""
        index = self.graph.index
        sequence: list[int] = []
        fixed: list[bool] = []
        leads: dict[int, int] = {}
        ran: set[int] = set()
        for i in runs:
            first = index.task_of[i] not in leads
            if self.folded[i] and not first:
                continue
            leads.setdefault(index.task_of[i], i)
            sequence.append(i)
            fixed.append(first or (i in index.required and i not in ran))
            ran.add(i)
        return sequence, fixed, leads

    def expand(self, sequence: Sequence[int]) -> list[int]:
        """Return the runs of a contracted sequence, views included."""
        index = self.graph.index
        made = [0] * len(self.graph.tensors)
        viewed: dict[int, int] = {}
        runs: list[int] = []

        def ensure(tensor: int) -> None:
            for view in self.views[tensor]:
                version = made[self.root[tensor]]
                if viewed.get(view) != version:
                    viewed[view] = version
                    runs.append(view)

        for i in sequence:
            if self.folded[i]:
                if i not in viewed:
                    for tensor in index.outputs[i][:1]:
                        ensure(tensor)
                continue
            for tensor in index.inputs[i]:
                ensure(tensor)
            runs.append(i)
            for tensor in index.outputs[i]:
                made[tensor] += 1
        for tensor, result in enumerate(index.is_result):
            if result:
                ensure(tensor)
        return runs

    def model(self, budget_bytes: int) -> Model:
        """Return the contracted graph as flat arrays for the kernels."""
        graph, index = self.graph, self.graph.index
        count = len(graph.operations)
        inputs = [sorted({self.root[t] for t in index.inputs[i]} - {-1}) for i in range(count)]
        outputs = [[] if self.folded[i] else list(index.outputs[i]) for i in range(count)]
        groups = [list(dict.fromkeys(index.storage_of[t] for t in row)) for row in outputs]
        makers: list[list[tuple[int, int]]] = [[] for _ in graph.tensors]
        readers: list[list[int]] = [[] for _ in graph.tensors]
        output_group: list[list[int]] = []
        for i in range(count):
            output_group.append([groups[i].index(index.storage_of[t]) for t in outputs[i]])
            for t, group in zip(outputs[i], output_group[i], strict=True):
                makers[t].append((i, group))
            for t in inputs[i]:
                readers[t].append(i)
        remake = [m if m >= 0 and graph.operations[m].repeatable else -1 for m in cheapest_makers(graph)]
        is_result = [False] * len(graph.tensors)
        for t, result in enumerate(index.is_result):
            if result and self.root[t] >= 0:
                is_result[self.root[t]] = True
        # Areas are sums over slots: sizes so large that one could overflow are rounded up.
        budget = budget_bytes - graph.resident_bytes
        total = sum(index.storage_bytes) + sum(op.workspace_bytes for op in graph.operations)
        shift = max(0, (total * 16).bit_length() + (4 * count + 64).bit_length() - 62)
        return Model(
            *flat_rows(inputs),
            *flat_rows(outputs),
            flat_rows(output_group)[1],
            *flat_rows([[-(-index.storage_bytes[s] >> shift) for s in row] for row in groups]),
            *flat_rows([[i for i, _ in row] for row in makers]),
            flat_rows([[group for _, group in row] for row in makers])[1],
            *flat_rows(readers),
            *flat_rows([list(task) for task in index.tasks]),
            np.array(index.task_of, dtype=np.int64),
            np.array(remake, dtype=np.int64),
            np.array(is_result, dtype=np.bool_),
            np.array([op.phase == "backward" for op in graph.operations], dtype=np.bool_),
            np.array([op.time for op in graph.operations], dtype=np.float64),
            np.array([-(-op.workspace_bytes >> shift) for op in graph.operations], dtype=np.int64),
            np.array([budget >> shift], dtype=np.int64),
        )
