"""The line of a user's code that an error, or a running call, comes from."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models") + os.sep
"""The networks of the catalog: a user's code as far as messages are concerned."""
_TORCH = os.path.dirname(torch.__file__) + os.sep
_GENERATED = "<eval_with_key>"
"""The file that torch.fx names for the code of a graph, with lines that can be read."""
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


@dataclass(frozen=True)
class SourceLine:
    """A line of code.

    Attributes
    ----------
    file : str
    line : int
    text : str
        The line itself, "" if it cannot be read.
    """

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.text}" if self.text else "")


def line_of_error(error: BaseException) -> SourceLine | None:
    """Return the innermost line of user code that an error passed, None if it passed none.

    For an error of TorchDynamo, it is the line that was being traced.
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    start = next((i for i, (file, _) in enumerate(frames) if file.startswith(_PACKAGE)), 0)
    if found := _innermost(frames[start:]):  # the frames before this package only call it
        return found
    traced: Iterable[traceback.FrameSummary] = getattr(error, "real_stack", None) or ()
    return _innermost([(entry.filename, entry.lineno or 0) for entry in traced])


def line_now() -> SourceLine | None:
    """Return the innermost line of user code that is running, None if there is none."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
    return next((source_line(file, line) for file, line in frames if is_users(file)), None)


def is_users(file: str) -> bool:
    """Return whether a file is user code: neither torch's, nor the standard library's, nor this package's."""
    if file.startswith(_MODELS):
        return True
    if file.startswith((_PACKAGE, _TORCH, _GENERATED)) or (file.startswith("<") and not linecache.getlines(file)):
        return False
    return not file.startswith(_STANDARD) or "site-packages" in file


def _innermost(frames: list[tuple[str, int]]) -> SourceLine | None:
    return next((source_line(file, line) for file, line in reversed(frames) if is_users(file)), None)


def source_line(file: str, line: int) -> SourceLine:
    """Return a line of a file with its text."""
    return SourceLine(file, line, linecache.getline(file, line).strip())
