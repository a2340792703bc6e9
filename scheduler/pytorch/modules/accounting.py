"""The time and memory of the runs of a step, counted from the call tree alone.

The search counts many choices, so it does not simulate the schedule of each. What it counts is
what the simulator says of the lowered graph, and the choice that is returned is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scheduler.pytorch.modules.regions import Execution, Kind, Layout, Part, Run, TensorKey


class _Effect(NamedTuple):
    """What one run does to memory.

    Attributes
    ----------
    time : float
    peak_bytes : int
        Most bytes at once, above those live at its start.
    allocated : sequence of (int, sequence of TensorKey)
        The bytes of each storage that it allocates for those of its tensors that are not live.
    views : sequence of (TensorKey, TensorKey)
        Tensors that it adds to the storage of another one.
    """

    time: float = 0.0
    peak_bytes: int = 0
    allocated: Sequence[tuple[int, Sequence[TensorKey]]] = ()
    views: Sequence[tuple[TensorKey, TensorKey]] = ()


class Accounts:
    """Counts the time and memory of executions of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._effects: dict[Run, _Effect] = {}
        self._resident_bytes = layout.tree.resident_bytes

    def count(self, execution: Execution) -> tuple[float, list[int]]:
        """Return the time of a step, and the bytes in use during each of its runs, resident tensors included."""
        effects = self._effects
        sizes: list[int] = []
        holders: list[int] = []
        instances: dict[TensorKey, int] = {}
        live, memory, times = self._resident_bytes, [], []
        for run, frees in zip(execution.runs, execution.frees, strict=True):
            effect = effects.get(run)
            if effect is None:
                effect = effects[run] = self._effect(run)
            time, peak, allocated, views = effect
            times.append(time)
            memory.append(live + peak)
            for size, keys in allocated:
                fresh = [key for key in keys if key not in instances]
                if fresh:
                    instances.update(dict.fromkeys(fresh, len(sizes)))
                    sizes.append(size)
                    holders.append(len(fresh))
                    live += size
            for key, other in views:
                if key not in instances:
                    instances[key] = instances[other]
                    holders[instances[key]] += 1
            for key in frees:
                instance = instances.pop(key, None)
                if instance is not None:
                    holders[instance] -= 1
                    if not holders[instance]:
                        live -= sizes[instance]
        return math.fsum(times), memory

    def _effect(self, run: Run) -> _Effect:
        """Return what a run does; tensors without bytes are left out."""
        kind, position = run
        layout, tree = self._layout, self._layout.tree
        if kind in (Kind.CHECKPOINT, Kind.KEEPING_CHECKPOINT):
            size = tree.calls[position].copied_bytes
            return _Effect(0.0, size, [(size, [(Part.COPIES, position, -1)])])
        segment = tree.segments[position]
        if kind is Kind.BACKWARD:
            return _Effect(segment.backward_time, segment.backward_peak_bytes)
        if kind is Kind.GRADIENTS:
            parts = {Part.GRADIENT: segment.gradient_bytes, Part.PARAMETER_GRADIENT: segment.parameter_gradient_bytes}
            return _Effect(0.0, sum(parts.values()), [(size, [(part, position, -1)]) for part, size in parts.items()])
        time, peaks, allocated, views = segment.forward_time, layout.peaks[position], [], []
        is_saving = kind in (Kind.SAVING, Kind.FROM_KEPT)
        for g in layout.born[position]:
            group = layout.groups[g]
            keys: list[TensorKey] = [(Part.VALUE, g, -1)] if group.outlives else []
            keys += [(Part.HELD, g, -1)] if group.dies >= layout.length else []
            keys += [(Part.SAVED, g, position)] if is_saving and position in group.savers else []
            if group.is_expensive and kind is Kind.FROM_KEPT:
                views += [(key, (Part.KEPT, g, -1)) for key in keys]
            else:
                keys += [(Part.KEPT, g, -1)] if group.is_expensive and kind is Kind.KEEPING else []
                allocated.append((group.size_bytes, keys))
        if is_saving:
            saved = (g for g in layout.saved[position] if layout.groups[g].born < position)
            views += [((Part.SAVED, g, position), (Part.VALUE, g, -1)) for g in saved]
        if kind is Kind.FROM_KEPT:
            time = max(0.0, time - segment.expensive_time)
        peak = {
            Kind.SAVING: peaks.saving,
            Kind.WITHOUT_SAVING: peaks.without_saving,
            Kind.KEEPING: peaks.keeping,
            Kind.FROM_KEPT: peaks.from_kept,
        }[kind]
        return _Effect(time, peak, allocated, views)
