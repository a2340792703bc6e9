"""The clock of searches, which stands still while a kernel is compiled: on the first run on a machine only."""

from __future__ import annotations

import time
from threading import Lock

_lock = Lock()
_compiling, _since, _stood = 0, 0.0, 0.0


def now() -> float:
    """Return seconds from some moment on, without those of compiling."""
    with _lock:
        return (_since if _compiling else time.monotonic()) - _stood


def stop() -> None:
    """Let the clock stand still until as many calls of `go_on` have followed."""
    global _compiling, _since
    with _lock:
        if not _compiling:
            _since = time.monotonic()
        _compiling += 1


def go_on() -> None:
    """Let the clock go on."""
    global _compiling, _stood
    with _lock:
        _compiling -= 1
        if not _compiling:
            _stood += time.monotonic() - _since
