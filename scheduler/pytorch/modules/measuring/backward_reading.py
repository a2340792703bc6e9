"""Read the log of a whole step: what the backward of each segment needs, and the times of all operators."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from scheduler.pytorch.modules.measuring.forward_reading import ForwardReading
from scheduler.pytorch.modules.measuring.observation import Accumulated, Began, Event, Freed, Log, Phase, Run


@dataclass
class BackwardOfSegment:
    """What one backward of a segment needs; the fields are those of `Segment`."""

    seconds: float = 0.0
    peak_bytes: int = 0
    gradient_bytes: int = 0
    parameter_gradient_bytes: int = 0


class StepReading:
    """What the log of a whole step says of the backward, with the times of all operators.

    Parameters
    ----------
    log : Log
        Of a step in which some calls were recomputed.
    forward : ForwardReading
        Of the same step.

    Attributes
    ----------
    backward : dict of int to BackwardOfSegment
        By segment of the tree; segments without a backward are missing.
    """

    def __init__(self, log: Log, forward: ForwardReading) -> None:
        self._log = log
        self._forward = forward
        self._same: dict[int, int] = {}
        """For each storage of this log that the forward allocates, its number in the first forward."""
        self._gradients: set[int] = set()
        self._parameter_gradients: set[int] = set()
        self._live = 0
        """Bytes of gradients."""
        self.backward: dict[int, BackwardOfSegment] = {}
        events_of: dict[int, list[Event]] = {}
        for span, events in log.parts():
            if span.phase is Phase.BACKWARD:
                events_of.setdefault(forward.segment_of(span.segment), []).extend(events)
            else:
                self._read_forward(span.segment, events)
        for segment, events in events_of.items():
            self.backward[segment] = self._read_backward(segment, events)

    def _read_forward(self, piece: int, events: Sequence[Event]) -> None:
        known = iter(self._forward.runs_of(piece))
        for event in events:
            first = next(known, None) if isinstance(event, Run) else None
            if isinstance(event, Run) and first is not None and len(first.born) == len(event.born):
                self._same.update(zip(event.born, first.born, strict=True))
                first.seconds = min(first.seconds, event.seconds)
                first.workspace_bytes = max(first.workspace_bytes, event.workspace_bytes)

    def _read_backward(self, segment: int, events: Sequence[Event]) -> BackwardOfSegment:
        found, sizes = BackwardOfSegment(), self._log.sizes
        begin, freed, pending = self._live, 0, 0
        credits = self._credits(segment, events)
        for position, event in enumerate(events):
            if isinstance(event, Run):
                found.seconds += event.seconds
                self._gradients.update(event.born)
                self._live += sum(sizes[number] for number in event.born)
                found.peak_bytes = max(found.peak_bytes, self._live + event.workspace_bytes - begin - freed)
            elif isinstance(event, Accumulated):
                if event.storage in self._gradients and event.storage not in self._parameter_gradients:
                    self._parameter_gradients.add(event.storage)
                    found.parameter_gradient_bytes += sizes[event.storage]
            elif isinstance(event, Freed):
                if event.storage in self._gradients and event.storage not in self._parameter_gradients:
                    self._live -= sizes[event.storage]
                pending += credits.get(position, 0)
            elif isinstance(event, Began):  # autograd itself frees what a node saved once the node has run
                freed, pending = freed + pending, 0
        found.gradient_bytes = self._live - sum(sizes[number] for number in self._parameter_gradients)
        return found

    def _credits(self, segment: int, events: Sequence[Event]) -> dict[int, int]:
        """Return the bytes of the forward that each event frees, by its position, whatever is recomputed."""
        freeable = self._forward.freed[segment]
        places: dict[int, int] = {}
        for position, event in enumerate(events):
            if isinstance(event, Freed) and event.storage in self._same:
                places.setdefault(self._same[event.storage], position)
        own = [place for number, place in places.items() if segment in self._forward.savers(number)]
        runs = [place for place, event in enumerate(events) if isinstance(event, Run)]
        before = bisect.bisect_left(runs, max(own, default=-1))
        since = runs[before - 1] if before else -1
        return {
            place: self._log.sizes[cast("Freed", events[place]).storage]
            for number, place in places.items()
            if number in freeable.at_once or (number in freeable.at_the_end and place > since)
        }
