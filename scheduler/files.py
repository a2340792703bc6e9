"""Files: JSON that is checked while it is read, content that is written as a whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from scheduler.errors import GraphFormatError
from scheduler.validation import check_unique


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file of text as a whole or not at all; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file as a whole or not at all: to a side file, synced, and renamed into place.

    Raises
    ------
    OSError
        If the path cannot be written; an existing file is left as it was.
    """
    target = Path(path)
    side = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    # The kernel applies the process's mask to this mode, so that no other thread sees the mask change.
    descriptor = os.open(side, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(side, target)
    except BaseException:
        os.unlink(side)
        raise


def read_json(path: str | os.PathLike[str]) -> object:
    """Return the JSON data in a file; "-" reads standard input.

    Raises
    ------
    GraphFormatError
        If the file cannot be read, is not UTF-8 or not JSON, or holds NaN or infinity.
    """
    return parse_json(path, read_text(path))


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a file; "-" reads standard input.

    Raises
    ------
    GraphFormatError
        If the file cannot be read or is not UTF-8.
    """
    try:
        return Path("/dev/stdin" if str(path) == "-" else path).read_text(encoding="utf-8")
    except OSError as error:
        raise GraphFormatError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GraphFormatError(f"{path} is not valid UTF-8 text: {error}") from error


def parse_json(path: str | os.PathLike[str], text: str) -> object:
    """Return the JSON data in the text of a file.

    Raises
    ------
    GraphFormatError
        If the text is not JSON, holds NaN or infinity, or an object repeats a key.
    """
    try:
        data: object = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_reject_repeats)
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"{path} is not valid JSON: {error}") from error
    return data


def _reject_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        check_unique([name for name, _ in pairs], "entries of one object")
    return entries


def _reject_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number that costs can have")
