"""Files: JSON that is checked while it is read, text that is written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from scheduler.errors import GraphFormatError
from scheduler.validation import check_unique

if TYPE_CHECKING:
    pass


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file to the side, sync it, and rename it into place: never half a file.

    Raises
    ------
    OSError
        If the path cannot be written; an existing file is left as it was.
    """
    target = Path(path)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=f".{target.name}.", delete=False
    ) as side:
        try:
            side.write(text)
            side.flush()
            os.fsync(side.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(side.name, 0o666 & ~mask)
            os.replace(side.name, target)
        except BaseException:
            os.unlink(side.name)
            raise


def read_json(path: str | os.PathLike[str]) -> object:
    """Return the JSON data in a file; "-" reads standard input.

    Raises
    ------
    GraphFormatError
        If the file cannot be read, is not UTF-8 or not JSON, or holds NaN or infinity.
    """
    return _parse_json(path, _read_text(path))


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path("/dev/stdin" if str(path) == "-" else path).read_text(encoding="utf-8")
    except OSError as error:
        raise GraphFormatError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise GraphFormatError(f"{path} is not valid UTF-8 text: {error}") from error


def _parse_json(path: str | os.PathLike[str], text: str) -> object:
    try:
        data: object = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise GraphFormatError(f"{path} is not valid JSON: {error}") from error
    return data


def _refuse_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        check_unique([name for name, _ in pairs], "entries of one object")
    return entries


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not a number that costs can have")
