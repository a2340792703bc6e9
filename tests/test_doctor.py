"""The doctor finds parts that work, are missing, fail, hang or cannot be written to."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

from scheduler import doctor
from scheduler.cli import main
from scheduler.doctor import PARTS, Finding, Part, can_solve, examine, explain_import_error
from scheduler.errors import MissingExtraError
from scheduler.pytorch.versions import TESTED_PYTHON, TESTED_TORCH, describe_tested
from tests.support.paths import ROOT

NUMPY = next(part for part in PARTS if part.name == "numpy")
FOR_ALL = "it is needed for everything: pip install --force-reinstall checkpoint-scheduler"


def trial(code: str) -> Finding:
    """Return the finding of a part that is tried by this code."""
    _, found = examine([Part("part", "sys", "this test", "nothing", trial=code)])
    return found


def test_an_installed_part_is_found_with_the_version_of_its_distribution() -> None:
    _, found = examine([NUMPY])
    assert (found.state, found.detail) == ("ok", version("numpy"))


def test_a_part_that_is_not_installed_is_missing() -> None:
    _, found = examine([Part("nothing", "no_such_module", "this test", "pip install nothing")])
    assert (found.state, found.to_dict()["fix"]) == ("missing", "pip install nothing")


def test_a_part_that_cannot_be_imported_is_named_with_its_fix_and_other_errors_are_raised() -> None:
    assert explain_import_error(ModuleNotFoundError(name="numpy")).endswith(NUMPY.fix)
    assert explain_import_error(MissingExtraError("pip install it")) == "pip install it"
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        explain_import_error(ModuleNotFoundError("no_such_module", name="no_such_module"))


@pytest.mark.parametrize("name", ["solve", "Graph", "zoo"])
def test_without_numpy_the_package_can_be_imported_and_every_name_raises_an_error_with_the_fix(name: str) -> None:
    code = f"import sys; sys.modules['numpy'] = None; import scheduler; print(1); scheduler.{name}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (ran.returncode, ran.stdout) == (1, "1\n")
    assert ran.stderr.splitlines()[-1].endswith(f"MissingExtraError: numpy is not installed; {FOR_ALL}")


def test_the_installed_command_is_that_of_the_module() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"scheduler": "scheduler.__main__:main"}


def test_a_part_that_fails_is_broken_and_the_error_is_shown() -> None:
    found = trial("raise OSError('libfast.so: cannot open')")
    assert (found.state, found.detail) == ("broken", "OSError: libfast.so: cannot open")


def test_a_part_that_crashes_is_broken_and_the_doctor_goes_on() -> None:
    found = trial("import os; os.kill(os.getpid(), 9)")
    assert (found.state, found.detail) == ("broken", "ended with exit code -9")


def test_a_part_that_hangs_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TRIAL_SECONDS", 0.2)
    assert trial("import time; time.sleep(60)").detail == "no answer in 0.2 s"


def test_a_part_that_finds_none_of_its_kind_is_missing() -> None:
    assert (trial("print()").state, trial("print()").detail) == ("missing", "none found")


def test_an_untested_torch_is_named_next_to_the_tested_versions() -> None:
    _, found = examine([Part("torch", "sys", "training", "pip", trial="print('1.0.0+cpu')")])
    assert (found.state, found.detail) == ("untested", "1.0.0+cpu; tested with 2.13, 2.14, 2.15")


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.14.1", "2.15.1"])
def test_every_patch_of_a_tested_minor_version_is_tested(version: str) -> None:
    _, found = examine([Part("torch", "sys", "training", "pip", trial=f"print({version!r})")])
    assert (found.state, found.detail) == ("ok", f"{version}; tested with 2.13, 2.14, 2.15")


def test_the_tested_versions_are_those_of_the_extra_and_of_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = project["optional-dependencies"]["torch"]
    assert describe_tested().endswith(f'pip install "{extra}"')
    assert project["requires-python"] == f">={TESTED_PYTHON[0]}"
    tested = f"Tested with torch {', '.join(TESTED_TORCH)} on CPU, Python {', '.join(TESTED_PYTHON)}."
    assert tested in (ROOT / "README.md").read_text()


def test_every_tested_version_has_passed_all_tests_of_pytorch() -> None:
    with (ROOT / "tests/benchmarks/versions.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["failed"], row["first_command"]) == ("0", "ok")]
    assert {row["torch"].rpartition(".")[0] for row in rows} == {*TESTED_TORCH}
    assert {row["python"].rpartition(".")[0] for row in rows} == {*TESTED_PYTHON}


def test_every_dependency_is_a_needed_part_or_a_prover_and_every_named_extra_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    depended = {re.split("[<>=]", entry)[0] for entry in project["dependencies"]}
    assert depended == {part.module for part in PARTS if part.needed} | {"highspy"}
    extras = {name for part in PARTS for name in re.findall(r"\[(.*)\]", part.fix)}
    assert extras <= set(project["optional-dependencies"])
    assert extras == {"torch", "plot", "models", "cpsat", "tables"}


def test_a_cache_without_a_writable_folder_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (cache,) = (part for part in PARTS if part.name == "numba's cache")
    monkeypatch.setenv("NUMBA_CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/dev/null/cache")
    _, found = examine([cache])
    assert found.state == "broken"
    assert "no locator available" in found.detail
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    _, found = examine([cache])
    assert (found.state, Path(found.detail).parent) == ("ok", tmp_path)


@pytest.mark.parametrize(
    ("broken", "can"),
    [
        ((), True),
        (("numpy",), False),
        (("HiGHS",), True),
        (("CBC",), True),
        (("HiGHS", "CBC"), False),
        (("GPU",), True),
    ],
)
def test_solving_needs_the_needed_parts_and_one_prover(broken: tuple[str, ...], can: bool) -> None:
    findings = [Finding(part, "broken" if part.name in broken else "ok", "") for part in PARTS]
    assert can_solve(findings) is can


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("missing", 1)])
def test_the_command_prints_the_findings_and_exits_by_them(
    state: doctor.State, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding(part, state if part is NUMPY else "ok", "1.0") for part in PARTS]
    monkeypatch.setattr("scheduler.cli.doctor.examine", lambda: findings)
    assert main(["doctor", "--json"]) == code
    printed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in printed] == [part.name for part in PARTS]
    assert printed[0]["state"] == state
    assert main(["doctor"]) == code
    assert (NUMPY.fix in capsys.readouterr().out) is (state != "ok")
