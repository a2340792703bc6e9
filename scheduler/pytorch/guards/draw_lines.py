"""Find the lines of user code that take values from outside a captured step.

Some sources keep no state that could be compared: clocks, the operating system's random bytes,
uuids. Their calls are recorded while the step runs, for steps whose code mentions such a source.
"""

from __future__ import annotations

import contextlib
import datetime
import dis
import os
import random
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from scheduler.pytorch.guards.outside_states import OutsideState
from scheduler.pytorch.guards.read_names import ReadNames, is_library
from scheduler.pytorch.source_lines import SourceLine, is_users, source_line
from scheduler.pytorch.torch_private.dynamo import traced_lines

_CLOCKS = {
    getattr(time, name): f"the clock (time.{name})"
    for name in (
        "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time",
        "process_time_ns", "thread_time", "thread_time_ns", "localtime", "gmtime", "ctime", "strftime", "asctime",
    )
    if hasattr(time, name)
} | {
    datetime.datetime.now: "the clock (datetime.now)",
    datetime.datetime.utcnow: "the clock (datetime.utcnow)",
    datetime.datetime.today: "the clock (datetime.today)",
    datetime.date.today: "the clock (date.today)",
}  # fmt: skip
"""Counted where user code calls them: libraries read clocks for their logs."""

_SYSTEM = {
    getattr(os, name): f"the operating system (os.{name})" for name in ("urandom", "getrandom") if hasattr(os, name)
}
_FUNCTIONS: dict[CodeType, str] = {
    uuid.uuid1.__code__: "uuid.uuid1",
    uuid.uuid4.__code__: "uuid.uuid4",
    random.SystemRandom.random.__code__: "random.SystemRandom",
    random.SystemRandom.getrandbits.__code__: "random.SystemRandom, or something seeded by the operating system",
}
_SEEDING = frozenset({"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state", "initial_seed"})
"""Methods of a torch.Generator that a captured step would not repeat."""

_MENTIONED = (
    {function.__name__ for function in (*_CLOCKS, *_SYSTEM)}
    | {"uuid1", "uuid4", "SystemRandom", "Random", "secrets", "default_rng", "RandomState", "SeedSequence"}
    | {"MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"}
    | {"manual_seed", "manual_seed_all", "fork_rng", "set_rng_state", "set_state", "seed", "seed_all", "initial_seed"}
)
_NUMPY_UNDER_DYNAMO = os.path.join("torch", "_numpy", "random.py")


@dataclass(frozen=True)
class Draw:
    """A place in the code that takes a value from outside.

    Attributes
    ----------
    source : str
    line : SourceLine or None
    owner : object
        The generator, if it is known.
    """

    source: str
    line: SourceLine | None
    owner: object = None


def mentions_unseen_sources(read: ReadNames) -> bool:
    """Return whether the code of a step mentions a source that keeps no state, under any name."""
    if read.names & _MENTIONED:
        return True
    sources = {*_CLOCKS, *_SYSTEM, uuid.uuid1, uuid.uuid4}
    for function in read.functions:
        found = [function.__globals__.get(name) for name in function.__code__.co_names]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                found.append(cell.cell_contents)
        if any(isinstance(value, random.SystemRandom) or _is_in(value, sources) for value in found):
            return True
    return False


def _is_in(value: object, found: set[object]) -> bool:
    try:
        return value in found
    except TypeError:
        return False


@contextlib.contextmanager
def recorded_draws() -> Iterator[list[Draw]]:
    """Record the calls of sources that keep no state, made by user code or on its behalf."""
    draws: list[Draw] = []
    # TorchDynamo makes millions of calls. Nearly all of them are known to be no sources by these.
    other_codes: dict[int, CodeType] = {}
    other_owners: set[type] = set()

    def note(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call":
            kind = type(getattr(called, "__self__", None))
            if kind in other_owners or (kind is ModuleType and called not in _BUILTINS):
                return
            if not issubclass(kind, _OWNERS):
                other_owners.add(kind)
                return
            source = _source_of_builtin(frame, called)
        elif event == "call":
            code = frame.f_code
            if id(code) in other_codes:  # to hash code takes long
                return
            if not _is_source(code):
                other_codes[id(code)] = code
                return
            source = _source_of_function(frame)
        else:
            return
        if source and (line := _user_line(frame)) is not None:
            draws.append(Draw(source, line, getattr(called, "__self__", None)))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield draws
    finally:
        sys.setprofile(before)


def _is_source(code: CodeType) -> bool:
    """Return whether calls of a function may take a value from outside."""
    return code in _FUNCTIONS or code is _SEED or code.co_filename.endswith(_NUMPY_UNDER_DYNAMO)


def _source_of_function(frame: FrameType) -> str:
    code = frame.f_code
    if code in _FUNCTIONS:
        return _FUNCTIONS[code]
    if code is not _SEED:
        return "numpy.random, which TorchDynamo replaces by draws of torch"
    without_seed = frame.f_locals.get("a") is None and "_dynamo" not in _file(frame, 2)
    return "a random.Random without a seed" if without_seed else ""


def _source_of_builtin(frame: FrameType, called: object) -> str:
    if _is_in(called, _BUILTINS):
        return _SYSTEM[called] if called in _SYSTEM else _CLOCKS[called] if _is_user_frame(frame) else ""
    owner = getattr(called, "__self__", None)
    if isinstance(owner, torch.Generator):
        seeds = getattr(called, "__name__", "") in _SEEDING
        return "the seed or state of a torch.Generator" if seeds and not _is_replay(frame) else ""
    if isinstance(owner, random.Random) and "_dynamo" in frame.f_code.co_filename:
        return "a random.Random"
    return ""


_BUILTINS = {*_CLOCKS, *_SYSTEM}
_OWNERS = (ModuleType, type, torch.Generator, random.Random)
"""What builtin functions that may be sources belong to."""
_SEED = random.Random.seed.__code__


def _file(frame: FrameType, depth: int) -> str:
    current: FrameType | None = frame
    for _ in range(depth):
        current = None if current is None else current.f_back
    return "" if current is None else current.f_code.co_filename


def _is_replay(frame: FrameType) -> bool:
    """Return whether a generator is set by torch.utils.checkpoint, which leaves it as it was, or by this package."""
    current: FrameType | None = frame
    while current is not None and not _is_user_frame(current):
        if current.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        current = current.f_back
    return current is None


def _is_user_frame(frame: FrameType) -> bool:
    return is_users(frame.f_code.co_filename) and not is_library(str(frame.f_globals.get("__name__", "")))


def _user_line(frame: FrameType) -> SourceLine | None:
    """Return the line of user code that calls a frame, under TorchDynamo the line that it traces; None in an import."""
    found: SourceLine | None = None
    current: FrameType | None = frame
    while current is not None and not current.f_code.co_filename.startswith(_HERE):
        if current.f_code.co_filename.startswith("<frozen importlib"):
            return None
        if found is None and _is_user_frame(current):
            found = source_line(current.f_code.co_filename, current.f_lineno)
        current = current.f_back
    if traced := traced_lines():
        return source_line(traced[-1].filename, traced[-1].lineno or 0)
    return found


_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep + "capture" + os.sep


def first_change(run: Callable[[], object], states: list[OutsideState]) -> Draw | None:
    """Run a step again and return the first line at which one of these states changes, None if none does.

    Parameters
    ----------
    run : callable
        May fail: only what it runs before counts.
    states : list of OutsideState
    """
    search = _Search(states)
    before = sys.gettrace()
    sys.settrace(search.enter)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(before)
    return search.found


class _Search:
    """Compares states at every line of user code."""

    def __init__(self, states: list[OutsideState]) -> None:
        self._states = states
        self._before = [state.read() for state in states]
        self._at: SourceLine | None = None
        self.found: Draw | None = None

    def enter(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        """Follow the frames of user code."""
        if self.found is not None or not _is_user_frame(frame):
            return None
        self._compare()
        return self._follow

    def _follow(self, frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        self._compare()
        if event == "line":
            self._at = source_line(frame.f_code.co_filename, frame.f_lineno)
        elif event == "return":
            caller = frame.f_back
            while caller is not None and not _is_user_frame(caller):
                caller = caller.f_back
            self._at = None if caller is None else source_line(caller.f_code.co_filename, caller.f_lineno)
        return None if self.found is not None else self._follow

    def _compare(self) -> None:
        for state, before in zip(self._states, self._before, strict=True):
            if self.found is None and state.read() != before:
                self.found = Draw(state.name, self._at)


TraceFunction = Callable[[FrameType, str, Any], Any]


def line_that_mentions(name: str, read: ReadNames) -> SourceLine | None:
    """Return the first line of a step's code that mentions an attribute or a global, None if none does."""
    for function in read.functions:
        line = 0
        for instruction in dis.get_instructions(function):
            line = (instruction.positions and instruction.positions.lineno) or line
            if instruction.argval == name and is_users(function.__code__.co_filename):
                return source_line(function.__code__.co_filename, line)
    return None
