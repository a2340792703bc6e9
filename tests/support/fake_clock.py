"""A clock for searches that measures work instead of time, so that no test depends on the speed of a machine."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Mapping
from cProfile import Profile
from types import TracebackType
from typing import Self

from scheduler.solvers.deadline import clock

SECONDS_PER_LOOK = 0.005
"""For time limits in seconds: a search looks at the clock some 200 times a second on a common machine."""


class FakeClock:
    """A clock that advances when a search reads it or calls a function, and by `advance`.

    Inside of its `with` block it replaces the clock of all searches, in all threads that
    start there. It begins at 0, without the pauses before: sums would be rounded otherwise in
    another order of tests. Work that runs in compiled code between two readings takes no time.

    Parameters
    ----------
    seconds_per_look : float
        By how much the clock advances when it is read.
    seconds_per_call : float
        By how much it advances at every call of a Python function or builtin.
    at_look : dict of int to callable
        What happens at the k-th look, in the thread that looks.
    """

    def __init__(
        self,
        *,
        seconds_per_look: float = 0.0,
        seconds_per_call: float = 0.0,
        at_look: Mapping[int, Callable[[], object]] | None = None,
    ) -> None:
        self.seconds_per_look, self.seconds_per_call = seconds_per_look, seconds_per_call
        self.at_look = dict(at_look or {})
        self.looks = 0
        self._advanced = 0.0
        # Counters of itertools are atomic; additions of several threads are not.
        self._looks, self._ticks = itertools.count(1), itertools.count()

    def __enter__(self) -> Self:
        self._outer = clock.read, clock._paused_for
        clock.read, clock._paused_for = self._look, 0.0
        if self.seconds_per_call:
            self._profile = self._count_calls()
            if sys.version_info < (3, 12):  # from then on, a profiler sees the calls of all threads
                threading.setprofile(self._count_calls)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.seconds_per_call:
            threading.setprofile(None)
            self._profile.disable()
        clock.read, clock._paused_for = self._outer

    @property
    def seconds(self) -> float:
        """Seconds that have passed on this clock."""
        return self.looks * self.seconds_per_look + self.calls * self.seconds_per_call + self._advanced

    @property
    def calls(self) -> int:
        """Calls so far; reading the number adds half a call to it."""
        return next(self._ticks) // 2

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self._advanced += seconds

    def _look(self) -> float:
        look = self.looks = next(self._looks)
        self.at_look.get(look, lambda: None)()
        return self.seconds

    def _count_calls(self, *event: object) -> Profile:
        """Count calls from now on; as the profile function of a thread, from its first event on.

        The profiler is compiled code. It reads its timer, here a counter, as a call begins and as it ends.
        """
        profile = Profile(self._ticks.__next__, 1.0, subcalls=False)
        profile.enable()
        return profile
