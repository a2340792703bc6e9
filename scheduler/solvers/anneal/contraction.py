"""Contract a graph for annealing: fold views into their bases, and store everything in flat arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

from scheduler.graph import Graph
from scheduler.solvers.anneal.retention_loop import RetentionModel
from scheduler.solvers.anneal.state import Flags, Ints, Model
from scheduler.solvers.graph_arrays import flat_rows, graph_arrays, joined_tensors
from scheduler.solvers.ilp.views import fold_views
from scheduler.solvers.walk import cheapest_producers

MOST_VIEWS = 62
"""Views on the same tensors that are told apart; the time of each further one counts once, as that of a first run."""


class Contraction:
    """A graph whose views are folded into their bases.

    A reader of a folded view (`fold_views`) reads its base. The first run of a view stays in the
    sequence as a reader of the base without outputs; `expand` repeats the view before a reader
    if the base has been recomputed. Other outputs on the storage of an input count anew from the
    next run on, twice as long as the input is read then; so memory here is at least that of the
    simulator.

    Parameters
    ----------
    graph : Graph
    budget_bytes : int
    """

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, self.budget_bytes = graph, budget_bytes
        index = graph.index
        views = fold_views(graph)
        self.root, self.folded = views.root, views.folded
        self.views: list[tuple[int, ...]] = [()] * len(graph.tensors)
        """Per folded tensor, the views to run on its base, its own producer included, in order."""
        for i in range(len(graph.operations)):
            if self.folded[i]:
                chain = sorted({view for t in index.inputs[i] for view in self.views[t]} | {i})
                for t in index.outputs[i]:
                    self.views[t] = tuple(chain)

    def contract(self, runs: Sequence[int]) -> tuple[list[int], list[bool], dict[int, int]]:
        """Return the sequence of runs to anneal, which of them are fixed, and the first operation of each task."""
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
        version = [0] * len(self.graph.tensors)
        viewed: dict[int, int] = {}
        runs: list[int] = []

        def ensure(tensor: int) -> None:
            for view in self.views[tensor]:
                base_version = version[self.root[tensor]]
                if viewed.get(view) != base_version:
                    viewed[view] = base_version
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
                version[tensor] += 1
        for tensor, result in enumerate(index.is_result):
            if result:
                ensure(tensor)
        return runs

    @cached_property
    def model(self) -> Model:
        """The contracted graph as flat arrays for the kernels."""
        graph, index = self.graph, self.graph.index
        inputs, outputs = self._inputs, self._outputs()
        groups = [list(dict.fromkeys(index.storage_of[t] for t in row)) for row in outputs]
        output_groups = [
            [group.index(index.storage_of[t]) for t in row] for group, row in zip(groups, outputs, strict=True)
        ]
        shift = self._byte_shift()
        input_start, input_ids = flat_rows(inputs)
        output_start, output_ids = flat_rows(outputs)
        group_start, group_bytes = flat_rows([[_rounded_up(index.storage_bytes[s], shift) for s in g] for g in groups])
        producers, producer_groups = self._producers(outputs, output_groups)
        producer_start, producer_ids = flat_rows(producers)
        readers = self._readers(inputs)
        reader_start, reader_ids = flat_rows(readers)
        rows, group_views = self._view_rows(outputs, output_groups)
        bits = {view: 1 << k for row in rows for k, view in enumerate(row)}
        view_start, view_ids = flat_rows(rows)
        needed = [
            self._masks(index.outputs[i][:1] if folded else index.inputs[i], bits)
            for i, folded in enumerate(self.folded)
        ]
        of_results = self._masks((t for t, result in enumerate(index.is_result) if result), bits)
        task_start, task_members = flat_rows([list(task) for task in index.tasks])
        return Model(
            input_start=input_start,
            inputs=input_ids,
            output_start=output_start,
            outputs=output_ids,
            output_group=flat_rows(output_groups)[1],
            group_start=group_start,
            group_bytes=group_bytes,
            late=np.array(
                [s in {index.storage_of[t] for t in row} for row, g in zip(inputs, groups, strict=True) for s in g],
                dtype=np.bool_,
            ),
            producer_start=producer_start,
            producers=producer_ids,
            producer_group=flat_rows(producer_groups)[1],
            reader_start=reader_start,
            readers=reader_ids,
            group_views=group_views,
            view_start=view_start,
            view_times=np.array([graph.operations[i].time for i in view_ids.tolist()], dtype=np.float64),
            input_views=np.array([needed[i][t] for i, row in enumerate(inputs) for t in row], dtype=np.int64),
            reader_views=np.array([needed[i][t] for t, row in enumerate(readers) for i in row], dtype=np.int64),
            result_views=np.array([of_results.get(t, 0) for t in range(len(graph.tensors))], dtype=np.int64),
            task_start=task_start,
            task_members=task_members,
            task=np.array(index.task_of, dtype=np.int64),
            recompute=np.array(self._recomputing_operations(), dtype=np.int64),
            is_result=self._is_result(),
            backward=np.array([op.phase == "backward" for op in graph.operations], dtype=np.bool_),
            time=np.array([0.0 if i in bits else op.time for i, op in enumerate(graph.operations)], dtype=np.float64),
            workspace=np.array([_rounded_up(op.workspace_bytes, shift) for op in graph.operations], dtype=np.int64),
            budget=np.array([(self.budget_bytes - graph.resident_bytes) >> shift], dtype=np.int64),
        )

    @cached_property
    def retention_model(self) -> RetentionModel:
        """The contracted graph for the kernels that decide about tensors; its order is the input order."""
        graph, index = self.graph, self.graph.index
        inputs, outputs = self._inputs, self._outputs()
        arrays = graph_arrays(graph)
        input_start, input_ids = flat_rows(inputs)
        output_start, output_ids = flat_rows(outputs)
        uses: list[list[tuple[int, int]]] = [[] for _ in graph.tensors]
        edge = len(uses)
        for i in range(len(graph.operations)):
            for tensor in outputs[i]:
                uses[tensor].append((i, tensor))
            for tensor in inputs[i]:
                uses[tensor].append((i, edge))
                edge += 1
        use_start, use_operation = flat_rows([[i for i, _ in row] for row in uses])
        view_start, views = flat_rows(self._needed_views())
        return RetentionModel(
            graph=arrays._replace(
                input_start=input_start,
                inputs=input_ids,
                output_start=output_start,
                outputs=output_ids,
                joined=joined_tensors(inputs, outputs, index.storage_of),
                is_result=self._is_result(),
            ),
            folded=np.array(self.folded, dtype=np.bool_),
            view_start=view_start,
            views=views,
            base=np.array(
                [self.root[index.outputs[i][0]] if self.folded[i] else -1 for i in range(len(graph.operations))],
                dtype=np.int64,
            ),
            use_start=use_start,
            use_operation=use_operation,
            use_gap=flat_rows([[gap for _, gap in row] for row in uses])[1],
            tensor=np.concatenate([np.arange(len(uses), dtype=np.int64), input_ids]),
            step_of=np.full(len(graph.operations), -1, dtype=np.int64),
            backward=np.array([op.phase == "backward" for op in graph.operations], dtype=np.bool_),
            budget=self.budget_bytes - graph.resident_bytes,
        )

    def _view_rows(
        self, outputs: Sequence[Sequence[int]], output_groups: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], Ints]:
        """Return rows of views on the same tensors, as many as a mask has bits for, and the row of each group."""
        rows: list[list[int]] = []
        row_of: dict[int, int] = {}
        group_views: list[int] = []
        for tensors, groups in zip(outputs, output_groups, strict=True):
            for group in range(max(groups, default=-1) + 1):
                members = [t for t, other in zip(tensors, groups, strict=True) if other == group]
                row = next((row_of[t] for t in members if t in row_of), len(rows))
                if row == len(rows):
                    rows.append([])
                row_of.update(dict.fromkeys(members, row))
                group_views.append(row)
        for i, folded in enumerate(self.folded):
            if folded:
                row = row_of[self.root[self.graph.index.outputs[i][0]]]
                if len(rows[row]) < MOST_VIEWS:
                    rows[row].append(i)
        return rows, np.array(group_views, dtype=np.int64)

    def _masks(self, tensors: Iterable[int], bits: Mapping[int, int]) -> dict[int, int]:
        """Return the mask of the views that some tensors are, for each of their bases."""
        masks: dict[int, int] = {}
        for t in tensors:
            masks.setdefault(self.root[t], 0)
            for view in self.views[t]:
                masks[self.root[t]] |= bits.get(view, 0)
        return masks

    def _needed_views(self) -> list[list[int]]:
        """Return, per operation, the views that its inputs are (for a view, all up to itself); last, the results'."""
        index = self.graph.index
        rows = [
            list(self.views[index.outputs[i][0]]) if self.folded[i] else self._views_of(index.inputs[i])
            for i in range(len(self.graph.operations))
        ]
        return [*rows, self._views_of(t for t, result in enumerate(index.is_result) if result)]

    def _views_of(self, tensors: Iterable[int]) -> list[int]:
        return list(dict.fromkeys(view for t in tensors for view in self.views[t]))

    @cached_property
    def _inputs(self) -> list[list[int]]:
        return [sorted({self.root[t] for t in ids} - {-1}) for ids in self.graph.index.inputs]

    def _outputs(self) -> list[list[int]]:
        index = self.graph.index
        return [[] if folded else list(ids) for folded, ids in zip(self.folded, index.outputs, strict=True)]

    def _producers(
        self, outputs: Sequence[Sequence[int]], output_groups: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Return, per tensor, the operations that produce it, and its group among the outputs of each."""
        producers: list[list[int]] = [[] for _ in self.graph.tensors]
        groups: list[list[int]] = [[] for _ in self.graph.tensors]
        for i, (tensors, row) in enumerate(zip(outputs, output_groups, strict=True)):
            for tensor, group in zip(tensors, row, strict=True):
                producers[tensor].append(i)
                groups[tensor].append(group)
        return producers, groups

    def _readers(self, inputs: Sequence[Sequence[int]]) -> list[list[int]]:
        readers: list[list[int]] = [[] for _ in self.graph.tensors]
        for i, tensors in enumerate(inputs):
            for tensor in tensors:
                readers[tensor].append(i)
        return readers

    def _recomputing_operations(self) -> list[int]:
        operations = self.graph.operations
        return [i if i >= 0 and operations[i].repeatable else -1 for i in cheapest_producers(self.graph)]

    def _is_result(self) -> Flags:
        is_result = np.zeros(len(self.graph.tensors), dtype=np.bool_)
        for tensor, result in enumerate(self.graph.index.is_result):
            if result and self.root[tensor] >= 0:
                is_result[self.root[tensor]] = True
        return is_result

    def _byte_shift(self) -> int:
        """Return by how many bits to shift sizes so that areas, which are sums over slots, fit 64 bits."""
        graph = self.graph
        total = sum(graph.index.storage_bytes) + sum(op.workspace_bytes for op in graph.operations)
        return max(0, (total * 16).bit_length() + (4 * len(graph.operations) + 64).bit_length() - 62)


def _rounded_up(size: int, shift: int) -> int:
    """Return a size over 2^shift, rounded up."""
    return -(-size >> shift)
