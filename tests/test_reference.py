"""The API reference has every public name and every solver, each with a docstring."""

from __future__ import annotations

import importlib.util
import inspect
from types import ModuleType

import pytest

from scheduler.solvers.registry import MODULES
from tests.support.paths import ROOT

BUILD = ROOT / ".ci" / "docs" / "build.py"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("build_site", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_has_a_docstring(site: ModuleType) -> None:
    for package in site.PACKAGES:
        assert len(inspect.getdoc(package) or "") > 10
        for name in package.__all__:
            first = (inspect.getdoc(getattr(package, name)) or "").split("\n\n")[0]
            assert len(first) > 10, f"{package.__name__}.{name}"


def test_every_package_and_every_solver_has_a_page(site: ModuleType) -> None:
    assert {"scheduler", "scheduler.pytorch", "scheduler.zoo", "scheduler.plots", *MODULES.values()} <= set(
        site.REFERENCE
    )
    assert len(set(site.REFERENCE)) == len(site.REFERENCE)


def test_a_package_shows_what_it_exports_and_a_module_what_no_package_shows(site: ModuleType) -> None:
    assert ":imported-members:" in site.reference_page("scheduler")
    own = site.reference_page("scheduler.problem").split(":members:")[1]
    assert "parse_budget" in own
    assert " Problem," not in own


def test_the_menu_has_every_page_and_every_notebook(site: ModuleType) -> None:
    menu = site.menu().splitlines()
    for path in [*(ROOT / "notebooks" / "guide").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]:
        assert menu.count(str(path.relative_to(ROOT).with_suffix(""))) == 1, path.name
