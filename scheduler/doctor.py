"""Check the installation: which parts work, which are missing or broken, and how to fix them.

Each part is tried in a process of its own, so that one which crashes or hangs on import does
not take the check down with it.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, NoReturn

from scheduler.errors import MissingExtraError
from scheduler.pytorch.versions import TESTED_PYTHON, TESTED_TORCH, is_tested

TRIAL_SECONDS = 120.0
"""A part that does not answer within this time counts as broken."""

State = Literal["ok", "missing", "broken", "untested"]

_CBC = (
    "import warnings, pulp; warnings.simplefilter('ignore')\n"
    "print(f'with PuLP {pulp.__version__}' if pulp.PULP_CBC_CMD().available() else '')"
)
_CACHE = (
    "from numba.core.caching import CompileResultCacheImpl\n"
    "from scheduler.solvers import graph_arrays\n"
    "def kernel(): pass\n"
    "kernel.__code__ = kernel.__code__.replace(co_filename=graph_arrays.__file__)\n"
    "print(CompileResultCacheImpl(kernel).locator.get_cache_path())"
)
_TORCH = (
    "import warnings, importlib.metadata as m; warnings.simplefilter('ignore')\n"
    "import scheduler.pytorch.torch_private; print(m.version('torch'))"
)
"""Fails if a version that is not tested lacks a name that this package needs."""
_COSTS = "from scheduler.pytorch.costs.kept_costs import describe_file; print(describe_file())"
_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


@dataclass(frozen=True, slots=True)
class Part:
    """A package, program or device that this package uses.

    Attributes
    ----------
    name : str
        Its usual name.
    module : str
        The module that must be installed for it.
    purpose : str
        What it is needed for.
    fix : str
        What to do if it is missing or broken.
    needed : bool
        True if nothing can be solved without it.
    trial : str
        Python code that prints its version or location, prints nothing if there is none, and
        fails if it is broken. By default the module is imported.
    """

    name: str
    module: str
    purpose: str
    fix: str
    needed: bool = False
    trial: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of a part on this machine.

    Attributes
    ----------
    part : Part
    state : "ok", "missing", "broken" or "untested"
    detail : str
        Its version or location, or the error.
    """

    part: Part
    state: State
    detail: str

    def to_dict(self) -> dict[str, object]:
        """Return the finding as plain data, ready for JSON."""
        part = self.part
        return {
            "name": part.name,
            "state": self.state,
            "detail": self.detail,
            "purpose": part.purpose,
            "needed": part.needed,
            "fix": None if self.state == "ok" else part.fix,
        }


def _extra(name: str) -> str:
    return f'pip install "checkpoint-scheduler[{name}]"'


_REINSTALL = "pip install --force-reinstall checkpoint-scheduler"
PARTS = (
    Part("numpy", "numpy", "everything", _REINSTALL, needed=True),
    Part("numba", "numba", "the kernels of the solvers", _REINSTALL, needed=True),
    Part("networkx", "networkx", "reading graph files of other tools", _REINSTALL, needed=True),
    Part("PuLP", "pulp", "integer programs", _REINSTALL, needed=True),
    Part("HiGHS", "highspy", "bounds and proofs", 'pip install "highspy>=1.11,<1.14"'),
    Part("CBC", "pulp", "bounds if HiGHS is missing", _REINSTALL, trial=_CBC),
    Part(
        "numba's cache",
        "numba",
        "compiling kernels once instead of in every process",
        "set NUMBA_CACHE_DIR to a writable folder",
        trial=_CACHE,
    ),
    Part("torch", "torch", "tracing and training", _extra("torch"), trial=_TORCH),
    Part(
        "measured costs",
        "torch",
        "measuring operators once instead of in every process",
        "set SCHEDULER_COSTS_FILE to a writable path",
        trial=_COSTS,
    ),
    Part("GPU", "torch", "training on a GPU", "optional; to use one, install a torch build for it", trial=_GPU),
    Part("matplotlib", "matplotlib", "plots and reports", _extra("plot")),
    Part("transformers", "transformers", "the models named hf-...", _extra("models")),
    Part("OR-tools", "ortools", 'the solver "moccasin"', _extra("cpsat")),
    Part("pandas", "pandas", "tables as data frames", _extra("tables")),
)


_PROVERS = frozenset(("HiGHS", "CBC"))


def examine(parts: Iterable[Part] = PARTS) -> tuple[Finding, ...]:
    """Try every part and return the findings: Python first, then the parts in their order."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return (_python(), *pool.map(_finding, parts))


def can_solve(findings: Iterable[Finding]) -> bool:
    """Return whether plans can be made and proven: all needed parts work, and HiGHS or CBC does."""
    findings = tuple(findings)
    works = {finding.part.name for finding in findings if finding.state in ("ok", "untested")}
    return all(finding.part.name in works for finding in findings if finding.part.needed) and bool(works & _PROVERS)


def explain_import_error(error: ImportError) -> str:
    """Return in one line which part is not installed and how to install it.

    Parameters
    ----------
    error : ImportError
        The error raised by an import of this package or of one of its parts.

    Raises
    ------
    ImportError
        The error itself, if it is not about one of `PARTS`.
    """
    if isinstance(error, MissingExtraError):
        return str(error)
    for part in PARTS:
        if part.module == error.name:
            return f"{part.name} is not installed; it is needed for {part.purpose}: {part.fix}"
    raise error


def raiser_of(error: ImportError) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__` that raises `explain_import_error` for every name."""
    message = explain_import_error(error)

    def raise_missing(name: str) -> NoReturn:
        raise MissingExtraError(message)

    return raise_missing


def _python() -> Finding:
    version = platform.python_version()
    part = Part("Python", "sys", "everything", "install a tested version", needed=True)
    detail = f"{version}; tested with {', '.join(TESTED_PYTHON)}"
    return Finding(part, "ok" if version.rpartition(".")[0] in TESTED_PYTHON else "untested", detail)


def _finding(part: Part) -> Finding:
    if find_spec(part.module) is None:
        return Finding(part, "missing", "not installed")
    trial = part.trial or f"import {part.module}, importlib.metadata as m; print(m.version({part.module!r}))"
    command, env = [sys.executable, "-c", trial], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False, env=env)
    except subprocess.TimeoutExpired:
        return Finding(part, "broken", f"no answer in {TRIAL_SECONDS:g} s")
    if ran.returncode:
        *_, message = ran.stderr.strip().splitlines() or [f"ended with exit code {ran.returncode}"]
        return Finding(part, "broken", message)
    found = ran.stdout.strip()
    if not found:
        return Finding(part, "missing", "none found")
    if part.name == "torch":
        detail = f"{found}; tested with {', '.join(TESTED_TORCH)}"
        return Finding(part, "ok" if is_tested(found) else "untested", detail)
    return Finding(part, "ok", found)
