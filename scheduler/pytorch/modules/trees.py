"""Make a call tree from the logs of a step."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from scheduler.graph import Tensor
from scheduler.pytorch.modules.calls import OUTSIDE, Call, CallTree, Segment, Storage
from scheduler.pytorch.modules.following import Calls, SeenCall
from scheduler.pytorch.modules.observation import Accumulated, Event, Freed, Log, Phase, Run, Saved


@dataclass
class _Seen:
    """What is known of one storage of the first forward."""

    born: int
    piece: int
    dies: int | None = None
    read_by: set[int] = field(default_factory=set)
    saved_by: set[int] = field(default_factory=set)
    is_expensive: bool = False


class ForwardReading:
    """What the log of a forward that saves nothing says of segments, storages and calls.

    Code without operators is left out; what is freed there is freed at the end of the segment before.

    Parameters
    ----------
    log : Log
    calls : Calls
    buffers : mapping of str to set of int
        The storages of the buffers of each module and its submodules, by its name.
    changing : mapping of str to int
        Bytes of those buffers of each module that its forward changes unseen, as a normalization does.

    Attributes
    ----------
    segments : list of int
        For each segment of the tree, the piece of code in the log.
    runs : list of list of Run
        The operators of each segment.
    """

    def __init__(
        self, log: Log, calls: Calls, buffers: Mapping[str, set[int]], changing: Mapping[str, set[int]]
    ) -> None:
        self._log = log
        self._calls = calls
        self._buffers = buffers
        self._changing = changing
        parts = [(span.segment, events) for span, events in log.parts()]
        self.segments = [piece for piece, events in parts if any(isinstance(event, Run) for event in events)]
        self._events = {piece: events for piece, events in parts}
        self.runs = [[e for e in self._events[piece] if isinstance(e, Run)] for piece in self.segments]
        self._seen: dict[int, _Seen] = {}
        self._changed: dict[int, int] = {}
        """Position in the log of the last change of each storage."""
        for piece, events in parts:
            self._read(self.segment_of(piece), piece, events)
        self._find_changes()
        self.storages = self._select()
        self._place = {number: place for place, number in enumerate(self.storages)}

    def segment_of(self, piece: int) -> int:
        """Return the segment of a piece of code, or the one before it if the piece has none."""
        return max(0, bisect.bisect_right(self.segments, piece) - 1)

    def _read(self, segment: int, piece: int, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Run):
                for number in event.born:
                    self._seen[number] = _Seen(segment, piece, is_expensive=event.is_expensive)
                for number in event.read:
                    if number in self._seen:
                        self._seen[number].read_by.add(segment)
            elif isinstance(event, Saved):
                if event.storage in self._seen:
                    self._seen[event.storage].saved_by.add(segment)
            elif isinstance(event, Freed) and event.storage in self._seen:
                self._seen[event.storage].dies = segment

    def _find_changes(self) -> None:
        for position, event in enumerate(self._log.events):
            if isinstance(event, Run):
                self._changed.update(dict.fromkeys(event.changed, position))

    def _select(self) -> list[int]:
        """Return the storages that matter beyond the segment that allocates them."""
        inputs = {number for call in self._calls.seen for number in call.inputs}
        return [
            number
            for number, seen in self._seen.items()
            if self._log.sizes[number]
            and (seen.saved_by or seen.dies != seen.born or number in inputs or seen.is_expensive)
        ]

    def tree_storages(self) -> tuple[Storage, ...]:
        """Return the storages of the tree."""
        count = len(self.segments)
        return tuple(
            Storage(
                size_bytes=self._log.sizes[number],
                born=seen.born,
                dies=count if seen.dies is None else seen.dies,
                read_by=tuple(sorted(seen.read_by)),
                saved_by=tuple(sorted(seen.saved_by)),
            )
            for number, seen in ((number, self._seen[number]) for number in self.storages)
        )

    def tree_calls(self, refusals: Mapping[tuple[str, int], str]) -> tuple[tuple[Call, ...], dict[int, int]]:
        """Return the calls of the tree, and the place of each seen call in it.

        Parameters
        ----------
        refusals : mapping of (str, int) to str
            Of the calls whose recomputation failed.
        """
        places: dict[int, int] = {}
        found: list[Call] = []
        for position, seen in enumerate(self._calls.seen):
            start = bisect.bisect_left(self.segments, seen.segments[0])
            stop = bisect.bisect_right(self.segments, seen.segments[-1])
            if start == stop:
                continue
            places[position] = len(found)
            found.append(
                Call(
                    module=seen.module,
                    number=seen.number,
                    caller=places.get(seen.caller, OUTSIDE),
                    start=start,
                    stop=stop,
                    inputs=tuple(sorted({self._place[number] for number in seen.inputs if number in self._place})),
                    copied_bytes=self._copied_bytes(seen),
                    refusal=seen.refusal or refusals.get((seen.module, seen.number), "") or self._refusal(seen),
                )
            )
        return tuple(found), places

    def _copied_bytes(self, call: SeenCall) -> int:
        changed = {
            number
            for piece in range(call.segments[0], call.segments[-1] + 1)
            for event in self._events[piece]
            if isinstance(event, Run)
            for number in event.changed
        }
        copied = (changed | self._changing[call.module]) & self._buffers[call.module]
        return sum(self._log.sizes[number] for number in copied)

    def _refusal(self, call: SeenCall) -> str:
        """Return why a call would find other values when it is recomputed, "" if it would not."""
        found = set(call.inputs)
        for piece in range(call.segments[0], call.segments[-1] + 1):
            for event in self._events[piece]:
                if isinstance(event, Run):
                    found.update(number for number in event.read if self._is_older(number, call))
        for number in found - self._buffers[call.module]:
            if self._changed.get(number, -1) >= call.begin:
                return "a tensor that it reads is changed in place, by itself or later"
            seen = self._seen.get(number)
            if number not in call.inputs and seen is not None and seen.dies is not None:
                return "it reads a tensor that is not an argument and is gone when it would be recomputed"
        return ""

    def _is_older(self, number: int, call: SeenCall) -> bool:
        seen = self._seen.get(number)
        return seen is None or seen.piece < call.segments[0]

    def forward_peak(self, segment: int, *, saving: bool) -> int:
        """Return the most bytes that a segment allocates at once."""
        sizes = self._log.sizes
        live = peak = 0
        own: set[int] = set()
        saved: set[int] = set()
        for event in self._events[self.segments[segment]]:
            if isinstance(event, Run):
                own.update(event.born)
                live += sum(sizes[number] for number in event.born)
                peak = max(peak, live + event.workspace_bytes)
            elif isinstance(event, Saved):
                saved.add(event.storage)
            elif isinstance(event, Freed) and event.storage in own and not (saving and event.storage in saved):
                live -= sizes[event.storage]
        return peak

    def expensive(self, segment: int) -> tuple[int, ...]:
        """Return the places of the storages of a segment that expensive operators return."""
        return tuple(
            self._place[number]
            for run in self.runs[segment]
            if run.is_expensive
            for number in run.born
            if number in self._place
        )

    def caller(self, segment: int) -> int:
        """Return the seen call to which a segment belongs, or `OUTSIDE`."""
        return self._calls.callers[self.segments[segment]]

    @functools.cached_property
    def freed(self) -> list[set[int]]:
        """For each segment, the storages that its backward frees, whatever is recomputed."""
        first_use: dict[int, int] = {}
        for call in self._calls.seen:
            for number in call.inputs:
                first_use.setdefault(number, call.segments[0])
        found: list[set[int]] = [set() for _ in self.segments]
        for number, seen in self._seen.items():
            if seen.saved_by and seen.dies is not None:
                segment = min(seen.saved_by)
                if self.segments[segment] < first_use.get(number, len(self._calls.callers)):
                    found[segment].add(number)
        return found


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
        self._own = 0
        """Bytes that the storages of the forward that this segment's backward has freed had."""
        self._creditable: set[int] = set()
        self.backward: dict[int, BackwardOfSegment] = {}
        self._current: BackwardOfSegment | None = None
        self._base = 0
        for span, events in log.parts():
            if span.phase is Phase.BACKWARD:
                self._begin(span.segment)
                self._read_backward(events)
            else:
                self._read_forward(span.segment, events)
        self._end()

    def _read_forward(self, piece: int, events: Sequence[Event]) -> None:
        position = bisect.bisect_left(self._forward.segments, piece)
        has_runs = position < len(self._forward.segments) and self._forward.segments[position] == piece
        known = iter(self._forward.runs[position] if has_runs else ())
        for event in events:
            if isinstance(event, Run):
                first = next(known, None)
                if first is not None and len(first.born) == len(event.born):
                    self._same.update(zip(event.born, first.born, strict=True))
                    first.seconds = min(first.seconds, event.seconds)
                    first.workspace_bytes = max(first.workspace_bytes, event.workspace_bytes)
            elif isinstance(event, Freed) and event.storage in self._gradients:
                self._live -= self._log.sizes[event.storage]

    def _begin(self, piece: int) -> None:
        segment = self._forward.segment_of(piece)
        if segment in self.backward:
            return
        self._end()
        self._current = self.backward[segment] = BackwardOfSegment()
        self._base, self._own = self._live, 0
        self._creditable = set(self._forward.freed[segment])

    def _end(self) -> None:
        if self._current is not None:
            kept = sum(self._log.sizes[number] for number in self._parameter_gradients)
            self._current.gradient_bytes = self._live - kept

    def _read_backward(self, events: Sequence[Event]) -> None:
        found, sizes = self._current, self._log.sizes
        assert found is not None
        for event in events:
            if isinstance(event, Run):
                found.seconds += event.seconds
                self._gradients.update(event.born)
                self._live += sum(sizes[number] for number in event.born)
                found.peak_bytes = max(found.peak_bytes, self._live + event.workspace_bytes - self._base - self._own)
            elif isinstance(event, Accumulated):
                if event.storage in self._gradients and event.storage not in self._parameter_gradients:
                    self._parameter_gradients.add(event.storage)
                    found.parameter_gradient_bytes += sizes[event.storage]
            elif isinstance(event, Freed):
                if event.storage in self._gradients:
                    if event.storage not in self._parameter_gradients:
                        self._live -= sizes[event.storage]
                elif (same := self._same.get(event.storage)) in self._creditable:
                    self._creditable.discard(same)
                    self._own += sizes[event.storage]


def make_tree(
    name: str,
    forward: ForwardReading,
    steps: Sequence[StepReading],
    resident: Sequence[Tensor],
    refusals: Mapping[tuple[str, int], str],
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
    """
    calls, places = forward.tree_calls(refusals)
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
