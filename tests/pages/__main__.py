"""Make what the pages contain that no one writes by hand, or record the measurements that they show.

    python -m tests.pages                    make all tables, facts and figures of README and the guide
    python -m tests.pages outputs            run the examples of all pages, and write what they print
    python -m tests.pages record TABLE ...   measure these tables anew, then make all tables and figures
    python -m tests.pages record all         measure all tables, one after the other

Measure on a machine with nothing else running. GRAPHS names the folder of the published graphs.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile

from tests.pages.examples import run_page
from tests.pages.figures import figure_names, svg_of
from tests.pages.generate import FIGURES, generated, page_paths
from tests.pages.recordings import read_manifest, record, write_manifest
from tests.support.fake_clock import SECONDS_PER_LOOK, FakeClock
from tests.support.paths import README


def write() -> None:
    """Write all pages and figures anew."""
    for path in page_paths():
        path.write_text(generated(path.read_text()))
    FIGURES.mkdir(exist_ok=True)
    for name in figure_names():
        (FIGURES / f"{name}.svg").write_text(svg_of(name))


def write_outputs() -> None:
    """Run the examples of README and the guide, and write what they print below them."""
    os.environ["SCHEDULER_COSTS_FILE"] = "off"
    for path in page_paths():
        page = path.read_text()
        # What README shows is measured; in the guide, time limits are numbers of looks at the clock.
        clock = contextlib.nullcontext() if path == README else FakeClock(seconds_per_look=SECONDS_PER_LOOK)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), clock:
            for block, printed in run_page(page, path.stem, run_long=path == README):
                if block.output is not None:
                    below = f"{block.code}```\n\n```text\n"
                    page = page.replace(below + block.output, below + printed)
        path.write_text(page)


def write_recordings(wanted: list[str]) -> None:
    """Measure tables anew, and write how."""
    manifest = read_manifest()
    names = list(manifest) if wanted == ["all"] else wanted
    if unknown := [name for name in names if name not in manifest]:
        sys.exit(f"tests/benchmarks/recorded.csv has no {unknown[0]}: add a line with its name and command")
    for name in names:
        print(f"recording {name}", file=sys.stderr)
        manifest[name] = record(manifest[name])
        write_manifest(manifest)


def main(arguments: list[str]) -> None:
    """Run the command."""
    match arguments:
        case []:
            write()
        case ["outputs"]:
            write_outputs()
        case ["record", _, *_]:
            write_recordings(arguments[1:])
            write()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
