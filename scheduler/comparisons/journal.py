"""A file of JSON lines that grows by one synced entry at a time, and outlives a kill."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from scheduler.errors import InvalidOptionError


class Entries(NamedTuple):
    """What a journal holds.

    Attributes
    ----------
    values : tuple of dict
        One per whole line.
    size_bytes : int
        Of the whole lines: what follows was being written when the writer was killed.
    """

    values: tuple[dict[str, object], ...]
    size_bytes: int


class Journal:
    """Append entries to a file, each one on disk before the next.

    Parameters
    ----------
    path : path
        Made if it is missing. A half-written last line is left out, and overwritten by the
        next entry; nothing else in the file is ever changed.

    Attributes
    ----------
    entries : tuple of dict
        What the file held when it was opened.

    Raises
    ------
    OSError
        If the path cannot be written.
    InvalidOptionError
        If the file holds something else, or another process writes to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
        try:
            _lock(self._file, path)
            self.entries, self._size = read_entries(path)
        except BaseException:
            self._file.close()
            raise

    def append(self, entry: dict[str, object]) -> None:
        """Write one entry; it is on disk when this returns.

        Raises
        ------
        OSError
            If it cannot be written: the entries before it stay.
        """
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        self._file.truncate(self._size)
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._size += len(line)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def read_entries(path: str | os.PathLike[str]) -> Entries:
    """Read the whole lines of a journal; a half-written last line is left out.

    Raises
    ------
    OSError
        If the file cannot be read.
    InvalidOptionError
        If the file holds anything but JSON objects, one per line.
    """
    content = Path(path).read_bytes()
    *lines, half = content.split(b"\n")
    values = []
    for number, line in enumerate(lines, 1):
        value = _parse(line)
        if value is None:
            raise InvalidOptionError(
                f"{path}, line {number} is not a JSON object: give the path of a table, or a new one"
            )
        values.append(value)
    # What a killed writer leaves begins an object and does not end it; anything else is not ours to overwrite.
    if half and (not half.startswith(b"{") or _parse(half) is not None):
        raise InvalidOptionError(f"{path} does not end as a table does: give the path of a table, or a new one")
    return Entries(tuple(values), len(content) - len(half))


def _parse(line: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _lock(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidOptionError(f"another process is writing to {path}: give each its own file") from None
