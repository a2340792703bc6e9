from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from os import environ, getenv
from pathlib import Path

import pytest

from scheduler.pytorch.guards.environment import Environment, recorded_variables

NAME = "GUARDED"
alias = os.environ

BY_NAME: dict[str, Callable[..., object]] = {
    "entry": lambda: os.environ["GUARDED"],
    "get": lambda: os.environ.get("GUARDED", "1"),
    "get with a keyword": lambda: os.environ.get("GUARDED", default=os.sep),
    "getenv": lambda: os.getenv("GUARDED"),
    "imported": lambda: (environ["GUARDED"], getenv("OTHER_GUARDED")),
    "in": lambda: "GUARDED" not in os.environ,
    "through an alias": lambda: alias["GUARDED"],
    "a constant": lambda: os.environ.get(NAME),
    "inside": lambda: [lambda: os.environ["GUARDED"] for _ in range(2)],
}
COMPUTED: dict[str, Callable[..., object]] = {
    "argument": lambda name: os.environ[name],
    "default of a computed name": lambda name: os.environ.get(name, "GUARDED"),
    "sum": lambda: os.environ.get("GUAR" + NAME),
    "computed default": lambda: os.environ.get("OTHER", str(1)),
    "computed name in": lambda name: f"{name}D" in environ,
    "name or text in": lambda name: [(name or "GUARDED") in os.environ],
    "two arguments": lambda name, default: os.environ.get(name, default),
    "all": lambda: dict(os.environ),
    "closure": (lambda held: lambda: held["OTHER"])(os.environ),
}


@pytest.mark.parametrize("function", BY_NAME.values(), ids=BY_NAME)
def test_only_the_variables_that_code_names_count(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment([function])
    monkeypatch.setenv("UNRELATED", "2")
    assert environment.difference() == ""
    monkeypatch.setenv("GUARDED", "2")
    assert environment.difference() == "os.environ['GUARDED'] was None when the plan was made, is '2'"
    monkeypatch.delenv("GUARDED")
    assert environment.difference() == ""


@pytest.mark.parametrize("function", COMPUTED.values(), ids=COMPUTED)
def test_where_the_name_is_computed_all_variables_count(
    function: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Environment([function])
    monkeypatch.setenv("UNRELATED", "2")
    assert environment.difference() == "os.environ['UNRELATED'] was None when the plan was made, is '2'"


def test_looked_up_variables_are_recorded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(name: str) -> object:
        return os.getenv(name), name in os.environ

    with recorded_variables() as names:
        read("GUARDED")
    assert names == {"GUARDED"}
    environment = Environment([])
    environment.add(names)
    monkeypatch.setenv("UNRELATED", "2")
    assert environment.difference() == ""
    monkeypatch.setenv("GUARDED", "2")
    assert "GUARDED" in environment.difference()


def test_what_an_import_looks_up_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looks_up_all.py").write_text("import os\nheld = {name: value for name, value in os.environ.items()}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with recorded_variables() as names:
        importlib.import_module("looks_up_all")
    assert names == set()
