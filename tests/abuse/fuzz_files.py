"""Coverage-guided fuzzing of graph, chain and plan files, with atheris where it is installed (pip install atheris).

    python tests/abuse/fuzz_files.py -runs=100000

Stops at the first error that is none of ours and at the first plan that is accepted and is not the one it was.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    """Fuzz, from the whole files of every format on."""
    import atheris

    with atheris.instrument_imports(include=["scheduler"]):
        import scheduler as sc
    from tests.abuse.hostile import seeds
    from tests.support.plans import layered_plan

    whole = layered_plan()

    def check(content: bytes) -> None:
        path.write_bytes(content)
        with contextlib.suppress(sc.SchedulerError):
            read = sc.read_graph(path)
            assert type(read).from_dict(read.to_dict()) == read
        with contextlib.suppress(sc.SchedulerError):
            assert sc.Plan.load(path) == whole

    with tempfile.TemporaryDirectory() as folder:
        corpus, path = Path(folder, "corpus"), Path(folder, "file")
        corpus.mkdir()
        for name, content in seeds().items():
            (corpus / name.replace(" ", "-")).write_bytes(content)
        atheris.Setup([*sys.argv, "-max_len=20000", str(corpus)], check)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
