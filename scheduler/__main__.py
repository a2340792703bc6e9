"""The command `scheduler`, also run by `python -m scheduler`."""

from __future__ import annotations

import signal
import sys
from multiprocessing import active_children

from scheduler.doctor import explain_import_error


def main() -> int:
    """Run the command line; if a needed package is missing, print in one line how to install it.

    Ctrl-C that no search takes ends the process at once.
    """
    try:
        from scheduler.cli import main as run

        return run()
    except ImportError as error:
        print(explain_import_error(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return _end_by_interrupt()


def _end_by_interrupt() -> int:
    """End this process and its workers as Ctrl-C ends a program that does not handle it.

    It may have come while this thread held a lock that a thread of the pool of workers waits for; Python would wait
    for that thread.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for worker in active_children():
        worker.kill()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
    return 128 + signal.SIGINT  # if that does not end it


if __name__ == "__main__":
    sys.exit(main())
