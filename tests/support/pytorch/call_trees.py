"""The peak of a step that recomputes nothing, from what a call tree says, by the rules of the design."""

from __future__ import annotations

from scheduler.pytorch.modules.calls import CallTree


def plain_peak(tree: CallTree) -> int:
    """Return the most bytes live at once, resident ones left out, in a step that saves everything."""
    count = len(tree.segments)
    peaks = []
    for i, segment in enumerate(tree.segments):
        before = sum(s.size_bytes for s in tree.storages if s.born < i and (s.dies >= i or _is_saved(s.saved_by, 0, i)))
        peaks.append(before + segment.saving_forward_peak_bytes)
    gradients = parameter_gradients = 0
    for i in reversed(range(count)):
        segment = tree.segments[i]
        live = sum(s.size_bytes for s in tree.storages if s.dies == count or _is_saved(s.saved_by, 0, i + 1))
        peaks.append(live + gradients + parameter_gradients + segment.backward_peak_bytes)
        gradients = segment.gradient_bytes
        parameter_gradients += segment.parameter_gradient_bytes
    return max(peaks)


def _is_saved(savers: tuple[int, ...], start: int, stop: int) -> bool:
    return any(start <= j < stop for j in savers)
