"""Costs of operator calls that were measured on this machine, kept in a file for the next trace.

The file holds the newest `MAX_ENTRIES` costs by a digest of the call and of what its time
depends on: operator, shapes, strides, dtypes and constants; device, torch version, threads and
settings. Several processes may use it: it is replaced as a whole, and read again just before.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from scheduler.errors import GraphFormatError
from scheduler.files import read_json, write_text
from scheduler.units import format_bytes

MAX_ENTRIES = 20_000
"""Costs in the file, about 80 bytes each; the ones that were not used for longest are dropped first."""

VARIABLE = "SCHEDULER_COSTS_FILE"
"""Environment variable with the path of the file, or "off" to keep nothing."""

_FORMAT = 1
"""Changes with what is measured, so that costs measured otherwise are not used."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What was measured for one call.

    Attributes
    ----------
    seconds : float or None
        None if the time was not measured.
    spread : float
        The median of all runs over the shortest ones, minus 1: how far the time may be noise.
    workspace_bytes : int or None
        None if the workspace was not measured.
    """

    seconds: float | None
    spread: float
    workspace_bytes: int | None

    def or_else(self, other: Cost | None) -> Cost:
        """Return this cost, with what was not measured from another one."""
        if other is None:
            return self
        seconds, spread = (self.seconds, self.spread) if self.seconds is not None else (other.seconds, other.spread)
        known = other.workspace_bytes if self.workspace_bytes is None else self.workspace_bytes
        return Cost(seconds, spread, known)


def costs_file() -> Path | None:
    """Return the path of the file, in the user's folder for caches by default; None if nothing is kept."""
    given = os.environ.get(VARIABLE)
    if given is not None:
        return None if given in ("", "off") else Path(given)
    cache = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # a user without a home
        return (Path(cache) if cache else Path.home() / ".cache") / "checkpoint-scheduler" / "costs.json"
    return None


def describe_file() -> str:
    """Return the path and the size of the file in one line."""
    path = costs_file()
    if path is None:
        return f"nothing is kept ({VARIABLE}={os.environ.get(VARIABLE, '')})"
    with contextlib.suppress(OSError):
        return f"{path}, {format_bytes(path.stat().st_size)}"
    return f"{path}, not written yet"


def read_costs(signatures: Iterable[str], conditions: str) -> dict[str, Cost]:
    """Return the kept costs of calls, those that are known.

    Parameters
    ----------
    signatures : iterable of str
    conditions : str
        What times depend on in addition to the call; see `measuring_conditions`.
    """
    path = costs_file()
    entries = {} if path is None else _read(path)
    keys = {signature: _key(signature, conditions) for signature in signatures}
    return {signature: entries[key] for signature, key in keys.items() if key in entries}


def keep_costs(costs: Mapping[str, Cost], conditions: str) -> None:
    """Add costs to the file, or replace them; a file that cannot be written is left out with a warning.

    Parameters
    ----------
    costs : mapping of str to Cost
        By signature.
    conditions : str
        As for `read_costs`.
    """
    path = costs_file()
    if path is None or not costs:
        return
    entries = _read(path)
    for signature, cost in costs.items():
        key = _key(signature, conditions)
        entries[key] = cost.or_else(entries.pop(key, None))  # the newest are last
    kept = list(entries.items())[-MAX_ENTRIES:]
    data = {key: [cost.seconds, cost.spread, cost.workspace_bytes] for key, cost in kept}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"format": _FORMAT, "costs": data}, separators=(",", ":")))
    except OSError as error:
        warnings.warn(
            f"measured costs cannot be kept in {path}: {error.strerror}. Set {VARIABLE} to a writable path, or to"
            ' "off" to measure at each trace',
            stacklevel=2,
        )


def measuring_conditions(devices: Iterable[torch.device]) -> str:
    """Return what the times of calls on these devices depend on in addition to the calls."""
    names = {_processor()}
    names |= {torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"}
    names |= {device.type for device in devices}
    settings = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
    )
    return f"{torch.__version__} {sorted(names)} {settings}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _key(signature: str, conditions: str) -> str:
    return blake2b(f"{conditions}\n{signature}".encode(), digest_size=12).hexdigest()


def _read(path: Path) -> dict[str, Cost]:
    """Return all entries of a file; one that does not exist, is of another format or is broken has none."""
    if not path.exists():
        return {}
    try:
        data = read_json(path)
        if not isinstance(data, dict):
            raise ValueError(f"they must be in an object, got {type(data).__name__}")
        if data.get("format") not in (None, _FORMAT):
            return {}
        return {str(key): _parse(entry) for key, entry in data["costs"].items()}
    except (GraphFormatError, AttributeError, KeyError, TypeError, ValueError) as error:
        warnings.warn(f"measured costs in {path} are ignored and will be written anew: {error}", stacklevel=2)
        return {}


def _parse(entry: object) -> Cost:
    if not isinstance(entry, list) or len(entry) != 3:
        raise ValueError(f"a cost must have three numbers, got {entry!r}")
    seconds, spread, workspace_bytes = entry
    if not (seconds is None or (isinstance(seconds, float) and seconds >= 0)):
        raise ValueError(f"a time must be in seconds, got {seconds!r}")
    if not (isinstance(spread, float) and spread >= 0):
        raise ValueError(f"a spread must be a ratio, got {spread!r}")
    if not (workspace_bytes is None or (isinstance(workspace_bytes, int) and workspace_bytes >= 0)):
        raise ValueError(f"a workspace must be in bytes, got {workspace_bytes!r}")
    return Cost(seconds, spread, workspace_bytes)
