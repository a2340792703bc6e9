"""Journals: files of JSON lines, synced after each entry, so that a killed process loses no finished entry."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

from scheduler.errors import InvalidOptionError


class Entries(NamedTuple):
    """The content of a journal.

    Attributes
    ----------
    values : tuple of dict
        One per complete line.
    size_bytes : int
        Total size of the complete lines. A rest after them is an entry whose writer was killed.
    """

    values: tuple[dict[str, object], ...]
    size_bytes: int


class Journal:
    """A file to which entries are appended, each of them synced to disk before the next.

    Parameters
    ----------
    path : path
        Created if it is missing. An incomplete last line is ignored, and overwritten by the
        next entry; nothing else in the file ever changes.

    Attributes
    ----------
    entries : tuple of dict
        The entries of the file when it was opened.

    Raises
    ------
    OSError
        If the path cannot be written.
    InvalidOptionError
        If the file is not a journal, or another process is writing to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        with ExitStack() as stack:
            self._file = stack.enter_context(open(path, "a+b"))
            _lock(self._file, path)
            self.entries, self._size = read_entries(path)
            stack.pop_all()  # __exit__ closes the file

    def append(self, entry: dict[str, object]) -> None:
        """Write one entry and sync it to disk.

        Raises
        ------
        OSError
            If it cannot be written; earlier entries are kept.
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
    """Read the complete lines of a journal; an incomplete last line is left out.

    Raises
    ------
    OSError
        If the file cannot be read.
    InvalidOptionError
        If the file contains anything but JSON objects, one per line.
    """
    content = Path(path).read_bytes()
    *lines, rest = content.split(b"\n")
    values = []
    for number, line in enumerate(lines, 1):
        value = _parse(line)
        if value is None:
            raise InvalidOptionError(
                f"{path}, line {number} is not a JSON object: give the path of a table or a new path"
            )
        values.append(value)
    # A killed writer leaves the beginning of an object. Anything else is not ours to overwrite.
    if rest and (not rest.startswith(b"{") or _parse(rest) is not None):
        raise InvalidOptionError(f"{path} does not end as a table does: give the path of a table or a new path")
    return Entries(tuple(values), len(content) - len(rest))


def _parse(line: bytes) -> dict[str, object] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _lock(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    try:
        import fcntl
    except ImportError:  # not available on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidOptionError(f"another process is writing to {path}: give each process a file of its own") from None
