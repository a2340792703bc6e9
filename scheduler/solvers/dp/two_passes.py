"""Schedule a chain quickly, each layer running forward at most twice, and bound every schedule.

A price per byte makes the layers independent but for what they need from the one before:
each is saved, or recomputed once from a checkpoint. One pass over the layers finds the best
choice for a price, and with it a lower bound on time for every moment of the backward phase.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from scheduler.graph.chain import Chain
from scheduler.schedule import Schedule
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import ChainCosts
from scheduler.solvers.dp.dynamic_program import build_schedule
from scheduler.solvers.dp.frontiers import Decision
from scheduler.solvers.dp.two_pass_labels import Labels, fill_labels

_PRICES = 40
"""Steps of the search for a price."""
_GOLDEN = (3 - math.sqrt(5)) / 2
_SLACKS = (1e-3, 1e-2, 1e-1)
"""By how much labels may cost more than the cheapest choices, as a share of the time of the step; each is tried, or
less where less is enough."""
_MOST_SLOTS = 2**13
_MOST_LABELS = 2**22
"""Most labels of all states together: 160 MiB."""
_FINEST = 2**14
"""Most slots in the free bytes of the chain, of which a state has those around what the cheapest choices leave it."""
_SLOTS_PER_LAYER = 64
_AMPLE_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class Known:
    """A schedule of a chain, and its extra time in quanta."""

    schedule: Schedule
    extra_time: int


class TwoPasses:
    """Schedules of a chain in which each layer runs forward at most twice, and a bound on all schedules.

    Parameters
    ----------
    chain : Chain
    costs : ChainCosts
        Of the same chain.
    budget_bytes : int
        Resident bytes included.
    bound : float
        Lower bound on the time of every schedule that is known already.

    Attributes
    ----------
    bound : float
        Lower bound on the time of every schedule.
    best : Known or None
        The fastest schedule found.
    """

    def __init__(self, chain: Chain, costs: ChainCosts, budget_bytes: int, bound: float = 0.0) -> None:
        arrays = costs.arrays
        self.chain, self.costs = chain, costs
        self.best: Known | None = None
        self._free = budget_bytes - costs.resident_bytes
        self._output = arrays.output_bytes.tolist()
        self._again = arrays.way_time[arrays.first_way[1:] - 1].tolist()
        self._modes = [
            list(
                zip(
                    range(low, high),
                    arrays.saved_bytes[low:high].tolist(),
                    arrays.extra_time[low:high].tolist(),
                    arrays.backward_workspace_bytes[low:high].tolist(),
                    strict=True,
                )
            )
            for low, high in pairwise(arrays.first_mode.tolist())
        ]
        self._keeps_input, self._keeps_output = arrays.keeps_input.tolist(), arrays.keeps_output.tolist()
        gradients = arrays.gradient_bytes[1:] + arrays.gradient_bytes[:-1]
        self._gradients = (gradients + np.diff(arrays.parameter_gradients_before)).tolist()
        self._last_gradient = int(arrays.gradient_bytes[-1])
        value, self._price = self._best_price()
        self.bound = max(bound, costs.time(max(0, math.floor(value) - 1)))

    def run(self, deadline: Deadline) -> None:
        """Search for the fastest schedule until the deadline, but at least once.

        The search is not exact: of the labels in a slot, it keeps only the cheapest.
        """
        enough = math.inf
        for share in _SLACKS:
            if deadline.passed and share > _SLACKS[0]:
                return
            slack = min(enough, share * self.costs.base)
            labels = self._labels(slack)
            last = self._fastest_end(labels)
            if last is None:
                continue
            extra_time = int(labels.time.flat[last])
            if self.best is None or extra_time < self.best.extra_time:
                self.best = Known(self._build(labels, last), extra_time)
            # The labels of a faster schedule exceed the least cost by less than this one's time exceeds the bound.
            enough = self.best.extra_time - (labels.least - self._price * self._free)
            if enough <= slack:
                return

    def _labels(self, slack: float) -> Labels:
        """Return the labels of all states."""
        slots = max(16, min(_MOST_SLOTS, _MOST_LABELS // (2 * self.costs.layers + 2)))
        unit = self._free // min(_FINEST, max(slots // 2, _SLOTS_PER_LAYER * self.costs.layers)) + 1
        found: Labels = fill_labels(self.costs.arrays, self._free, self._price, slack, slots, unit)
        return found

    def _fastest_end(self, labels: Labels) -> int | None:
        """Return the number of the fastest label at the end of the chain; None if there is none."""
        first = labels.cost.shape[1] * 2 * self.costs.layers
        ends = first + np.flatnonzero(np.isfinite(labels.cost.flat[first:]))
        return int(ends[np.argmin(labels.time.flat[ends])]) if len(ends) else None

    def _build(self, labels: Labels, number: int) -> Schedule:
        """Return the schedule of a label at the end of the chain."""
        n, slots = self.costs.layers, labels.cost.shape[1]
        decisions: dict[int, Decision] = {}
        while number:
            before = int(labels.previous.flat[number])
            mode, layer, end = int(labels.mode.flat[number]), before // slots // 2, number // slots // 2
            decisions[layer] = (mode, -1, 0) if mode >= 0 else (-1, end, _AMPLE_BYTES)
            number = before if layer else 0
        fastest = [min(modes, key=lambda entry: entry[2])[0] for modes in self._modes]

        def decide(a: int, b: int, h: int, m: int) -> Decision:
            return decisions[a] if b == n - 1 else (fastest[a], -1, 0)

        return build_schedule(self.chain, self.costs, self._free, decide)

    def _best_price(self) -> tuple[float, float]:
        """Return the best lower bound on the extra time, and its price per byte."""
        most = 2.0 * max((time for time in self._again), default=0.0)
        least = min((saved for modes in self._modes for _, saved, _, _ in modes if saved), default=1)
        low, high = 0.0, most / least
        best = (0.0, 0.0)
        for _ in range(_PRICES):
            first, second = low + _GOLDEN * (high - low), high - _GOLDEN * (high - low)
            values = self._lower_bound(first), self._lower_bound(second)
            best = max(best, (values[0], first), (values[1], second))
            low, high = (first, high) if values[0] < values[1] else (low, second)
        return best

    def _lower_bound(self, price: float) -> float:
        """Return the largest over all moments of the least extra time plus the price of the bytes over the limit."""
        saved, held, lost, both = math.inf, 0.0, math.inf, math.inf  # as `best` in `one_cut_bound`, flattened
        worst = -math.inf
        for i, modes in enumerate(self._modes):
            any_held = min(held, both)
            kept = any_held if self._keeps_input[i] else min(any_held, saved, lost)
            source = min(any_held, lost)
            twice = any_held if self._keeps_input[i] else source
            output = self._output[i + 1]
            fixed = (output if self._keeps_output[i] else 0) + self._gradients[i]
            at_backward = min(extra + price * (size + workspace) for _, size, extra, workspace in modes)
            worst = max(worst, kept + at_backward + price * fixed)
            mode = min(extra + price * size for _, size, extra, _ in modes)
            again = min(source, twice + mode) + self._again[i]
            bare = source + self._again[i] if self._keeps_output[i] else again
            saved = math.inf if self._keeps_output[i] else kept + mode
            held, lost, both = kept + mode + price * output, bare, again + price * output
        return max(worst, min(held, both) + price * self._last_gradient) - price * self._free
