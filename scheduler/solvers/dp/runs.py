"""Persistent schedules of a chain: three actions on layers, as runs of operations of the lowered graph."""

from __future__ import annotations

from functools import cached_property

from scheduler.graph.chain import Chain
from scheduler.schedule import Schedule, schedule_from_runs


class ChainRuns:
    """The runs of a chain's operations, recorded action by action.

    Parameters
    ----------
    chain : Chain

    Attributes
    ----------
    runs : list of int
        Operations, by position in the lowered graph.
    """

    def __init__(self, chain: Chain) -> None:
        self.lowered = chain.lowered
        self.last = len(chain.layers) - 1
        self.runs: list[int] = []
        self._chain = chain

    @cached_property
    def _ways(self) -> list[list[tuple[float, int, int]]]:
        """Per layer: time, kept bytes and position of each way to run it forward, the fastest first."""
        return [
            sorted(
                (operation.time, kept_bytes, position)
                for position, kept_bytes in zip(
                    (self.lowered.without_saving[i], *self.lowered.saving[i]),
                    (0, *(mode.saved_bytes for mode in layer.all_modes)),
                    strict=True,
                )
                for operation in [self.lowered.graph.operations[position]]
            )
            for i, layer in enumerate(self._chain.layers)
        ]

    def forward(self, layer: int) -> None:
        """Run a layer forward without saving."""
        self.runs.append(self.lowered.without_saving[layer])

    def forward_within(self, layer: int, spare_bytes: int) -> None:
        """Run a layer forward, keeping nothing, in the fastest way that fits in the bytes besides input and output."""
        operations = self.lowered.graph.operations
        for _, kept_bytes, position in self._ways[layer]:
            if kept_bytes + operations[position].workspace_bytes <= spare_bytes:
                self.runs.append(position)
                return
        raise AssertionError("no way of running the layer fits")

    def forward_saving(self, layer: int, mode: int = 0) -> None:
        """Run a layer forward with saving; the loss and its backward follow after the last layer."""
        self.runs.append(self.lowered.saving[layer][mode])
        if layer == self.last:
            self.runs += [self.lowered.loss, self.lowered.loss_backward]

    def backward(self, layer: int, mode: int = 0) -> None:
        """Run a layer backward."""
        self.runs.append(self.lowered.backward[layer][mode])

    def schedule(self) -> Schedule:
        """Return the schedule of these runs; everything is freed after its last use."""
        return schedule_from_runs(self.lowered.graph, self.runs)
