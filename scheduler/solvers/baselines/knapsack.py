"""A knapsack over saved bytes, as in PyTorch's partitioner with `activation_memory_budget`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.graph import Graph
from scheduler.problem import Problem
from scheduler.solution import Proposal
from scheduler.solvers.baselines.capacity_search import CapacitySearch
from scheduler.solvers.baselines.kept_sets import forward_operations
from scheduler.solvers.deadline import Deadline

BUCKETS = 10_000
"""Number of distinct capacities, as in PyTorch."""
_GRID_CAPACITIES = 32
"""Steps of the first grid of capacities."""


def propose(problem: Problem, *, deadline: Deadline, seed: int) -> Proposal:
    """Return the fastest schedule that fits among those of a knapsack with various capacities.

    Of the storages that the forward phase allocates, those with the largest total time to
    recompute are saved whose bytes fit a capacity; the rest is recomputed when the backward phase
    needs it. PyTorch bounds these bytes by a share of their sum and ignores the peak; here the
    capacity is searched, on a grid and then by halving, so that the simulated peak fits the budget.

    Guarantee: the knapsack is solved exactly for bytes in `BUCKETS` steps; there is none for the
    schedule: the value of saving a tensor depends on what else is saved, and the peak may be
    elsewhere. Search space: input order. When: to compare with `torch.compile`. Cost:
    O(n `BUCKETS`) steps and about 50 simulated schedules. Memory: at most 16 MiB and 16 KiB an
    operation. Reference: PyTorch, `torch._functorch.config.activation_memory_budget` with the
    solver "dp"; Kellerer, Pferschy and Pisinger 2004, "Knapsack problems", section 2.3 (dynamic
    programming).

    Raises
    ------
    UnsuitableProblemError
        If the graph has no forward or no backward phase.
    """
    knapsack = Knapsack(problem.graph, forward_operations(problem.graph, "knapsack"))
    search = CapacitySearch(problem)
    search.run(lambda capacity: [knapsack.saved(capacity)], BUCKETS, _GRID_CAPACITIES, deadline)
    return Proposal(search.best, "input order")


class Knapsack:
    """The 0-1 knapsack over the storages that the forward phase allocates, for all capacities at once.

    Parameters
    ----------
    graph : Graph
    forward : sequence of int
        The needed forward operations.
    """

    def __init__(self, graph: Graph, forward: list[int]) -> None:
        index = graph.index
        values: dict[int, float] = {}
        self._tensors: dict[int, list[int]] = {}
        for i in forward:
            storages = dict.fromkeys(index.storage_of[t] for t in index.outputs[i])
            for storage in storages:
                values[storage] = values.get(storage, 0.0) + graph.operations[i].time / len(storages)
            for tensor in index.outputs[i]:
                self._tensors.setdefault(index.storage_of[tensor], []).append(tensor)
        sizes = {storage: index.storage_bytes[storage] for storage in values}
        self.total_bytes = sum(sizes.values())
        """Bytes of all storages that may be saved."""
        self._free = [storage for storage in values if not sizes[storage]]
        self._items = [storage for storage in values if sizes[storage]]
        self._weights = [-(-sizes[storage] * BUCKETS // self.total_bytes) for storage in self._items]
        self._taken = self._solve([values[storage] for storage in self._items])

    def saved(self, capacity: int) -> frozenset[int]:
        """Return the tensors that the best choice within a capacity saves.

        Parameters
        ----------
        capacity : int
            In `BUCKETS` equal parts of all bytes; with all of them, everything is saved.
        """
        chosen = list(self._free)
        if capacity >= BUCKETS:
            chosen += self._items
        else:
            for number in reversed(range(len(self._items))):
                if self._taken[number, capacity]:
                    chosen.append(self._items[number])
                    capacity -= self._weights[number]
        return frozenset(t for storage in chosen for t in self._tensors[storage])

    def _solve(self, values: list[float]) -> npt.NDArray[np.bool_]:
        """Return which items are taken, by best[c] = max(best[c], best[c - weight] + value), item by item."""
        best = np.zeros(BUCKETS + 1)
        taken = np.zeros((len(values), BUCKETS + 1), dtype=np.bool_)
        for number, (weight, value) in enumerate(zip(self._weights, values, strict=True)):
            with_it = best[: BUCKETS + 1 - weight] + value
            better = with_it > best[weight:]
            taken[number, weight:] = better
            best[weight:] = np.where(better, with_it, best[weight:])
        return taken
