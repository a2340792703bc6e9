"""The command `scheduler`, also run by `python -m scheduler`."""

from __future__ import annotations

import sys

from scheduler.doctor import explain_import_error


def main() -> int:
    """Run the command line; if a needed package is missing, print in one line how to install it."""
    try:
        from scheduler.cli import main as run

        return run()
    except ImportError as error:
        print(explain_import_error(error), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
