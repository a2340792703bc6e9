"""Measure the time of searches, and end them at a deadline or by Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scheduler.solution import Proposal


class Clock:
    """A clock that pauses for what is done once: compiling kernels on a machine, loading them in a process.

    Attributes
    ----------
    read : callable
        Returns seconds since a fixed moment. Tests replace it.
    """

    def __init__(self) -> None:
        self.read: Callable[[], float] = time.monotonic
        self._lock = threading.Lock()
        self._pauses, self._paused_at, self._paused_for = 0, 0.0, 0.0

    def now(self) -> float:
        """Return seconds since a fixed moment, without the time of pauses."""
        with self._lock:
            return (self._paused_at if self._pauses else self.read()) - self._paused_for

    def pause(self) -> None:
        """Stop the clock until `resume` has been called as many times as `pause`."""
        with self._lock:
            if not self._pauses:
                self._paused_at = self.read()
            self._pauses += 1

    def resume(self) -> None:
        """Undo one call of `pause`."""
        with self._lock:
            self._pauses -= 1
            if not self._pauses:
                self._paused_for += self.read() - self._paused_at

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock meanwhile."""
        self.pause()
        try:
            yield
        finally:
            self.resume()


clock = Clock()
"""The only clock that searches read."""


Listener = Callable[[Proposal], None]
"""Callback for the intermediate results of a search."""


class Deadline:
    """A moment by which a search must return, a way to cancel it earlier, and a listener for its progress.

    Parameters
    ----------
    seconds : float
        Time from now.
    parent : Deadline, optional
        Deadline of the search that this one is a part of; stopping it stops this one too.
    listener : callable, optional
        Called with the intermediate results of the search; by default, the parent's is.
    """

    def __init__(self, seconds: float, parent: Deadline | None = None, listener: Listener | None = None) -> None:
        self.end = clock.now() + seconds
        self._parent, self._listener = parent, listener
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Cancel the search, from any thread: it returns its best answer at once."""
        self._stopped.set()

    def report(self, found: Proposal) -> None:
        """Pass on an intermediate result: the best schedule and the bounds so far. Any thread may call this."""
        if self._listener is not None:
            self._listener(found)
        elif self._parent is not None:
            self._parent.report(found)

    @property
    def stopped(self) -> bool:
        """Whether the search has been cancelled."""
        return self._stopped.is_set() or (self._parent is not None and self._parent.stopped)

    @property
    def remaining(self) -> float:
        """Seconds left; 0 once the deadline has passed."""
        return 0.0 if self.stopped else max(0.0, self.end - clock.now())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining <= 0

    def within(self, seconds: float, listener: Listener | None = None) -> Deadline:
        """Return a deadline so many seconds from now, or at this one's end if that is earlier."""
        return Deadline(min(seconds, self.remaining), self, listener)


@contextmanager
def stopped_by_interrupt(deadline: Deadline) -> Iterator[None]:
    """Let the first Ctrl-C end a search with its best answer; a second one raises KeyboardInterrupt.

    Python handles Ctrl-C in the main thread only. In other threads, and in programs that have
    their own handler, nothing changes.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield
        return

    def stop(signum: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        deadline.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
