"""`scheduler`, or `python -m scheduler`, is the command line."""

from __future__ import annotations

import sys

from scheduler.doctor import mending


def main() -> int:
    """Run the command line; where what it builds on is not installed, say in one line what mends that."""
    try:
        from scheduler.cli import main as run

        return run()
    except ImportError as error:
        print(mending(error), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
