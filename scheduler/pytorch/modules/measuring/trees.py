"""Make a call tree of what the logs of a step say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from scheduler.graph import Tensor
from scheduler.pytorch.modules.calls import OUTSIDE, CallTree, Segment
from scheduler.pytorch.modules.measuring.backward_reading import StepReading
from scheduler.pytorch.modules.measuring.forward_reading import ForwardReading


def make_tree(
    name: str,
    forward: ForwardReading,
    steps: Sequence[StepReading],
    resident: Sequence[Tensor],
    refusals: Mapping[tuple[str, int], str],
    sequences: Mapping[str, Sequence[str]],
) -> CallTree:
    """Return the tree of what was read; without steps, nothing is known of the backward.

    Parameters
    ----------
    name : str
        Of the model.
    forward : ForwardReading
    steps : sequence of StepReading
    resident : sequence of Tensor
    refusals : mapping of (str, int) to str
        Of the calls whose recomputation failed, by module and number.
    sequences : mapping of str to sequence of str
        The modules that call their children in turn, whose calls are divided into spans, and these children.
    """
    calls, places = forward.tree_calls(refusals, sequences)
    segments = []
    gradient_bytes = 0
    for segment in reversed(range(len(forward.segments))):
        found = [step.backward[segment] for step in steps if segment in step.backward]
        if found:
            gradient_bytes = max(one.gradient_bytes for one in found)
        runs = forward.runs[segment]
        segments.append(
            Segment(
                call=places.get(forward.caller(segment), OUTSIDE),
                forward_time=sum(run.seconds for run in runs),
                backward_time=min((one.seconds for one in found), default=0.0),
                forward_peak_bytes=forward.forward_peak(segment, saving=False),
                saving_forward_peak_bytes=forward.forward_peak(segment, saving=True),
                keeping_forward_peak_bytes=forward.forward_peak(segment, saving=False, keeping=True),
                kept_forward_peak_bytes=forward.forward_peak(segment, saving=True, from_kept=True),
                backward_peak_bytes=max((one.peak_bytes for one in found), default=0),
                gradient_bytes=gradient_bytes,
                parameter_gradient_bytes=max((one.parameter_gradient_bytes for one in found), default=0),
                expensive=forward.expensive(segment),
                expensive_time=sum(run.seconds for run in runs if run.is_expensive),
            )
        )
    return CallTree(
        calls=calls,
        segments=tuple(reversed(segments)),
        storages=forward.tree_storages(),
        resident=tuple(resident),
        name=name,
    )
