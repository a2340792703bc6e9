"""The bytecode of the same call differs between versions of Python."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import pytest

from scheduler.pytorch.guards.computed_names import ComputedNames, computed_names

WHOLE: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "name": (lambda a: getattr(a, "x"), {"x"}),  # noqa: B009
    "default": (lambda a: getattr(a, "x", "y"), {"x"}),
    "local default": (lambda a, b: getattr(a, "x", b), {"x"}),
    "computed default": (lambda a: getattr(a, "x", f"{a}y"), {"x"}),
    "called default": (lambda a, b: hasattr(a, "x") and getattr(a, "x", b("y", c=a)), {"x"}),
    "object of a call": (lambda a: getattr(a("y"), "x"), {"x"}),  # noqa: B009
    "object of a call with a keyword": (lambda a, b: getattr(a(b, c="y"), "x"), {"x"}),  # noqa: B009
    "called": (lambda a, b: getattr(a, "x")(a, b, c="y"), {"x"}),  # noqa: B009
    "path": (lambda a: attrgetter("x.y", "z")(a), {"x", "y", "z"}),
    "through a module": (lambda a: operator.attrgetter("x")(a), {"x"}),
    "method": (lambda a: methodcaller("x", a)(a), {"x"}),
    "method with a keyword": (lambda a, b: methodcaller("x", a, y=b)(a), {"x"}),
    "in a call with a keyword": (lambda a, b: sorted(a, key=attrgetter("x"), reverse=b), {"x"}),
    "inner function": (lambda: lambda a: [getattr(b, "x") for b in a], {"x"}),  # noqa: B009
}
PIECES: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "format string": (lambda a, i: getattr(a, f"x{i}"), {"x"}),
    "format with a width": (lambda a, i: getattr(a, f"x{i:02d}y"), {"x", "y"}),
    "sum": (lambda a, b: getattr(a, "x" + b), {"x"}),
    "sum with a default": (lambda a, b: getattr(a, b + "x", None), {"x"}),
}
OPEN: dict[str, Callable[..., Any]] = {
    "local name": lambda a, b: getattr(a, b),
    "two locals and a default": lambda a, b: getattr(a, b, "x"),
    "arguments of a list": lambda a, b: (getattr(a, *b), a("x")),
    "handed to a function": lambda a, b: (map(getattr, a, b), a("x")),
    "handed to a function with keywords": lambda a, b: (a(getattr, c=b), a("x")),
    "handed on with a text": lambda a, b: partial(getattr, a)("x" + b),
    "under another name": lambda a, b: (c := getattr, c(a, b), a("x")),
    "name or text": lambda a, b: getattr(a, b or "x"),
    "result of a method": lambda a, b: getattr(a, "x{}".format(b)),  # noqa: UP032
    "result of a method with a keyword": lambda a, b: getattr(a, "{c}x".format(c=b)),  # noqa: UP032
    "filled in": lambda a, b: getattr(a, "x%d" % b),  # noqa: UP031
    "joined": lambda a, b: getattr(a, "_".join(["x", b])),
    "entry": lambda a, b: getattr(a, b["x"]),
    "format string without text": lambda a, b: getattr(a, f"{b['x']}{b:>3}"),
    "some of several": lambda a, b: attrgetter(b, "x")(a),
}


@pytest.mark.parametrize(("function", "names"), WHOLE.values(), ids=WHOLE)
def test_names_that_code_spells_out(function: Callable[..., Any], names: set[str]) -> None:
    assert computed_names(function.__code__) == ComputedNames(frozenset(names), frozenset(), is_open=False)


@pytest.mark.parametrize(("function", "pieces"), PIECES.values(), ids=PIECES)
def test_pieces_of_names_that_code_puts_together(function: Callable[..., Any], pieces: set[str]) -> None:
    assert computed_names(function.__code__) == ComputedNames(frozenset(), frozenset(pieces), is_open=False)


@pytest.mark.parametrize("function", OPEN.values(), ids=OPEN)
def test_names_that_code_does_not_show(function: Callable[..., Any]) -> None:
    assert computed_names(function.__code__).is_open


def test_either_of_two_names_may_be_read() -> None:
    names = computed_names((lambda a, b: getattr(a, "x" if b else "y", None)).__code__)
    assert names.is_open or names.whole == {"x", "y"}  # Python 3.12 and later repeat the call in each branch
