"""Find the names with which code calls `getattr` and its like."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import CodeType

_NAMED = {
    "attrgetter": slice(None),
    "delattr": slice(1, 2),
    "getattr": slice(1, 2),
    "hasattr": slice(1, 2),
    "methodcaller": slice(0, 1),
}
"""Which arguments of functions that read attributes are names."""
READ_BY_NAME = frozenset(_NAMED)
_OF_NO_EFFECT = frozenset({"CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "PRECALL", "RESUME"})
_CALLS = frozenset({"CALL", "CALL_KW"})
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})


@dataclass(frozen=True, slots=True)
class ComputedNames:
    """The names with which code calls `getattr` and its like.

    Attributes
    ----------
    whole : frozenset of str
        Those that it spells out.
    pieces : frozenset of str
        Parts of those that it puts together: "layer" of `getattr(self, f"layer{i}")`.
    is_open : bool
        Whether there are others that the code does not show.
    """

    whole: frozenset[str]
    pieces: frozenset[str]
    is_open: bool


@functools.lru_cache(maxsize=10_000)
def computed_names(code: CodeType) -> ComputedNames:
    """Return the names with which a piece of code calls `getattr` and its like."""
    found = [computed_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _OF_NO_EFFECT]
    for start, instruction in enumerate(instructions):
        if instruction.opcode in dis.hasname and instruction.argval in _NAMED:
            arguments = _arguments(instructions[start:])
            names = None if arguments is None else arguments[_NAMED[instruction.argval]]
            found += [_OPEN] if names is None else map(_name, names)
    return ComputedNames(
        frozenset[str]().union(*(each.whole for each in found)),
        frozenset[str]().union(*(each.pieces for each in found)),
        any(each.is_open for each in found),
    )


_OPEN = ComputedNames(frozenset(), frozenset(), is_open=True)


def _arguments(instructions: Sequence[dis.Instruction]) -> list[Sequence[dis.Instruction]] | None:
    """Return what pushes each argument of a function; None where the code does not call it or has branches before that.

    Parameters
    ----------
    instructions : sequence of dis.Instruction
        From the one that loads the function.
    """
    heights: list[int] = []
    """Of the stack, after each instruction, above what lies under the function."""
    callee = 1 + (instructions[1].opname == "PUSH_NULL" and sys.version_info >= (3, 13))  # before, it came first
    for instruction in instructions:
        if instruction.opcode in _JUMPS:
            return None
        heights.append((heights[-1] if heights else 0) + _effect(instruction))
        if len(heights) > callee and heights[-1] < heights[callee - 1]:
            break
    base = heights[callee - 1]
    if instruction.opname not in _CALLS or heights[-1] != base - 1:
        return None
    ends = [max(n for n, height in enumerate(heights[:-1]) if height <= top) for top in range(base, heights[-2] + 1)]
    return [instructions[end + 1 : next_end + 1] for end, next_end in pairwise(ends)]


def _effect(instruction: dis.Instruction) -> int:
    """Return by how much an instruction changes the height of the stack."""
    if instruction.opname == "CALL":  # which Python 3.11 counts in two parts
        return -1 - (instruction.arg or 0)
    return dis.stack_effect(instruction.opcode, instruction.arg)


def _name(pushes: Sequence[dis.Instruction]) -> ComputedNames:
    """Return a name, given the instructions that push it."""
    texts = [*_texts(pushes)]
    if len(texts) == len(pushes) == 1:
        return ComputedNames(frozenset(texts[0].split(".")), frozenset(), is_open=False)
    last = pushes[-1] if pushes else None
    if last is not None and texts and (last.opname == "BUILD_STRING" or last.argrepr == "+"):
        return ComputedNames(frozenset(), frozenset(texts), is_open=False)
    return _OPEN


def _texts(pushes: Sequence[dis.Instruction]) -> Iterator[str]:
    """Yield the texts that instructions push, except where the next one computes something else with them."""
    for instruction, after in zip(pushes, [*pushes[1:], None], strict=True):
        is_changed = after is not None and (after.opname.startswith(_CHANGES) or after.argrepr in ("[]", "%", "*"))
        text = instruction.argval if instruction.opname == "LOAD_CONST" and not is_changed else None
        if text and isinstance(text, str):
            yield text


_CHANGES = ("FORMAT", "BINARY_SUBSCR", "CALL", "LOAD_ATTR", "LOAD_METHOD")
