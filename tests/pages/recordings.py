"""The recorded measurements: CSV files in tests/benchmarks, and what `recorded.csv` says of each."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.support.paths import BENCHMARKS, ROOT

MANIFEST = BENCHMARKS / "recorded.csv"
_MEASURED = ("scheduler", ":!scheduler/export", ":!scheduler/plots")
"""The code that tables measure: the package without its pages and plots, as paths for git."""


@dataclass(frozen=True)
class Recording:
    """How a table was recorded.

    Attributes
    ----------
    table : str
        Name of the CSV file, without its suffix.
    command : str
        Line of a shell, run in the root of the repository, that writes the file.
    commit : str
        The commit whose code was measured; with "+changes" if files had been changed since.
    date : str
        Day in UTC.
    machine : str
        The machine, and how busy it was.
    """

    table: str
    command: str
    commit: str
    date: str
    machine: str

    @property
    def path(self) -> Path:
        """The CSV file."""
        return BENCHMARKS / f"{self.table}.csv"

    def is_older_than_the_code(self) -> bool:
        """Return whether a later commit has changed what is measured; False if git cannot tell."""
        commit = self.commit.partition("+")[0]
        return _git("rev-list", "--count", f"{commit}..HEAD", "--", *_MEASURED) not in ("", "0")


def read_manifest() -> dict[str, Recording]:
    """Return what is known of each table, by its name."""
    with MANIFEST.open(newline="") as file:
        return {row["table"]: Recording(**row) for row in csv.DictReader(file)}


def write_manifest(recordings: dict[str, Recording]) -> None:
    """Write what is known of each table, in the order of their names."""
    with MANIFEST.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Recording)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(recordings[name]) for name in sorted(recordings))


def table_names() -> list[str]:
    """Return the names of all CSV files of measurements."""
    return sorted(path.stem for path in BENCHMARKS.glob("*.csv") if path != MANIFEST)


def read_cells(name: str) -> list[list[str]]:
    """Return the lines of a table, its head first."""
    with (BENCHMARKS / f"{name}.csv").open(newline="") as file:
        return list(csv.reader(file))


def read_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table under the names in its head."""
    head, *rows = read_cells(name)
    return [dict(zip(head, row, strict=True)) for row in rows]


def record(recording: Recording) -> Recording:
    """Measure a table anew, as a whole, and return what is now known of it.

    Raises
    ------
    subprocess.CalledProcessError
        If the command fails; the file is then what it was.
    """
    begun = replace(
        recording,
        commit=_git("rev-parse", "--short", "HEAD")
        + ("+changes" if _git("status", "--porcelain", "--", *_MEASURED) else ""),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        machine=machine(),
    )
    before = recording.path.read_bytes() if recording.path.exists() else None
    recording.path.unlink(missing_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    try:
        subprocess.run(["bash", "-ec", recording.command], cwd=ROOT, env=environment, check=True)
    except BaseException:
        if before is not None:
            recording.path.write_bytes(before)
        raise
    return begun


def machine() -> str:
    """Return processor, cores and memory of this machine, and how many processes wait for a core."""
    model, memory = platform.processor() or platform.machine(), ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), model)
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        memory = f", {pages / 2**30:.0f} GiB"
    return f"{os.cpu_count()} cores of {model}{memory}, load {os.getloadavg()[0]:.1f}"


def _git(*arguments: str) -> str:
    """Return what git prints, or nothing if it fails or is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
