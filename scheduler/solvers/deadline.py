"""The clock of searches, and the deadline that each of them obeys."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """A clock that is paused while a kernel is compiled, which happens on the first run on a machine only.

    Attributes
    ----------
    read : callable
        Returns seconds from a fixed moment on. Tests replace it.
    """

    def __init__(self) -> None:
        self.read: Callable[[], float] = time.monotonic
        self._lock = threading.Lock()
        self._pauses, self._paused_at, self._paused_for = 0, 0.0, 0.0

    def now(self) -> float:
        """Return seconds from a fixed moment on, without those spent compiling."""
        with self._lock:
            return (self._paused_at if self._pauses else self.read()) - self._paused_for

    def pause(self) -> None:
        """Stop the clock until as many calls of `resume` have followed."""
        with self._lock:
            if not self._pauses:
                self._paused_at = self.read()
            self._pauses += 1

    def resume(self) -> None:
        """Let the clock go on."""
        with self._lock:
            self._pauses -= 1
            if not self._pauses:
                self._paused_for += self.read() - self._paused_at


clock = Clock()
"""The only clock that searches look at."""


class Deadline:
    """A moment in time that a search must respect, and a word that ends it sooner.

    Parameters
    ----------
    seconds : float
        From now.
    whole : Deadline, optional
        Of the search that this one is a part of: stopped with it.
    """

    def __init__(self, seconds: float, whole: Deadline | None = None) -> None:
        self.end = clock.now() + seconds
        self._whole = whole
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ask the search, from any thread, for its best answer at once."""
        self._stopped.set()

    @property
    def stopped(self) -> bool:
        """Whether somebody asked for the best answer at once."""
        return self._stopped.is_set() or (self._whole is not None and self._whole.stopped)

    @property
    def remaining(self) -> float:
        """Seconds left; 0 once it has passed."""
        return 0.0 if self.stopped else max(0.0, self.end - clock.now())

    @property
    def passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining <= 0

    def within(self, seconds: float) -> Deadline:
        """Return a deadline that many seconds from now, or this one's end if it is earlier."""
        return Deadline(min(seconds, self.remaining), self)


@contextmanager
def stopped_by_interrupt(deadline: Deadline) -> Iterator[None]:
    """Let the first Ctrl-C end a search with its best answer; a second one raises KeyboardInterrupt.

    Only the main thread hears Ctrl-C; elsewhere, and where the program handles it in its
    own way, nothing changes.
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
