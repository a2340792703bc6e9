"""Make the tables and figures of the pages, or record the measurements that they show.

    python -m tests.pages                    make all tables, facts and figures of README and the guide
    python -m tests.pages record TABLE ...   measure these tables anew, then do the same
    python -m tests.pages record all         measure all tables, one after the other

Measure on a machine with nothing else running. GRAPHS names the folder of the published graphs.
"""

from __future__ import annotations

import sys

from tests.pages.figures import figure_names, svg_of
from tests.pages.generate import FIGURES, generated, page_paths
from tests.pages.recordings import read_manifest, record, write_manifest


def write() -> None:
    """Write all pages and figures anew."""
    for path in page_paths():
        path.write_text(generated(path.read_text()))
    FIGURES.mkdir(exist_ok=True)
    for name in figure_names():
        (FIGURES / f"{name}.svg").write_text(svg_of(name))


def main(arguments: list[str]) -> None:
    """Run the command."""
    if arguments and (arguments[0] != "record" or len(arguments) == 1):
        sys.exit(__doc__)
    manifest = read_manifest()
    wanted = list(manifest) if arguments[1:] == ["all"] else arguments[1:]
    if unknown := [name for name in wanted if name not in manifest]:
        sys.exit(f"tests/benchmarks/recorded.csv has no {unknown[0]}: add a line with its name and command")
    for name in wanted:
        print(f"recording {name}", file=sys.stderr)
        manifest[name] = record(manifest[name])
        write_manifest(manifest)
    write()


if __name__ == "__main__":
    main(sys.argv[1:])
