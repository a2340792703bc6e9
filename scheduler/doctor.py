"""The doctor: what is installed here, what is missing, and what mends it.

Each part is tried in a process of its own: one that crashes or hangs on import is found ill,
and the doctor stays well.
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

TESTED_TORCH = ("2.13.0",)
"""Versions that the tests run with, and that the extra `torch` allows."""
TESTED_PYTHON = ("3.11",)
SECONDS = 120.0
"""After which a part that does not answer is ill."""

State = Literal["ok", "missing", "ill", "untested"]

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
_GPU = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


@dataclass(frozen=True, slots=True)
class Part:
    """Something that the package builds on.

    Attributes
    ----------
    name : str
        What a person calls it.
    module : str
        That must be installed.
    serves : str
        What it is needed for.
    mends : str
        What to do if it is missing or ill.
    needed : bool
        Without it nothing can be solved.
    trial : str
        Python that prints its version or place, nothing if there is none, or fails; by default its import.
    """

    name: str
    module: str
    serves: str
    mends: str
    needed: bool = False
    trial: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of a part.

    Attributes
    ----------
    part : Part
    state : "ok", "missing", "ill" or "untested"
    detail : str
        Its version or place, or what went wrong.
    """

    part: Part
    state: State
    detail: str

    def to_dict(self) -> dict[str, object]:
        """Return the finding as plain data, ready for JSON."""
        part = self.part
        mends = None if self.state == "ok" else part.mends
        return {
            "name": part.name,
            "state": self.state,
            "detail": self.detail,
            "serves": part.serves,
            "needed": part.needed,
            "mends": mends,
        }


def _extra(name: str) -> str:
    return f'pip install "checkpoint-scheduler[{name}]"'


_AGAIN = "pip install --force-reinstall checkpoint-scheduler"
PARTS = (
    Part("numpy", "numpy", "everything", _AGAIN, needed=True),
    Part("numba", "numba", "the kernels of the solvers", _AGAIN, needed=True),
    Part("networkx", "networkx", "graph files of other tools", _AGAIN, needed=True),
    Part("PuLP", "pulp", "integer programs", _AGAIN, needed=True),
    Part("HiGHS", "highspy", "bounds and proofs", 'pip install "highspy>=1.10,<1.14"'),
    Part("CBC", "pulp", "bounds where HiGHS is missing", _AGAIN, trial=_CBC),
    Part(
        "numba's cache",
        "numba",
        "kernels that are compiled once, not in every process",
        "set NUMBA_CACHE_DIR to a folder that can be written to",
        trial=_CACHE,
    ),
    Part("torch", "torch", "tracing and training", _extra("torch")),
    Part("GPU", "torch", "training on a GPU", "none is needed; for one, install torch built for it", trial=_GPU),
    Part("matplotlib", "matplotlib", "pictures and reports", _extra("plot")),
    Part("transformers", "transformers", "the models called hf-...", _extra("models")),
    Part("OR-tools", "ortools", 'the solver "moccasin"', _extra("cpsat")),
    Part("pandas", "pandas", "tables as data frames", _extra("tables")),
)


_PROVERS = frozenset(("HiGHS", "CBC"))


def examine(parts: Iterable[Part] = PARTS) -> tuple[Finding, ...]:
    """Try every part and return what was found, in their order; the first is Python itself."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return (_python(), *pool.map(_finding, parts))


def is_well(findings: Iterable[Finding]) -> bool:
    """Return whether plans can be made and proven here: no needed part is missing or ill, and HiGHS or CBC works."""
    findings = tuple(findings)
    works = {finding.part.name for finding in findings if finding.state in ("ok", "untested")}
    return all(finding.part.name in works for finding in findings if finding.part.needed) and bool(works & _PROVERS)


def mending(error: ImportError) -> str:
    """Return what mends that a part is not installed, in one line.

    Parameters
    ----------
    error : ImportError
        What an import of the package, or of a part of it, raised.

    Raises
    ------
    ImportError
        The error itself, if it is of something else.
    """
    if isinstance(error, MissingExtraError):
        return str(error)
    for part in PARTS:
        if part.module == error.name:
            return f"{part.name} is not installed; it is needed for {part.serves}: {part.mends}"
    raise error


def refusal(error: ImportError) -> Callable[[str], NoReturn]:
    """Return a module's `__getattr__` that says of every name what mends the error; see `mending`."""
    message = mending(error)

    def refuse(name: str) -> NoReturn:
        raise MissingExtraError(message)

    return refuse


def _python() -> Finding:
    version = platform.python_version()
    part = Part("Python", "sys", "everything", f"tested with Python {', '.join(TESTED_PYTHON)}", needed=True)
    return Finding(part, "ok" if version.rpartition(".")[0] in TESTED_PYTHON else "untested", version)


def _finding(part: Part) -> Finding:
    if find_spec(part.module) is None:
        return Finding(part, "missing", "not installed")
    trial = part.trial or f"import {part.module}, importlib.metadata as m; print(m.version({part.module!r}))"
    command, env = [sys.executable, "-c", trial], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=env)
    except subprocess.TimeoutExpired:
        return Finding(part, "ill", f"no answer in {SECONDS:g} s")
    if ran.returncode:
        *_, said = ran.stderr.strip().splitlines() or [f"ended with exit code {ran.returncode}"]
        return Finding(part, "ill", said)
    found = ran.stdout.strip()
    if not found:
        return Finding(part, "missing", "none found")
    if part.name == "torch" and found.partition("+")[0] not in TESTED_TORCH:
        return Finding(part, "untested", f"{found}; tested with {', '.join(TESTED_TORCH)}")
    return Finding(part, "ok", found)
