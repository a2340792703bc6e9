"""Build the site into a folder: python .ci/docs/build.py FOLDER. Warnings are errors.

Needs the extra `docs`. The sources are assembled in FOLDER/source, the pages begin at
FOLDER/html/index.html.
"""

from __future__ import annotations

import importlib
import inspect
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import scheduler.plots  # noqa: E402
import scheduler.pytorch  # noqa: E402
from scheduler.solvers.registry import MODULES  # noqa: E402
from tests.pages.generate import generated  # noqa: E402

PACKAGES = (scheduler, scheduler.zoo, scheduler.pytorch, scheduler.plots)
"""The packages whose `__all__` is the public API."""

REFERENCE = (
    *(package.__name__ for package in PACKAGES),
    "scheduler.pytorch.models.catalog",
    "scheduler.export.html_report",
    "scheduler.export.chrome_trace",
    "scheduler.comparisons.table",
    "scheduler.problem",
    "scheduler.solution",
    "scheduler.solvers.registry",
    "scheduler.errors",
    *sorted(set(MODULES.values())),
)
"""The modules of the API reference."""


CHAPTERS = {
    "Use": "start will_it_fit budgets plans guards granularity modules compile trainers distributed",
    "Look up": "commands troubleshooting glossary plan_file robustness",
    "Schedules": "solvers comparing extending related",
    "Measurements": "measurements measured_schedules measured_times measured_gpu measured_peers measured_fits",
    "Project": "architecture contributing changelog citation",
}
"""The pages of the guide in the order of the menu. Pages that are not named come first in the last chapter."""


def menu() -> str:
    """Return the hidden tables of contents: the chapters, the notebooks and the reference."""
    guide, notebooks = "notebooks/guide", sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    named = {page for pages in CHAPTERS.values() for page in pages.split()}
    others = sorted({path.stem for path in (ROOT / guide).glob("*.md")} - named)
    entries = {title: [f"{guide}/{page}" for page in pages.split()] for title, pages in CHAPTERS.items()}
    entries["Project"] = [f"{guide}/{page}" for page in others] + entries["Project"]
    entries["Notebooks"] = [f"notebooks/{name}" for name in notebooks]
    entries["Reference"] = [f"reference/{name}" for name in REFERENCE]
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"
        for title, pages in entries.items()
    )


def assemble(source: Path) -> None:
    """Write the sources of the site: pages as they are, with tables made anew, and pages of the reference."""
    shutil.copytree(ROOT / "notebooks", source / "notebooks", ignore=shutil.ignore_patterns(".*", "__pycache__"))
    pages = {page: page for page in (source / "notebooks").rglob("*.md")}
    pages[source / "index.md"] = ROOT / "README.md"
    for page, origin in pages.items():
        page.write_text(generated(origin.read_text()))
    with (source / "index.md").open("a") as index:
        index.write(menu())
    (source / "reference").mkdir()
    for name in REFERENCE:
        (source / "reference" / f"{name}.md").write_text(reference_page(name))


def reference_page(name: str) -> str:
    """Return the page of a module: all names in its `__all__`, or what it defines and no package exports."""
    module = importlib.import_module(name)
    if module in PACKAGES:
        options = "   :members:\n   :imported-members:\n"
    else:
        exported = {id(getattr(package, public)) for package in PACKAGES for public in package.__all__}
        own = [
            public
            for public, value in vars(module).items()
            if (inspect.isclass(value) or inspect.isfunction(value))
            and not public.startswith("_")
            and value.__module__ == name
            and id(value) not in exported
        ]
        options = f"   :members: {', '.join(own)}\n" if own else ""
    return f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n{options}```\n"


def main(folder: Path) -> int:
    """Assemble and build, and return Sphinx's exit status."""
    source = folder / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    assemble(source)
    options = ["-W", "--keep-going", "-q", "-j", "auto", "-c", str(Path(__file__).parent)]
    return subprocess.call([sys.executable, "-m", "sphinx", *options, str(source), str(folder / "html")])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
