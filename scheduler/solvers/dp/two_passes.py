"""Schedule a long chain quickly, each layer running forward at most twice, and bound every schedule.

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
from scheduler.simulator import simulate
from scheduler.solution import relative_gap
from scheduler.solvers.deadline import Deadline
from scheduler.solvers.dp.costs import ChainCosts
from scheduler.solvers.dp.dynamic_program import build_schedule

CLOSE = 1e-4
"""A schedule with at most this gap is good enough for a chain too long to be solved exactly."""
_PRICES = 40
"""Steps of each search for a price."""
_TAILS = (0.0, 0.02)
"""Shares of the layers, at the end, that are dearer to recompute: little memory is free again by then."""
_TAIL_EXTRA = 0.1
"""By how much the last layer is dearer to recompute; the extra falls to 0 over the tail."""
_SPARE = 2e-4
"""A schedule that leaves less than this share of the memory unused is not improved."""
_GOLDEN = (3 - math.sqrt(5)) / 2
_AMPLE_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class _Choice:
    """What becomes of a layer in the first pass: saved in a mode, or recomputed (mode -1); is its output kept?"""

    mode: int
    holds: bool


class TwoPasses:
    """Choices for the layers of a chain at prices per byte.

    Parameters
    ----------
    chain : Chain
    costs : ChainCosts
        Of the same chain.
    budget_bytes : int
        Resident bytes included.

    Attributes
    ----------
    bound : float
        Lower bound on the time of every schedule.
    """

    def __init__(self, chain: Chain, costs: ChainCosts, budget_bytes: int) -> None:
        arrays = costs.arrays
        self.chain, self.costs, self.budget = chain, costs, budget_bytes
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
        self.bound = costs.time(max(0, math.floor(value) - 1))

    def schedule(self, deadline: Deadline) -> Schedule | None:
        """Return the fastest schedule found by the deadline that fits; None if none does."""
        best: tuple[float, Schedule] | None = None
        n = self.costs.layers
        for tail in _TAILS:
            if deadline.passed or (best and relative_gap(best[0], self.bound) <= CLOSE):
                break
            again = [
                time * (1 + (_TAIL_EXTRA * max(0.0, 1 - (n - i) / (tail * n)) if tail else 0.0))
                for i, time in enumerate(self._again)
            ]
            low, high = self._around_limit(again, deadline)
            for choices in self._between(low, high, deadline):
                schedule = self._build(choices)
                simulation = simulate(self.chain.graph, schedule)
                fits = simulation.peak_bytes <= self.budget
                if fits and (best is None or simulation.time < best[0]):
                    best = simulation.time, schedule
        return best[1] if best else None

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

    def _around_limit(self, again: list[float], deadline: Deadline) -> tuple[list[_Choice], list[_Choice]]:
        """Return the choices of a price at which the schedule fits, and of the next one at which it does not."""
        low, high = 0.8 * self._price, 1.25 * self._price
        fitting = exceeding = self._choose(high, again)
        for _ in range(_PRICES // 4):
            if deadline.passed:
                break
            middle = (low + high) / 2
            choices = self._choose(middle, again)
            if simulate(self.chain.graph, self._build(choices)).peak_bytes <= self.budget:
                high, fitting = middle, choices
            else:
                low, exceeding = middle, choices
        return fitting, exceeding

    def _between(self, fitting: list[_Choice], exceeding: list[_Choice], deadline: Deadline) -> list[list[_Choice]]:
        """Return mixtures: the first layers as in one, the others as in the other, up to where that fits."""
        n = len(fitting)
        places = [0, *(i + 1 for i in range(n) if fitting[i] == exceeding[i]), n]
        found = [fitting]
        for front, back in ((exceeding, fitting), (fitting, exceeding)):
            # From all of `back` to all of `front`, one end fits and the other does not.
            inside, outside = (0, len(places) - 1) if back is fitting else (len(places) - 1, 0)
            while abs(outside - inside) > 1 and not deadline.passed:
                middle = (inside + outside) // 2
                choices = front[: places[middle]] + back[places[middle] :]
                peak = simulate(self.chain.graph, self._build(choices)).peak_bytes
                if peak <= self.budget:
                    inside = middle
                    found.append(choices)
                    if peak > self.budget - _SPARE * self._free:
                        break
                else:
                    outside = middle
        return found

    def _choose(self, price: float, again: list[float]) -> list[_Choice]:
        """Return the best choices at a price; the last layer is saved, because its backward comes at once."""
        # By state after a layer, as (recomputed, output held): cost, and the choices so far as a linked list.
        best: dict[tuple[bool, bool], tuple[float, object]] = {(False, True): (0.0, None)}
        for i, modes in enumerate(self._modes):
            held = [entry for (_, holds), entry in best.items() if holds]
            any_state = held if self._keeps_input[i] else list(best.values())
            sources = [*held, *([best[True, False]] if (True, False) in best else [])]
            cost, mode = min((extra + price * size, mode) for mode, size, extra, _ in modes)
            after: dict[tuple[bool, bool], tuple[float, object]] = {}
            for holds in (False, True):
                output = price * self._output[i + 1] if holds else 0.0
                if sources:
                    least, trail = min(sources, key=lambda entry: entry[0])
                    after[True, holds] = least + again[i] + output, (_Choice(-1, holds), trail)
                if any_state and (holds or not self._keeps_output[i]):
                    least, trail = min(any_state, key=lambda entry: entry[0])
                    after[False, holds] = least + cost + output, (_Choice(mode, holds), trail)
            best = after
        chosen: list[_Choice] = []
        trail = best[False, True][1]
        while isinstance(trail, tuple):
            choice, trail = trail
            chosen.append(choice)
        return chosen[::-1]

    def _build(self, choices: list[_Choice]) -> Schedule:
        """Return the schedule that recomputes each run of layers without a kept output from its checkpoint."""
        fastest = [min(modes, key=lambda entry: entry[2])[0] for modes in self._modes]
        n = self.costs.layers

        def decide(a: int, b: int, h: int, m: int) -> tuple[int, int, int]:
            if b < n - 1 or choices[a].mode >= 0:
                return (fastest[a] if b < n - 1 else choices[a].mode), a, 0
            j = a + 1
            while choices[j].mode < 0 and not choices[j - 1].holds:
                j += 1
            return -1, j, _AMPLE_BYTES

        return build_schedule(self.chain, self.costs, self._free, decide)
