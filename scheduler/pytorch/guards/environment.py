"""Find which environment variables the code of a step reads, and notice that one of them has changed."""

from __future__ import annotations

import contextlib
import dis
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any

from scheduler.pytorch.guards.object_words import versions_check
from scheduler.pytorch.guards.read_names import is_installed, is_library
from scheduler.pytorch.torch_private.guards import Check

_NAMES = frozenset({"environ", "environb", "getenv", "getenvb"})
_OF_NO_EFFECT = frozenset({"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "PUSH_NULL", "RESUME"})
_LOOKUPS = frozenset({"get", "__getitem__", "__contains__"})
_PUSHES = frozenset({"LOAD_CONST", "LOAD_DEREF", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME"})


_OF_THE_LOOKUP = frozenset({"os", "collections.abc", "_collections_abc"})
"""Python modules with the methods of `os.environ`."""


@contextlib.contextmanager
def recorded_variables() -> Iterator[set[str]]:
    """Record the environment variables that code looks up, outside libraries and not while it is imported."""
    kind = type(os.environ)
    get, names, outside = kind.__getitem__, set[str](), sys._getframe(2)

    def note(environment: Any, name: Any) -> Any:
        if isinstance(name, str | bytes) and _counts(sys._getframe(1), outside):
            names.add(os.fsdecode(name))
        return get(environment, name)

    kind.__getitem__ = note  # type: ignore[method-assign]
    try:
        yield names
    finally:
        kind.__getitem__ = get  # type: ignore[method-assign]


def _counts(frame: FrameType | None, outside: FrameType) -> bool:
    """Return whether a lookup counts, given the frame that it was made in."""
    while frame is not None and frame.f_globals.get("__name__") in _OF_THE_LOOKUP:
        frame = frame.f_back
    if frame is None or is_library(frame.f_globals.get("__name__", "")):
        return False
    while frame is not None and frame is not outside:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        frame = frame.f_back
    return True


class Environment:
    """The environment variables that functions read, as they were when this object was made.

    Parameters
    ----------
    functions : iterable of function
        Of the user's functions that compute the name of a variable, all variables count. Of those
        of installed packages, only the names that they spell out.
    """

    def __init__(self, functions: Iterable[FunctionType]) -> None:
        self._names = _variables(functions)
        self._then = self._read()
        self._is_unchanged = _check()

    def add(self, names: Iterable[str]) -> None:
        """Add variables that were looked up while the step was captured."""
        if self._names is not None:
            self._names |= set(names)
            self._then = self._read() | self._then

    def _read(self) -> dict[str, str | None]:
        if self._names is None:
            return {**os.environ}
        return {name: os.environ.get(name) for name in self._names}

    def difference(self) -> str:
        """Return what differs now, "" if nothing does."""
        if self._is_unchanged():
            return ""
        now = self._read()
        if now == self._then:
            self._is_unchanged = _check()
            return ""
        name = min(key for key in {*self._then, *now} if now.get(key) != self._then.get(key))
        return f"os.environ[{name!r}] was {self._then.get(name)!r} when the plan was made, is {now.get(name)!r}"


def _check() -> Check:
    """Return a check that no variable at all has changed since this call."""
    held = vars(os.environ).get("_data")
    return versions_check([held]) if isinstance(held, dict) else lambda: False


def _variables(functions: Iterable[FunctionType]) -> set[str] | None:
    """Return the variables that functions read, None if one of them computes the name."""
    found: set[str] = set()
    for function in functions:
        if not is_installed(function) and any(map(_is_environment, _held(function))):
            return None
        for name in _names_in(function.__code__, function.__globals__):
            if isinstance(name, str | bytes):
                found.add(os.fsdecode(name))
            elif not is_installed(function):
                return None
    return found


def _held(function: FunctionType) -> Iterator[object]:
    yield from function.__defaults__ or ()
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):
            yield cell.cell_contents


def _names_in(code: CodeType, scope: Mapping[str, object]) -> Iterator[object]:
    """Yield the name of each variable that a piece of code reads, None where the code does not show it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant, scope)
    if not any(name in _NAMES or _is_environment(scope.get(name)) for name in code.co_names):
        return
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _OF_NO_EFFECT]
    for number, instruction in enumerate(instructions):
        is_global = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        if instruction.opcode not in dis.hasname:
            continue
        if _is_environment(scope.get(instruction.argval)) if is_global else instruction.argval in _NAMES:
            first, after = number if is_global else number - 1, instructions[number + 1 :]
            if first > 0 and after and after[0].opname == "CONTAINS_OP":
                key = None if instructions[first].is_jump_target else instructions[first - 1]  # None for a choice
            else:
                key = _key(after)
            yield None if key is None else _constant(key, scope)


def _key(after: Sequence[dis.Instruction]) -> dis.Instruction | None:
    """Return what pushes the name for a lookup: `["X"]`, `.get("X", ...)` or `("X")`; None if it is not that simple."""
    if after and after[0].opcode in dis.hasname and after[0].argval in _LOOKUPS:
        after = after[1:]
    if len(after) < 2:
        return None
    if after[1].opname in ("BINARY_SUBSCR", "BINARY_OP") and after[1].argrepr in ("", "[]"):
        return after[0]
    pushed = 0
    for instruction in after:
        if instruction.opname in ("CALL", "CALL_KW"):  # in Python 3.13, names of keywords are pushed last
            arguments = pushed - 1 if instruction.opname == "CALL_KW" else pushed
            return after[0] if instruction.arg == arguments else None
        if instruction.opname in _PUSHES:
            pushed += 1
        elif instruction.opname != "LOAD_ATTR" or pushed < 2:
            return None
    return None


def _constant(instruction: dis.Instruction, scope: Mapping[str, object]) -> object:
    if instruction.opname == "LOAD_CONST":
        return instruction.argval
    return scope.get(instruction.argval) if instruction.opname == "LOAD_GLOBAL" else None


def _is_environment(value: object) -> bool:
    return any(value is each for each in (os.environ, os.getenv, getattr(os, "environb", None)) if each is not None)
