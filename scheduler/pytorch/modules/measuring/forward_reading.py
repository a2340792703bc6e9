"""Read the log of a first forward: segments, storages and calls."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scheduler.pytorch.modules.calls import OUTSIDE, Call, Storage
from scheduler.pytorch.modules.measuring.following import Calls, SeenCall
from scheduler.pytorch.modules.measuring.observation import Dropped, Event, Freed, Log, Run, Saved
from scheduler.pytorch.modules.measuring.spans import Weight, divide

_SPAN = -2
"""Takes the position of a seen call for what is none."""


@dataclass
class _Seen:
    """What is known of one storage of the first forward."""

    born: int
    piece: int
    dies: int | None = None
    read_by: set[int] = field(default_factory=set)
    saved_by: Counter[int] = field(default_factory=Counter)
    is_expensive: bool = False


class Freeable(NamedTuple):
    """The storages that the backward of a segment frees, whatever is recomputed.

    Attributes
    ----------
    at_once : set of int
    at_the_end : set of int
        The arguments of calls that begin with this segment. If such a call is recomputed, it holds
        them until the last of what it saved has been freed.
    """

    at_once: set[int]
    at_the_end: set[int]


class ForwardReading:
    """What the log of a forward that saves nothing says of segments, storages and calls.

    Code without operators is left out; what is freed there is freed at the end of the segment before.

    Parameters
    ----------
    log : Log
    calls : Calls
    buffers : mapping of str to set of int
        The storages of the buffers of each module and its submodules, by its name.
    changing : mapping of str to set of int
        Those of them that a forward changes without an operator that says so, as a normalization does.

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

    def runs_of(self, piece: int) -> list[Run]:
        """Return the operators of a piece of code."""
        position = bisect.bisect_left(self.segments, piece)
        has_runs = position < len(self.segments) and self.segments[position] == piece
        return self.runs[position] if has_runs else []

    def savers(self, number: int) -> Iterable[int]:
        """Return the segments that save a storage."""
        return self._seen[number].saved_by if number in self._seen else ()

    def _read(self, segment: int, piece: int, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Run):
                for number in event.born:
                    self._seen[number] = _Seen(segment, piece, is_expensive=event.is_expensive)
                for number in event.changed:
                    if number in self._seen and self._seen[number].piece == piece:
                        self._seen[number].is_expensive = False
                for number in event.read:
                    if number in self._seen:
                        self._seen[number].read_by.add(segment)
            elif isinstance(event, Saved):
                if event.storage in self._seen:
                    self._seen[event.storage].saved_by[segment] += 1
            elif isinstance(event, Dropped):
                if event.storage in self._seen:
                    self._drop(self._seen[event.storage], self._segment_at(event.saved_at), segment)
            elif isinstance(event, Freed) and event.storage in self._seen:
                self._seen[event.storage].dies = segment

    def _segment_at(self, position: int) -> int:
        """Return the segment in which an event was written."""
        spans = self._log.spans
        return self.segment_of(spans[bisect.bisect_right(spans, position, key=lambda span: span.begin) - 1].segment)

    @staticmethod
    def _drop(seen: _Seen, saver: int, now: int) -> None:
        """Note that what a segment saved is not needed any more: it was held until now, as if by Python."""
        seen.saved_by[saver] -= 1
        if not seen.saved_by[saver]:
            del seen.saved_by[saver]
        if seen.dies is not None:
            seen.dies = max(seen.dies, now)

    def _find_changes(self) -> None:
        for position, event in enumerate(self._log.events):
            if isinstance(event, Run):
                self._changed.update(dict.fromkeys(event.changed, position))
        for position, event in enumerate(self._log.events):
            if isinstance(event, Run) and any(self._changed.get(number, -1) > position for number in event.born):
                event.is_expensive = False  # it must run again even if its results are kept

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
        """Return the storages of the tree; random states that may be kept come last."""
        count = len(self.segments)
        states = (Storage(size_bytes=size, born=i, dies=i) for i, size in self._states.items())
        found = (
            Storage(
                size_bytes=self._log.sizes[number],
                born=seen.born,
                dies=count if seen.dies is None else seen.dies,
                read_by=tuple(sorted(seen.read_by)),
                saved_by=tuple(sorted(seen.saved_by)),
            )
            for number, seen in ((number, self._seen[number]) for number in self.storages)
        )
        return (*found, *states)

    def tree_calls(
        self, refusals: Mapping[tuple[str, int], str], sequences: Mapping[str, Sequence[str]]
    ) -> tuple[tuple[Call, ...], dict[int, int]]:
        """Return the calls of the tree, and the place of each seen call in it.

        Parameters
        ----------
        refusals : mapping of (str, int) to str
            Of the calls whose recomputation failed.
        sequences : mapping of str to sequence of str
            The modules that call their children in turn, which are divided, and these children.
        """
        calls: list[tuple[int, SeenCall]] = [*enumerate(self._calls.seen)]
        spans = divide(
            self._calls.seen,
            sequences,
            weigh=self._weigh,
            is_older=self._is_older,
            has_operators=lambda piece: bool(self.runs_of(piece)),
        )
        calls += [(_SPAN, span) for span in spans]
        places: dict[int, int] = {}
        found: list[Call] = []
        around: list[tuple[SeenCall, int]] = []
        for position, seen in sorted(calls, key=lambda one: (one[1].segments[0], -one[1].segments[-1])):
            start = bisect.bisect_left(self.segments, seen.segments[0])
            stop = bisect.bisect_right(self.segments, seen.segments[-1])
            if start == stop:
                continue
            while around and around[-1][0].segments[-1] < seen.segments[0]:
                around.pop()
            places[position] = len(found)
            found.append(
                Call(
                    module=seen.module,
                    number=seen.number,
                    caller=around[-1][1] if around else OUTSIDE,
                    start=start,
                    stop=stop,
                    inputs=tuple(sorted({self._place[number] for number in seen.inputs if number in self._place})),
                    copied_bytes=self._copied_bytes(seen),
                    refusal=self._refusal_of(seen, refusals),
                    span=seen.span,
                )
            )
            around.append((seen, places[position]))
        return tuple(found), places

    def _refusal_of(self, call: SeenCall, refusals: Mapping[tuple[str, int], str]) -> str:
        parts = [call] if not call.span else [self._calls.seen[child] for child in call.children]
        failed = next((refusals[one.module, one.number] for one in parts if (one.module, one.number) in refusals), "")
        return call.refusal or failed or self._refusal(call)

    def _weigh(self, call: SeenCall) -> Weight:
        sizes = self._log.sizes
        return Weight(
            is_refused=bool(call.refusal or self._refusal(call)),
            input_bytes=sum(sizes[number] for number in call.inputs if number in self._seen),
            saved_bytes=sum(self._saved_last[piece] for piece in range(call.segments[0], call.segments[-1] + 1)),
        )

    @functools.cached_property
    def _saved_last(self) -> Counter[int]:
        """The bytes that each piece of code is the last to save."""
        found: Counter[int] = Counter()
        for number, seen in self._seen.items():
            if seen.saved_by:
                found[self.segments[max(seen.saved_by)]] += self._log.sizes[number]
        return found

    def _copied_bytes(self, call: SeenCall) -> int:
        modules = [self._calls.seen[child].module for child in call.children] if call.span else [call.module]
        changed = {
            number
            for piece in range(call.segments[0], call.segments[-1] + 1)
            for event in self._events[piece]
            if isinstance(event, Run)
            for number in event.changed
        }
        changed = changed.union(*(self._changing[module] for module in modules))
        copied = changed & set().union(*(self._buffers[module] for module in modules))
        # One copy is the old value, and the recomputation changes another one.
        return 2 * sum(self._log.sizes[number] for number in copied) + call.random_bytes

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

    def forward_peak(self, segment: int, *, saving: bool, keeping: bool = False, from_kept: bool = False) -> int:
        """Return the most bytes that a segment allocates at once.

        Parameters
        ----------
        segment : int
        saving : bool
            Whether it saves what its backward needs.
        keeping : bool
            Whether it keeps the results of expensive operators.
        from_kept : bool
            Whether it uses such results, which are live at its start.
        """
        sizes = self._log.sizes
        live = peak = 0
        own: set[int] = set()
        saved: Counter[int] = Counter()
        freed: set[int] = set()
        for event in self._events[self.segments[segment]]:
            if isinstance(event, Run):
                own.update(event.born)
                if from_kept and event.is_expensive:
                    continue
                if keeping and event.is_expensive:
                    saved.update(event.born)
                live += sum(sizes[number] for number in event.born)
                peak = max(peak, live + event.workspace_bytes)
            elif isinstance(event, Saved):
                saved[event.storage] += saving
            elif isinstance(event, Dropped):
                saved[event.storage] -= saving
            elif isinstance(event, Freed):
                freed.add(event.storage)
            if isinstance(event, Freed | Dropped) and event.storage in own & freed and saved[event.storage] <= 0:
                own.discard(event.storage)
                live -= sizes[event.storage]
        return peak

    def expensive(self, segment: int) -> tuple[int, ...]:
        """Return the places of the storages of a segment that may be kept: expensive results, and random states."""
        found = [
            self._place[number]
            for run in self.runs[segment]
            for number in run.born
            if number in self._place and self._seen[number].is_expensive
        ]
        if found and segment in self._states:
            found.append(len(self.storages) + [*self._states].index(segment))
        return tuple(found)

    @functools.cached_property
    def _states(self) -> dict[int, int]:
        """The bytes of the random states that are kept with expensive results, by segment."""
        sizes = {i: sum(run.state_bytes for run in runs if run.is_expensive) for i, runs in enumerate(self.runs)}
        return {segment: size for segment, size in sizes.items() if size}

    def caller(self, segment: int) -> int:
        """Return the seen call to which a segment belongs, or `OUTSIDE`."""
        return self._calls.callers[self.segments[segment]]

    @functools.cached_property
    def freed(self) -> list[Freeable]:
        """For each segment, the storages that its backward frees."""
        first_use: dict[int, int] = {}
        for call in self._calls.seen:
            for number in call.inputs:
                first_use.setdefault(number, call.segments[0])
        found = [Freeable(set(), set()) for _ in self.segments]
        for number, seen in self._seen.items():
            if seen.saved_by and seen.dies is not None:
                segment = min(seen.saved_by)
                piece, used = self.segments[segment], first_use.get(number, len(self._calls.callers))
                if piece < used:
                    found[segment].at_once.add(number)
                elif piece == used:
                    found[segment].at_the_end.add(number)
        return found
