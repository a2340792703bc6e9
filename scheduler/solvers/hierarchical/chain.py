"""Represent a deep network as a chain: blocks become layers, and their modes the modes of the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from scheduler.graph import Graph
from scheduler.graph.chain import Chain
from scheduler.graph.layers import Layer, Mode
from scheduler.schedule import Schedule, runs_of, schedule_from_runs
from scheduler.solvers.graph_arrays import graph_arrays, profile_runs
from scheduler.solvers.hierarchical.graphs import BlockGraph
from scheduler.solvers.hierarchical.modes import BlockMode, BlockModes


class BlockChain:
    """The chain of a network's blocks, and the translation of its schedules to the network.

    Tensors between adjacent blocks are the outputs and gradients of the chain. The chain ignores
    tensors that cross more than one block (`passing_bytes`). So memory on the chain is only close
    to that of the network, and every schedule is simulated on the network.

    Parameters
    ----------
    graph : Graph
    parts : sequence of BlockGraph
    modes : dict of int to BlockModes
        By id of the block's graph.
    """

    def __init__(self, graph: Graph, parts: Sequence[BlockGraph], modes: dict[int, BlockModes]) -> None:
        self.graph, self.parts = graph, parts
        self._modes = [modes[id(part.graph)] for part in parts]
        best = {key: entry.best for key, entry in modes.items()}
        self._kept = [best[id(part.graph)] for part in parts]
        without_saving = {key: _forward_without_saving(entry) for key, entry in modes.items()}
        following = [*(part.gradient_bytes for part in parts[1:]), 0]
        self.chain = Chain(
            tuple(
                _layer(
                    str(number),
                    part,
                    modes[id(part.graph)],
                    best[id(part.graph)],
                    without_saving=without_saving[id(part.graph)],
                    gradient_bytes=gradient_bytes,
                )
                for number, (part, gradient_bytes) in enumerate(zip(parts, following, strict=True))
            ),
            input_bytes=0,
            time_unit=graph.time_unit,
        )

    @property
    def passing_bytes(self) -> int:
        """Bytes of all tensors that cross more than one block."""
        return sum(part.passing_bytes for part in self.parts)

    def expand(self, schedule: Schedule) -> Schedule:
        """Return the network's schedule for a schedule of the chain."""
        lowered = self.chain.lowered
        forward = {i: layer for layer, row in enumerate(lowered.saving) for i in row}
        forward |= {i: layer for layer, i in enumerate(lowered.without_saving)}
        backward = {i: (layer, mode) for layer, row in enumerate(lowered.backward) for mode, i in enumerate(row)}
        runs: list[int] = []
        ran: set[int] = set()
        for position in runs_of(lowered.graph, schedule):
            if position in forward:
                runs += self._forward_runs(forward[position], recompute=forward[position] in ran)
                ran.add(forward[position])
            elif position in backward:
                layer, mode = backward[position]
                own = self._kept[layer][mode].runs[len(self._modes[layer].forward) :]
                runs += [i for i in self._positions(layer, own) if i >= 0]
        return schedule_from_runs(self.graph, without_dead_runs(self.graph, runs))

    def _forward_runs(self, layer: int, *, recompute: bool) -> list[int]:
        """Return the runs of a block's forward; a recomputation omits what need not or must not run again."""
        graph, part = self._modes[layer].graph, self.parts[layer]
        runs = self._modes[layer].forward
        if recompute:
            lasting = part.exported - part.output
            runs = [
                i for i in runs if graph.operations[i].repeatable and not lasting.issuperset(graph.index.outputs[i])
            ]
        return self._positions(layer, runs)

    def _positions(self, layer: int, runs: Iterable[int]) -> list[int]:
        """Return operations of a block's graph as operations of the network; -1 for the marker."""
        return [self.parts[layer].operations[i] for i in runs]


def without_dead_runs(graph: Graph, runs: Sequence[int]) -> list[int]:
    """Return the runs without recomputations whose outputs nothing reads before they are recomputed."""
    index = graph.index
    first: dict[int, int] = {}
    for position, i in enumerate(runs):
        first.setdefault(i, position)
    wanted = {t for t, result in enumerate(index.is_result) if result}
    kept: list[int] = []
    for position in range(len(runs) - 1, -1, -1):
        i = runs[position]
        if first[i] == position or not wanted.isdisjoint(index.outputs[i]):
            kept.append(i)
            wanted.difference_update(index.outputs[i])
            wanted.update(index.inputs[i])
    return kept[::-1]


def _layer(
    name: str,
    part: BlockGraph,
    modes: BlockModes,
    best: Sequence[BlockMode],
    *,
    without_saving: tuple[float, int],
    gradient_bytes: int,
) -> Layer:
    index = part.graph.index
    results = {index.storage_of[t] for t, result in enumerate(index.is_result) if result}
    parameter_gradient_bytes = sum(index.storage_bytes[s] for s in results)
    first, *others = [_mode(mode, modes.forward_time, parameter_gradient_bytes) for mode in best]
    time, workspace_bytes = without_saving
    return Layer(
        name,
        first.forward_time,
        first.backward_time,
        part.output_bytes,
        first.saved_bytes,
        gradient_bytes=gradient_bytes,
        parameter_gradient_bytes=parameter_gradient_bytes,
        keeps_output=part.reads_output,
        forward_without_saving_time=time,
        forward_without_saving_workspace_bytes=workspace_bytes,
        forward_with_saving_workspace_bytes=first.forward_workspace_bytes,
        backward_workspace_bytes=first.backward_workspace_bytes,
        modes=tuple(others),
    )


def _mode(mode: BlockMode, forward_time: float, parameter_gradient_bytes: int) -> Mode:
    return Mode(
        forward_time,
        max(0.0, mode.time - forward_time),
        mode.saved_bytes,
        forward_workspace_bytes=max(0, mode.forward_bytes - mode.saved_bytes),
        backward_workspace_bytes=max(0, mode.backward_bytes - mode.saved_bytes - parameter_gradient_bytes),
    )


def _forward_without_saving(modes: BlockModes) -> tuple[float, int]:
    """Return time and peak bytes of the part of a block's forward that its results need."""
    graph, index = modes.graph, modes.graph.index
    wanted = {t for t, result in enumerate(index.is_result) if result}
    runs: list[int] = []
    for i in reversed(modes.forward):
        if not wanted.isdisjoint(index.outputs[i]):
            runs.append(i)
            wanted.update(index.inputs[i])
    runs.reverse()
    if not runs:
        return 0.0, 0
    memory = profile_runs(graph_arrays(graph), np.array(runs, dtype=np.int64)).memory
    return math.fsum(graph.operations[i].time for i in runs), int(memory.max())
